"""One daemon a node: two locks that the kernel drops with the process, whatever ends it.

Two daemons that register the same resource take it from each other, and where the one that registered last stops, the
node has 0 devices. So a daemon serves only while it holds the lock of its state directory (a file there, which says who has it)
and that of the kubelet's device plugin directory (the directory itself: the kubelet removes files from it when it starts).
"""

import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from gpu_plugin.config.times import utc
from gpu_plugin.kubelet.socket import PREFIX
from gpu_plugin.runtime.peer import peer_of
from gpu_plugin.runtime.printable import printable
from gpu_plugin.runtime.regular_file import open_file
from gpu_plugin.state.directory import Identity, identity, is_named, open_own, set_aside

log = logging.getLogger(__name__)

FILE = "daemon.lock"
"""The lock's file in the state directory."""

RETRY = 0.25
"""Seconds between two tries: a process that ends tells no other one of it."""

_MAX_BYTES = 4096


class Owner(msgspec.Struct, frozen=True):
    """Who holds a lock: its process id and host name as it sees them itself (a pod's name in a pod), and since when."""

    pid: int
    host: str = ""
    version: str = ""
    since: float = 0.0
    directory: str = ""

    def __str__(self) -> str:
        where = f" on {printable(self.host)}" if self.host else ""
        began = utc(self.since) if self.since else "a time unknown"
        return f"process {self.pid}{where}, version {printable(self.version) or 'unknown'}, running since {began}"


class NodeLock:
    """Both locks of one daemon. Calls block for no longer than a local file system does."""

    def __init__(self, state_dir: Path, directory: Path, version: str) -> None:
        """Takes the state directory, and the directory of kubelet.sock and of our sockets."""
        self._state_dir = state_dir
        self._directory = directory
        self._version = version
        self._file: int | None = None
        self._opened: os.stat_result | None = None
        """The state directory as it was when its lock was taken."""
        self._entry: int | None = None
        self._unlocked: set[str] = set()
        self._listening: dict[Identity, int] = {}
        """The process behind each socket of another daemon, as far as it was asked."""

    @property
    def has_state(self) -> bool:
        """Whether the lock of the state directory is held."""
        return self._file is not None

    def take(self, *, make: bool = True) -> str:
        """Takes what is free of both locks. Returns who keeps us waiting and what to do; empty once both are ours.

        A directory that cannot be locked at all is no reason to serve nothing: that is said in the log, once. Without `make`,
        nothing is made or written, and a lock whose file is not there is free.
        """
        try:
            if self._file is None and not self._take_file(make=make):
                return (
                    f"another daemon uses the state directory {self._state_dir}: {self._owner()}. "
                    "Stop one of the two, or give this one another --state-dir and --device-plugin-dir"
                )
        except OSError as error:
            self._cannot(str(self._state_dir / FILE), error)
        try:
            if self._entry is None and not self._take_directory():
                return (
                    f"another daemon serves {self._directory}: {self._server()}. "
                    "Stop one of the two: a kubelet takes each resource from only one plugin"
                )
        except FileNotFoundError:
            return ""  # there is nothing to be served in yet, which is said where it is waited for
        except OSError as error:
            self._cannot(str(self._directory), error)
        return ""

    def follow(self) -> str:
        """Locks the directories that bear the paths now, where they were made again. Returns who has one, as `take` does."""
        if self._file is not None and not is_named(self._state_dir / FILE, os.fstat(self._file)):
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
            except OSError:  # gone: nobody can serve there
                return "" if self._file is not None else self.take()
            if not os.path.samestat(there, os.fstat(self._entry)):
                os.close(self._entry)
                self._entry = None
        return self.take()

    def release(self) -> None:
        """Lets go of both; the file stays, since removing it could take it from under the next one."""
        for descriptor in (self._entry, self._file):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._entry = None

    def _take_file(self, *, make: bool) -> bool:
        path = self._state_dir / FILE
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
        if not is_named(path, os.fstat(descriptor)):  # it was replaced meanwhile
            os.close(descriptor)
            return False
        self._file = descriptor
        if not make:
            return True
        self._opened = self._state_dir.stat()
        own = Owner(os.getpid(), socket.gethostname(), self._version, time.time(), str(self._directory))
        with suppress(OSError):  # on a full disk the lock holds all the same, and is anonymous
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(own) + b"\n", 0)
        return True

    def _take_directory(self) -> bool:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not _locked(descriptor):
            return False
        self._entry = descriptor
        return True

    def _owner(self) -> str:
        """Whoever wrote the lock's file last, in words."""
        try:
            with open_file(self._state_dir / FILE, links=False) as stream:
                text = stream.read(_MAX_BYTES).decode()  # msgspec passes over a key that is not text
            return str(msgspec.json.decode(text, type=Owner))
        except (OSError, ValueError, RecursionError):  # or nested without end
            return "it has not said who it is"

    def _server(self) -> str:
        """The processes that listen on sockets of this plugin in the directory, in words; a pod's are hidden from another's."""
        there = {made: path for path in self._directory.glob(f"{PREFIX}*.sock") if (made := identity(path)) is not None}
        # Each is asked once: a connection that nobody accepts takes the place of one of the kubelet's.
        self._listening = {made: pid for made, pid in self._listening.items() if made in there}
        busy = False
        for made, path in there.items():
            if made in self._listening:
                continue
            try:
                self._listening[made] = _listener(path)
            except BlockingIOError:
                busy = True
            except OSError:  # a dead one, or one that does not listen yet
                continue
        pids = set(self._listening.values())
        if 0 in pids:
            return "a process of another container"
        if pids:
            return " and ".join(f"process {pid}" for pid in sorted(pids))
        return "a process that accepts no connection now" if busy else "it has no socket there yet"

    def _cannot(self, what: str, error: OSError) -> None:
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


def _locked(descriptor: int) -> bool:
    """Whether what is open could be locked; it is closed where not. Raises OSError where nobody could lock it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return False
        raise
    return True
