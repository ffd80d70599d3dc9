"""Shows the device plugin that the MPS daemon of a resource is up, through a lock that the daemon's supervisor holds.

The kernel releases a lock when its process ends for any reason, so no stale lock remains. Files under the MPS root:

    .supervisor          locked while `gpu-plugin mps` runs, `Counts` by resource as JSON
    <resource>/.ready    locked while the resource's daemon is up, a `Mark` as JSON
    <resource>/.down     a sentence with the reason while it is down

`ready` does not wait and reads little, so it can be called every second. Daemons of other programs do not hold this lock;
`watch` queries them.
"""

import fcntl
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from gpu_plugin.mps.errors import MpsError
from gpu_plugin.mps.remedies import SAME_CONFIGURATION, SAME_ROOT, START, STUCK
from gpu_plugin.runtime.regular_file import open_file, replace_file
from gpu_plugin.status.remedies import TO_DO

T = TypeVar("T")

READY = ".ready"
DOWN = ".down"
SUPERVISOR = ".supervisor"

# Seconds after which a mark is ignored if its supervisor has not confirmed it: several times the interval of its probes
STALE = 60.0

_MODE = 0o644
_LONGEST = 64 * 1024

# A reader holds a lock for some microseconds; a writer that finds it locked tries again.
_TRIES = 50
_BETWEEN_TRIES = 0.002  # seconds


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a running daemon, written by its supervisor.

    `pid` is the daemon's, `since` is in seconds of Unix time, `gpus` are uuids, and `confirmed` is the time of its last
    answer, in seconds of CLOCK_MONOTONIC, which is the same in all processes of a node.
    """

    pid: int
    since: float
    replicas: int
    gpus: tuple[str, ...]
    confirmed: float


class Counts(msgspec.Struct, frozen=True):
    """Events of one resource since its supervisor started.

    Attributes:
        limits_restored: how often a client had changed a limit of the daemon, and the configured limits were set again.
        probes_failed: how often the daemon did not answer a probe although its process was alive.
    """

    limits_restored: int = 0
    probes_failed: int = 0


def lock(path: Path) -> int | None:
    """Get an exclusive lock on `path`, which is made if missing. Return its descriptor; None if another process holds it.

    Raises MpsError if the file cannot be made or opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    except OSError as error:
        raise MpsError(f"{path} cannot be opened: {error.strerror}; is --mps-root writable?") from None
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_BETWEEN_TRIES)
        else:
            return descriptor
    os.close(descriptor)
    return None


class ReadyMark:
    """The mark of one resource's daemon, for its supervisor. The daemon counts as down until `up` is called."""

    def __init__(self, directory: Path) -> None:
        """Store the resource's directory, which must exist before `up`."""
        self._ready = directory / READY
        self._down = directory / DOWN
        self._descriptor: int | None = None

    def up(self, mark: Mark) -> None:
        """Record that the daemon is up, or still up.

        Raises MpsError if the mark cannot be written, or another process holds it.
        """
        if self._descriptor is None:
            self._descriptor = lock(self._ready)
            if self._descriptor is None:
                raise MpsError(f"another process holds {self._ready}; is there a second gpu-plugin mps on this node?")
        content = msgspec.json.encode(mark) + b"\n"
        try:
            os.pwrite(self._descriptor, content, 0)
            os.ftruncate(self._descriptor, len(content))
        except OSError as error:
            raise MpsError(f"{self._ready} cannot be written: {error.strerror}") from None
        with suppress(OSError):  # it is not read while the daemon is up
            self._down.unlink()

    def down(self, why: str = "") -> None:
        """Record that the daemon is down, and the reason; no reason means that no daemon is wanted."""
        if self._descriptor is not None:
            with suppress(OSError):
                self._ready.unlink()
            os.close(self._descriptor)
            self._descriptor = None
        with suppress(OSError):  # readers miss only the reason if it cannot be written
            if why:
                self._down.parent.mkdir(parents=True, exist_ok=True)
                # The directory may be unsafe, which is then the reason: `replace_file` follows no link there.
                replace_file(self._down, f"{why}\n".encode(), _MODE)
            else:
                self._down.unlink()


def ready(mps_root: Path, resource: str, *, gpus: Collection[str] = (), replicas: int = 0) -> str:
    """Return why the MPS daemon of a resource such as nvidia.com/gpu cannot be used; empty if it can.

    It must serve the GPUs with these uuids, each for `replicas` clients (0: any number).
    """
    found = _read_locked(mps_root / resource / READY, Mark)
    if found is None:
        return f"its MPS daemon is down: {_why_down(mps_root, resource)}"
    if time.monotonic() - found.confirmed > STALE:
        return f"its MPS daemon is down: gpu-plugin mps has not seen it answer for over {STALE:g} s{TO_DO}{STUCK}"
    missing = [uuid for uuid in gpus if uuid not in found.gpus]
    if missing:
        return f"its MPS daemon does not serve GPU {missing[0]} (yet){TO_DO}{SAME_CONFIGURATION}"
    if replicas and replicas != found.replicas:
        return f"its MPS daemon shares each GPU among {found.replicas} clients, not {replicas} (yet){TO_DO}{SAME_CONFIGURATION}"
    return ""


def write_counts(descriptor: int, counts: Mapping[str, Counts]) -> None:
    """Write counts by resource into the lock file of the supervisor, which is open. A full disk keeps older counts."""
    content = msgspec.json.encode(counts) + b"\n"
    with suppress(OSError):
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))


def read_counts(mps_root: Path) -> dict[str, Counts]:
    """Read the counts of a running supervisor by resource; empty without a supervisor."""
    return _read_locked(mps_root / SUPERVISOR, dict[str, Counts]) or {}


def supervised(mps_root: Path) -> bool:
    """Return whether gpu-plugin mps runs for this root: then no daemons of other programs are used."""
    stream = _opened(mps_root / SUPERVISOR)
    if stream is None:
        return False
    with stream:
        return _locked_elsewhere(stream.fileno())


def _read_locked(path: Path, content: type[T]) -> T | None:
    """Return the content of a JSON file; None if no other process holds its lock, or it cannot be decoded."""
    for _ in range(3):  # the other process may be in the middle of writing
        stream = _opened(path)
        if stream is None:
            return None
        with stream:
            try:
                if not _locked_elsewhere(stream.fileno()):
                    return None
                return msgspec.json.decode(stream.read(_LONGEST), type=content)
            except (OSError, ValueError, msgspec.DecodeError, RecursionError):  # ValueError: the text is not UTF-8
                continue
    return None


def _why_down(root: Path, resource: str) -> str:
    if not supervised(root):
        if (root / SUPERVISOR).exists():
            return f"gpu-plugin mps does not run on this node{TO_DO}{START}"
        return f"gpu-plugin mps has not run on this node, or not for the MPS root that is {root} here{TO_DO}{SAME_ROOT}"
    stream = _opened(root / resource / DOWN)
    if stream is None:
        return f"gpu-plugin mps runs no daemon for it (yet){TO_DO}{SAME_CONFIGURATION}"
    with stream:
        try:
            return stream.read(_LONGEST).decode(errors="replace").strip() or "it is being started"
        except OSError as error:
            return f"{root / resource / DOWN} cannot be read: {error.strerror}"


def _opened(path: Path) -> BinaryIO | None:
    """Open a regular file for reading or for its locks; None if it is missing or of another kind."""
    try:
        return open_file(path, links=False)
    except OSError:
        return None


def _locked_elsewhere(descriptor: int) -> bool:
    """Return whether another process holds the exclusive lock of an open file. Gets a shared lock for a moment."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
