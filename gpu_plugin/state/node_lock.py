"""One daemon a node: two locks that the kernel drops when the process ends.

Two daemons that register the same resource take it from each other, and when the last registered daemon stops, the node has 0
devices. So a daemon serves only while it holds the lock of its state directory (a file there, which names the daemon) and the
lock of the kubelet's device plugin directory (the directory itself: the kubelet removes files from it when it starts).

A takeover passes the node from a running daemon to a new daemon. The order of the locks is the whole protocol:

1. The new daemon locks the claim and the handover, two more files, and waits for the lock of the state directory.
2. The running daemon finds the claim locked. It ends all parts that write or take orders, unlocks the state directory, and waits
   for the handover. It still watches the GPUs and answers the kubelet.
3. The new daemon reads the state, notes in the lock's file that it registers, and registers. When the kubelet has its lists, it
   unlocks the handover.
4. The former daemon gets the handover. If the state directory is locked, the new daemon serves: the former daemon writes down
   which faults it found since step 2, ends, and unlocks the kubelet's directory. If the state directory is not locked, the new
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
from gpu_plugin.control import LOCK
from gpu_plugin.kubelet.socket import PREFIX
from gpu_plugin.runtime.peer import peer_of
from gpu_plugin.runtime.printable import printable
from gpu_plugin.runtime.regular_file import open_file
from gpu_plugin.state.directory import Identity, identity, is_named, open_own, set_aside

log = logging.getLogger(__name__)

CLAIM = "takeover.lock"
"""The file in the state directory that a new daemon locks from its claim until the takeover is over."""

HANDOVER = "handover.lock"
"""The file in the state directory that a new daemon locks from its claim until the kubelet has its lists."""

RETRY = 0.25
"""Seconds between two tries where no blocking call can be used."""

_MAX_BYTES = 4096


class Owner(msgspec.Struct, frozen=True):
    """Who holds a lock: its process id and host name as it sees them itself (a pod's name in a pod), and since when."""

    pid: int
    host: str = ""
    version: str = ""
    since: float = 0.0
    directory: str = ""
    leaving: bool = False
    """Whether this daemon has handed the node over and only answers the kubelet until the next daemon is registered."""
    registers: bool = False
    """Whether a new daemon may have registered since the takeover began."""

    def __str__(self) -> str:
        where = f" on {printable(self.host)}" if self.host else ""
        began = utc(self.since) if self.since else "a time unknown"
        return f"process {self.pid}{where}, version {printable(self.version) or 'unknown'}, running since {began}"


class Outcome(Enum):
    """How a takeover ended."""

    NEW_SERVES = "the new daemon serves"
    NEVER_REGISTERED = "the new daemon ended before it registered"
    REGISTERED = "the new daemon ended, and the kubelet may have its lists"


class NodeLock:
    """Both locks of one daemon. Calls block for as long as the file systems of the two directories do."""

    def __init__(self, state_dir: Path, directory: Path, version: str) -> None:
        """Takes the state directory, and the directory of kubelet.sock and of our sockets."""
        self._state_dir = state_dir
        self._directory = directory
        self._version = version
        self._file: int | None = None
        self._opened: os.stat_result | None = None
        """The state directory as it was when its lock was taken."""
        self._entry: int | None = None
        self._claim: int | None = None
        self._handover: int | None = None
        self.former_serves = False
        """Whether the daemon before this one answers the kubelet still, and has the kubelet's directory locked for that."""
        self._unlocked: set[str] = set()
        self._listening: dict[Identity, int] = {}
        """The process behind each socket of another daemon, as far as it was asked."""

    @property
    def has_state(self) -> bool:
        """Whether the lock of the state directory is held."""
        return self._file is not None

    def take(self, *, make: bool = True) -> str:
        """Takes what is free of both locks. Returns who keeps us waiting and what to do; empty once both are ours.

        A directory that cannot be locked at all is no reason to serve nothing: the log names it once. Without `make`,
        nothing is made or written, and a lock whose file is not there is free.
        """
        try:
            if self._file is None and not self._take_file(make=make):
                return (
                    f"another daemon uses the state directory {self._state_dir}: {self._owner_text()}. "
                    "Stop one of the two, or give this one another --state-dir and --device-plugin-dir"
                )
        except OSError as error:
            self._warn_not_lockable(str(self._state_dir / LOCK), error)
        return self.take_directory()

    def take_directory(self) -> str:
        """Takes the lock of the kubelet's directory alone. Returns who keeps us waiting, as `take` does."""
        if self.former_serves:
            return ""
        try:
            if self._entry is None and not self._take_directory():
                return (
                    f"another daemon serves {self._directory}: {self._listeners_text()}. "
                    "Stop one of the two: a kubelet takes each resource from only one plugin"
                )
        except FileNotFoundError:
            return ""  # there is nothing to be served in yet, which is said where it is waited for
        except OSError as error:
            self._warn_not_lockable(str(self._directory), error)
        return ""

    def follow(self) -> str:
        """Locks the directories that bear the paths now, where they were made again. Returns who has one, as `take` does."""
        if self._file is not None and not is_named(self._state_dir / LOCK, os.fstat(self._file)):
            try:
                moved = self._opened is None or not os.path.samestat(self._opened, self._state_dir.stat())
            except OSError:
                moved = True
            if moved:
                log.warning(
                    "the state directory %s was renamed, removed or replaced: what this daemon knows is written there again",
                    self._state_dir,
                )
            os.close(self._file)
            self._file = None
        if self._entry is not None:
            try:
                there = os.stat(self._directory)  # noqa: PTH116 - as cheap as can be
            except OSError:  # gone: no daemon can serve there
                return "" if self._file is not None else self.take()
            if not os.path.samestat(there, os.fstat(self._entry)):
                os.close(self._entry)
                self._entry = None
        return self.take()

    def wait(self, *, claims: bool = False) -> None:
        """Blocks until the other daemon has unlocked the state directory or, if this daemon has that, the kubelet's directory.

        With `claims`, it asks the running daemon to hand over. Returns without the lock if the file or directory is not there.
        A state directory that cannot be locked is not waited for, but the kubelet's directory is.
        """
        if self._file is not None:
            self.wait_directory()
            return
        if claims:
            try:
                self.claim()
            except OSError as error:
                self.unclaim()
                log.warning("the running daemon cannot be asked to hand over: %s", error.strerror or error)
        try:
            descriptor = _lock(open_own(self._state_dir / LOCK, os.O_RDWR))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError:  # `take` logs it
            self.wait_directory()
            return
        if self._claim is None and (self._claim_is_locked() or self._former_answers()):
            os.close(
                descriptor
            )  # for the new daemon, which has the claim, or for the former daemon if that new daemon is dead
            time.sleep(RETRY)
        elif not self._keep_file(descriptor):
            time.sleep(RETRY)  # the daemon that replaced the file may not have locked it yet

    def wait_directory(self) -> None:
        """Blocks until another daemon has unlocked the kubelet's directory, and locks it."""
        with suppress(FileNotFoundError):
            self._entry = _lock(os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self.former_serves = False

    def claim(self) -> None:
        """Locks the claim, which asks the running daemon to hand over. Blocks while another new daemon has it. Raises OSError."""
        self._claim = self._lock_own(CLAIM)
        self._handover = self._lock_own(HANDOVER)
        request = self._state_dir / f"{CLAIM}.request"
        request.touch()  # the running daemon watches the names in the directory
        request.unlink(missing_ok=True)

    def registers(self) -> None:
        """Notes that the kubelet may have the lists of this daemon from now on, in place of the former daemon's.

        Without the note, the former daemon does not learn of it before its next request for the kubelet's devices.
        """
        if self._file is not None:
            with suppress(OSError):  # a full disk has room for it: the text has the same length or is shorter
                self._write_owner(self._file, leaving=self.former_serves, registers=True)

    def serves(self) -> None:
        """Unlocks the handover: the kubelet has the lists of this daemon, or there is no former daemon that serves."""
        if self._handover is not None:
            if self._file is not None:
                with suppress(OSError):  # the lock of the kubelet's directory shows the same
                    # If this daemon ends before the handover is unlocked, the former daemon continues and must register again.
                    self._write_owner(self._file, leaving=False, registers=True)
            os.close(self._handover)
            self._handover = None

    def unclaim(self) -> None:
        """Unlocks the claim: the takeover is over, and the next daemon may claim."""
        self.serves()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def claimed(self) -> bool:
        """Whether a new daemon asks this one to hand over. False while this daemon takes over itself."""
        return self._claim is None and self._file is not None and self._claim_is_locked()

    def write_leaving(self, *, leaving: bool) -> bool:
        """Writes down whether this daemon hands over. Returns False if that fails: then nothing has changed."""
        if self._file is None:
            return False
        try:
            self._write_owner(self._file, leaving=leaving)
        except OSError:
            return False
        return True

    def hand_over(self) -> None:
        """Unlocks the state directory alone: the next daemon reads and writes it from now on."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def handed_over(self) -> Outcome:
        """Blocks until the new daemon serves or is dead. If it is dead, the state directory is locked again."""
        try:
            handover = self._lock_own(HANDOVER)
            try:
                new = self._last_owner()
                if not self._take_file(make=True):
                    return Outcome.NEW_SERVES
                return Outcome.REGISTERED if new is None or new.registers else Outcome.NEVER_REGISTERED
            finally:
                os.close(handover)  # not before: a third daemon that gets it may lock the state directory first
        except OSError as error:
            self._warn_not_lockable(str(self._state_dir), error)
            return Outcome.NEW_SERVES

    def release(self) -> None:
        """Unlocks everything; the files stay, since a removal could take a file from the next daemon that locks it."""
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
        if not is_named(path, os.fstat(descriptor)):  # it was replaced meanwhile
            os.close(descriptor)
            return False
        self._file = descriptor
        return True

    def _keep_file(self, descriptor: int) -> bool:
        """Makes the locked file this daemon's. Returns False if the path names another file by now."""
        if not is_named(self._state_dir / LOCK, os.fstat(descriptor)):
            os.close(descriptor)
            return False
        self._file, self._opened = descriptor, self._state_dir.stat()
        self.former_serves = self.former_serves or self._former_answers()
        # If this daemon ends before the kubelet has its list, the next daemon takes over from the same former daemon.
        before = self._last_owner()
        registers = self.former_serves and before is not None and before.registers
        with suppress(OSError):  # on a full disk the lock holds all the same, and is anonymous
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
        """Whether the daemon that handed over last still answers the kubelet. If not, the kubelet's directory is locked."""
        former = self._last_owner()
        if former is None or not former.leaving or former.directory != str(self._directory) or self._entry is not None:
            return False
        try:
            return not self._take_directory()
        except OSError:
            return False

    def _lock_own(self, name: str) -> int:
        """Locks a file of the takeover, however long another process has it locked, and returns it. Raises OSError."""
        path = self._state_dir / name
        set_aside(path)
        return _lock(open_own(path, os.O_RDWR | os.O_CREAT))

    def _claim_is_locked(self) -> bool:
        """Whether another daemon has the claim."""
        try:
            descriptor = open_own(self._state_dir / CLAIM, os.O_RDWR)
            if not _locked(descriptor):
                return True
        except OSError:  # there was never a takeover, or no locks
            return False
        os.close(descriptor)
        return False

    def _owner_text(self) -> str:
        """The daemon that wrote the lock's file last, in words."""
        owner = self._last_owner()
        return "it has not said who it is" if owner is None else str(owner)

    def _last_owner(self) -> Owner | None:
        """The daemon that wrote the lock's file last; None if the file does not say."""
        try:
            with open_file(self._state_dir / LOCK, links=False) as stream:
                text = stream.read(_MAX_BYTES).decode()  # msgspec ignores a key of bytes
            return msgspec.json.decode(text, type=Owner)
        except (OSError, ValueError, RecursionError):  # or nested without end
            return None

    def _listeners_text(self) -> str:
        """The processes that listen on sockets of this plugin in the directory, in words; a pod's are hidden from another's."""
        there = {made: path for path in self._directory.glob(f"{PREFIX}*.sock") if (made := identity(path)) is not None}
        # Each socket is asked once: a connection in its queue takes the place of a connection of the kubelet.
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

    def _warn_not_lockable(self, what: str, error: OSError) -> None:
        if what not in self._unlocked:
            self._unlocked.add(what)
            log.warning(
                "%s cannot be locked, so a second daemon would not be noticed: %s", what, error.strerror or error
            )


def _listener(path: Path) -> int:
    """The process that listens on a socket, by a connection to it; 0 where it is of another container.

    Raises:
        BlockingIOError: it listens, and as many wait for it already as may.
        OSError: nobody listens there.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        probe.connect(str(path))
        return peer_of(probe)[0]


def _lock(descriptor: int) -> int:
    """Locks an open file, however long another process has it locked, and returns it. Raises OSError, with the file closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _locked(descriptor: int) -> bool:
    """Whether what is open could be locked; it is closed where not. Raises OSError if no process can lock it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return False
        raise
    return True
