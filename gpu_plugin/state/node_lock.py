"""Two locks that allow only one daemon on a node. The kernel unlocks them when the process ends.

Two daemons that register the same resource replace each other, and when the daemon that registered last stops, the node has 0
devices. So a daemon serves only while it holds the lock of its state directory (a file there, which describes the daemon) and
the lock of the kubelet's device plugin directory (the directory itself: the kubelet removes files from it when it starts).

A takeover passes the node from a running daemon to a new daemon. The order of the locks is the whole protocol:

1. The new daemon locks the claim and the handover, two more files, and waits for the lock of the state directory.
2. The running daemon finds the claim locked. It ends all parts that write or take orders, unlocks the state directory, and waits
   for the handover. It still watches the GPUs and answers the kubelet.
3. The new daemon reads the state, notes in the lock's file that it registers, and registers. When the kubelet has its lists, it
   unlocks the handover.
4. The former daemon gets the handover. If the state directory is locked, the new daemon serves: the former daemon writes the
   faults that it found since step 2, ends, and unlocks the kubelet's directory. If the state directory is not locked, the new
   daemon is dead, and the former daemon continues. It registers again if the new daemon may have registered.
5. The new daemon gets the kubelet's directory, reads the faults, and unlocks the claim.

The kernel unlocks each file when its process ends, so the death of a daemon at any step leads to the same cases. A third
daemon waits for the claim until the takeover is over.
"""

import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from enum import Enum
from pathlib import Path

import msgspec

from gpu_plugin.config.times import utc
from gpu_plugin.kubelet.socket import PREFIX
from gpu_plugin.runtime.control import LOCK
from gpu_plugin.runtime.peer import peer_of
from gpu_plugin.runtime.printable import printable
from gpu_plugin.runtime.regular_file import open_file
from gpu_plugin.state.directory import Identity, identity, is_named, open_own, set_aside

log = logging.getLogger(__name__)

# Files in the state directory that a new daemon locks from its claim until the takeover is over, or the kubelet has its lists.
CLAIM, HANDOVER = "takeover.lock", "handover.lock"

RETRY = 0.25  # seconds between attempts where no blocking call can be used

_MAX_BYTES = 4096


class Owner(msgspec.Struct, frozen=True):
    """The daemon that holds a lock: its own process id and host name (in a pod, the pod's name), and its start in Unix time."""

    pid: int
    host: str = ""
    version: str = ""
    since: float = 0.0
    directory: str = ""
    leaving: bool = False
    """True if this daemon has handed the node over and only answers the kubelet until the next daemon is registered."""
    registers: bool = False
    """True if a new daemon may have registered since the takeover began."""

    def __str__(self) -> str:
        where = f" on {printable(self.host)}" if self.host else ""
        began = utc(self.since) if self.since else "an unknown time"
        return f"process {self.pid}{where}, version {printable(self.version) or 'unknown'}, running since {began}"


class Outcome(Enum):
    """The result of a takeover."""

    NEW_SERVES = "the new daemon serves"
    NEVER_REGISTERED = "the new daemon ended before it registered"
    REGISTERED = "the new daemon ended, and the kubelet may have its lists"


class NodeLock:
    """Both locks of one daemon. Calls block as long as the file systems of the two directories do."""

    def __init__(self, state_dir: Path, directory: Path, version: str) -> None:
        """`directory` is the kubelet's device plugin directory, with kubelet.sock and the sockets of this plugin."""
        self._state_dir = state_dir
        self._directory = directory
        self._version = version
        self._file: int | None = None
        self._opened: os.stat_result | None = None
        """The state directory's stat at the time when its file was locked."""
        self._entry: int | None = None
        self._claim: int | None = None
        self._handover: int | None = None
        self.former_serves = False
        """True while the former daemon still answers the kubelet and therefore has the kubelet's directory locked."""
        self._unlocked: set[str] = set()
        self._listening: dict[Identity, int] = {}
        """The process id of the listener of each socket of another daemon that this daemon connected to."""

    @property
    def has_state(self) -> bool:
        """True if this daemon has the lock of the state directory."""
        return self._file is not None

    def take(self, *, make: bool = True) -> str:
        """Lock both directories if they are free. Return which daemon has a lock, and the advice for the user; empty on success.

        A directory that cannot be locked by any process counts as locked, after a warning in the log. Without `make`, no file is
        created or written, and a lock without a file counts as free.
        """
        try:
            if self._file is None and not self._take_file(make=make):
                return (
                    f"another daemon uses the state directory {self._state_dir}: {self._owner_text()}. "
                    "Stop one of the two daemons, or start this daemon with another --state-dir and --device-plugin-dir"
                )
        except OSError as error:
            self._warn_not_lockable(str(self._state_dir / LOCK), error)
        return self.take_directory()

    def take_directory(self) -> str:
        """Lock only the kubelet's directory. Return which daemon has the lock, as `take` does."""
        if self.former_serves:
            return ""
        try:
            if self._entry is None and not self._take_directory():
                return (
                    f"another daemon serves {self._directory}: {self._listeners_text()}. "
                    "Stop one of the two daemons: a kubelet accepts each resource from only one plugin"
                )
        except FileNotFoundError:
            return ""  # the directory does not exist yet; the code that waits for it logs that
        except OSError as error:
            self._warn_not_lockable(str(self._directory), error)
        return ""

    def follow(self) -> str:
        """Lock the directories again if other directories are at the paths now. Return the same text as `take`."""
        if self._file is not None and not is_named(self._state_dir / LOCK, os.fstat(self._file)):
            try:
                moved = self._opened is None or not os.path.samestat(self._opened, self._state_dir.stat())
            except OSError:
                moved = True
            if moved:
                log.warning(
                    "the state directory %s was renamed, removed or replaced: this daemon writes all its state there again",
                    self._state_dir,
                )
            os.close(self._file)
            self._file = None
        if self._entry is not None:
            try:
                there = os.stat(self._directory)  # noqa: PTH116 - cheaper than Path.stat
            except OSError:  # the directory does not exist, so no daemon can serve there
                return "" if self._file is not None else self.take()
            if not os.path.samestat(there, os.fstat(self._entry)):
                os.close(self._entry)
                self._entry = None
        return self.take()

    def wait(self, *, claims: bool = False) -> None:
        """Block until the other daemon has unlocked the state directory or, if this daemon has that, the kubelet's directory.

        With `claims`, request a handover from the running daemon. Return without the lock if the file or directory does
        not exist.
        If the state directory cannot be locked by any process, wait only for the kubelet's directory.
        """
        if self._file is not None:
            self.wait_directory()
            return
        if claims:
            try:
                self.claim()
            except OSError as error:
                self.unclaim()
                log.warning("no handover can be requested from the running daemon: %s", error.strerror or error)
        try:
            descriptor = _lock(open_own(self._state_dir / LOCK, os.O_RDWR))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError:  # `take` logs it
            self.wait_directory()
            return
        if self._claim is None and (self._claim_is_locked() or self._former_answers()):
            # Leave the lock to the new daemon, which has the claim, or to the former daemon if that new daemon is dead.
            os.close(descriptor)
            time.sleep(RETRY)
        elif not self._keep_file(descriptor):
            time.sleep(RETRY)  # the daemon that replaced the file may not have locked it yet

    def wait_directory(self) -> bool:
        """Lock the kubelet's directory, and block while another daemon has it. Return True if another daemon had it."""
        waited = False
        with suppress(FileNotFoundError):
            waited = not self._take_directory()
            if waited:
                self._entry = _lock(os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self.former_serves = False
        return waited

    def claim(self) -> None:
        """Lock the claim, which requests a handover. Blocks while another new daemon has it. Raises OSError."""
        self._claim = self._lock_own(CLAIM)
        self._handover = self._lock_own(HANDOVER)
        request = self._state_dir / f"{CLAIM}.request"
        request.touch()  # the running daemon watches the names in the directory
        request.unlink(missing_ok=True)

    def registers(self) -> None:
        """Write into the lock's file that the kubelet may have this daemon's lists instead of the former daemon's lists.

        If the write fails, the former daemon finds that out only at its next request for the kubelet's devices.
        """
        if self._file is not None:
            with suppress(OSError):  # the write succeeds on a full disk: the text is not longer than before
                self._write_owner(self._file, leaving=self.former_serves, registers=True)

    def serves(self) -> None:
        """Unlock the handover: the kubelet has the lists of this daemon, or no former daemon serves."""
        if self._handover is not None:
            if self._file is not None:
                with suppress(OSError):  # the lock of the kubelet's directory shows the same
                    # If this daemon ends before the handover is unlocked, the former daemon continues and must register again.
                    self._write_owner(self._file, leaving=False, registers=True)
            os.close(self._handover)
            self._handover = None

    def unclaim(self) -> None:
        """Unlock the claim: the takeover is over, and the next daemon may claim."""
        self.serves()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def claimed(self) -> bool:
        """Return True if a new daemon requests a handover. Returns False while this daemon takes over from another daemon."""
        return self._claim is None and self._file is not None and self._claim_is_locked()

    def write_leaving(self, *, leaving: bool) -> bool:
        """Write into the lock's file whether this daemon hands over. Return False, with the file unchanged, on failure."""
        if self._file is None:
            return False
        try:
            self._write_owner(self._file, leaving=leaving)
        except OSError:
            return False
        return True

    def hand_over(self) -> None:
        """Unlock only the state directory: the next daemon reads and writes it from now on."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def handed_over(self) -> Outcome:
        """Block until the new daemon serves or is dead. If it is dead, lock the state directory again."""
        try:
            handover = self._lock_own(HANDOVER)
            try:
                new = self._last_owner()
                if not self._take_file(make=True):
                    return Outcome.NEW_SERVES
                return Outcome.REGISTERED if new is None or new.registers else Outcome.NEVER_REGISTERED
            finally:
                os.close(
                    handover
                )  # only now: a third daemon that locks the handover may lock the state directory first
        except OSError as error:
            self._warn_not_lockable(str(self._state_dir), error)
            return Outcome.NEW_SERVES

    def release(self) -> None:
        """Unlock everything. Keep the files: a removal could affect the next daemon, which may have locked them already."""
        for descriptor in (self._entry, self._file, self._handover, self._claim):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._entry = self._handover = self._claim = None

    def _take_file(self, *, make: bool) -> bool:
        path = self._state_dir / LOCK
        if make:
            self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            set_aside(path)
        try:
            descriptor = open_own(path, os.O_RDWR | (os.O_CREAT if make else 0))
        except (FileNotFoundError, NotADirectoryError):
            if make:
                raise
            return True
        if not _locked(descriptor):
            return False
        if make:
            return self._keep_file(descriptor)
        if not is_named(path, os.fstat(descriptor)):  # the file was replaced since it was opened
            os.close(descriptor)
            return False
        self._file = descriptor
        return True

    def _keep_file(self, descriptor: int) -> bool:
        """Store the locked file's descriptor and describe this daemon in it. Return False if the path has another file."""
        if not is_named(self._state_dir / LOCK, os.fstat(descriptor)):
            os.close(descriptor)
            return False
        self._file, self._opened = descriptor, self._state_dir.stat()
        self.former_serves = self.former_serves or self._former_answers()
        # If this daemon ends before the kubelet has its list, the next daemon takes over from the same former daemon.
        before = self._last_owner()
        registers = self.former_serves and before is not None and before.registers
        with suppress(OSError):  # on a full disk, the lock works without the description
            self._write_owner(descriptor, leaving=self.former_serves, registers=registers)
        return True

    def _write_owner(self, descriptor: int, *, leaving: bool, registers: bool = False) -> None:
        own = Owner(
            os.getpid(), socket.gethostname(), self._version, time.time(), str(self._directory), leaving, registers
        )
        text = msgspec.json.encode(own) + b"\n"
        os.pwrite(descriptor, text, 0)  # a full disk keeps the former text
        os.ftruncate(descriptor, len(text))

    def _take_directory(self) -> bool:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not _locked(descriptor):
            return False
        self._entry = descriptor
        return True

    def _former_answers(self) -> bool:
        """Return True if the daemon that handed over last still answers the kubelet. If not, lock the kubelet's directory."""
        former = self._last_owner()
        if former is None or not former.leaving or former.directory != str(self._directory) or self._entry is not None:
            return False
        try:
            return not self._take_directory()
        except OSError:
            return False

    def _lock_own(self, name: str) -> int:
        """Lock a file of the takeover and return its descriptor. Blocks while another process has the lock. Raises OSError."""
        path = self._state_dir / name
        set_aside(path)
        return _lock(open_own(path, os.O_RDWR | os.O_CREAT))

    def _claim_is_locked(self) -> bool:
        """Return True if another daemon has the claim."""
        try:
            descriptor = open_own(self._state_dir / CLAIM, os.O_RDWR)
            if not _locked(descriptor):
                return True
        except OSError:  # there was no takeover yet, or the file system has no locks
            return False
        os.close(descriptor)
        return False

    def _owner_text(self) -> str:
        """Return a description of the daemon that wrote the lock's file last."""
        owner = self._last_owner()
        return "an unknown process" if owner is None else str(owner)

    def _last_owner(self) -> Owner | None:
        """Return the daemon that wrote the lock's file last; None if the file cannot be read."""
        try:
            with open_file(self._state_dir / LOCK, links=False) as stream:
                text = stream.read(_MAX_BYTES).decode()  # msgspec ignores an unknown key with invalid UTF-8
            return msgspec.json.decode(text, type=Owner)
        except (OSError, ValueError, RecursionError):  # RecursionError: the JSON is nested too deeply
            return None

    def _listeners_text(self) -> str:
        """Return a description of the processes that listen on this plugin's sockets in the directory.

        The process ids of another container are not visible in a container.
        """
        there = {made: path for path in self._directory.glob(f"{PREFIX}*.sock") if (made := identity(path)) is not None}
        # Connect to each socket only once: a connection in its queue takes the place of a connection of the kubelet.
        self._listening = {made: pid for made, pid in self._listening.items() if made in there}
        busy = False
        for made, path in there.items():
            if made in self._listening:
                continue
            try:
                self._listening[made] = _listener(path)
            except BlockingIOError:
                busy = True
            except OSError:  # a dead socket, or a socket without a listener yet
                continue
        pids = set(self._listening.values())
        if 0 in pids:
            return "a process of another container"
        if pids:
            return " and ".join(f"process {pid}" for pid in sorted(pids))
        return "a process that accepts no connection now" if busy else "it has no socket there yet"

    def _warn_not_lockable(self, path: str, error: OSError) -> None:
        if path not in self._unlocked:
            self._unlocked.add(path)
            log.warning(
                "%s cannot be locked, so a second daemon would not be detected: %s", path, error.strerror or error
            )


def _listener(path: Path) -> int:
    """Connect to a socket and return the process id of its listener; 0 for a process of another container.

    Raises:
        BlockingIOError: the socket has a listener, and its backlog is full.
        OSError: the socket has no listener.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        probe.connect(str(path))
        return peer_of(probe)[0]


def _lock(descriptor: int) -> int:
    """Lock an open file and return its descriptor. Blocks while another process has the lock. Closes the file on OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _locked(descriptor: int) -> bool:
    """Lock an open file, or close it and return False if another process has the lock. Raises OSError if no lock is possible."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return False
        raise
    return True
