"""The state of the MPS daemons that `gpu-plugin mps` runs, in a file of the MPS root that it locks, for the device plugin.

The kernel releases the lock when the process ends for any reason, so the state of an ended process does not count. `read` does
not wait and reads little: it can be called every second. Daemons of other programs are not in the file; `watch` queries them.
"""

import errno
import fcntl
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpu_plugin.mps.errors import MpsError
from gpu_plugin.runtime.regular_file import open_file
from gpu_plugin.status.remedies import TO_DO

FILE = ".supervisor"

# Seconds after which a daemon counts as down if its supervisor has not confirmed it: several times the interval of its probes
STALE = 60.0

_SIZE = 64 * 1024  # bytes that are allocated at the start, so that states can be written on a full disk
_LONGEST = 1024 * 1024

# A reader holds a lock for some microseconds; a writer that finds it locked tries again.
_TRIES = 50
_BETWEEN_TRIES = 0.002  # seconds

_START = "start gpu-plugin mps on this node (the chart's value mps.enabled, or systemctl start gpu-plugin-mps)"
_SAME_CONFIGURATION = (
    "wait some seconds; if it stays so, give gpu-plugin mps the same configuration as this plugin, and look in its log"
)

NO_DAEMON = f"gpu-plugin mps runs no daemon for it (yet){TO_DO}{_SAME_CONFIGURATION}"


class Counts(msgspec.Struct, frozen=True):
    """Events of one resource since its supervisor started.

    Attributes:
        limits_restored: how often a client had changed a limit of the daemon, and the configured limits were set again.
        probes_failed: how often the daemon did not answer a probe although its process was alive.
    """

    limits_restored: int = 0
    probes_failed: int = 0


class State(msgspec.Struct, frozen=True):
    """The state of one resource's daemon.

    Attributes:
        why: why it is down; empty while it is up.
        pid: its process id.
        gpus: the uuids of its GPUs.
        replicas: the number of clients of each GPU.
        confirmed: the time of its last answer, in seconds of CLOCK_MONOTONIC, which is the same in all processes of a node.
        counts: events since the start of the supervisor.
    """

    why: str = NO_DAEMON
    pid: int = 0
    gpus: tuple[str, ...] = ()
    replicas: int = 0
    confirmed: float = 0.0
    counts: Counts = Counts()


class StateFile:
    """The file, for the supervisor, which is its only writer."""

    def __init__(self, root: Path) -> None:
        self.path = root / FILE
        self._descriptor = -1
        self._length = 0
        self._states: dict[str, State] = {}

    def lock(self) -> bool:
        """Lock the file, which is made if missing. Return False if another process holds it. Raises MpsError."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise MpsError(f"{self.path} cannot be opened: {error.strerror}; is --mps-root writable?") from None
        for _ in range(_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_BETWEEN_TRIES)
            else:
                self._descriptor = descriptor
                os.ftruncate(descriptor, 0)
                with suppress(OSError):
                    os.posix_fallocate(descriptor, 0, _SIZE)
                return True
        os.close(descriptor)
        return False

    def unlock(self) -> None:
        """Close the file: its content does not count any more."""
        os.close(self._descriptor)

    def up(self, resource: str, pid: int, gpus: tuple[str, ...], replicas: int) -> None:
        """Record that a daemon has just answered. Raises MpsError if that cannot be written."""
        state = State("", pid, gpus, replicas, time.monotonic(), self._state(resource).counts)
        self._states[resource] = state
        try:
            self._write()
        except OSError as error:
            raise MpsError(f"{self.path} cannot be written: {error.strerror}") from None

    def down(self, resource: str, why: str = NO_DAEMON) -> None:
        """Record that a daemon is down. If that cannot be written, no daemon counts as up until the next write."""
        self._states[resource] = State(why, counts=self._state(resource).counts)
        try:
            self._write()
        except OSError:
            os.ftruncate(self._descriptor, 0)

    def count(self, resource: str, *, limits_restored: int = 0, probes_failed: int = 0) -> None:
        """Add to the counts of a resource. A full disk keeps the older counts."""
        state = self._state(resource)
        counts = Counts(state.counts.limits_restored + limits_restored, state.counts.probes_failed + probes_failed)
        self._states[resource] = replace(state, counts=counts)
        with suppress(OSError):
            self._write()

    def _state(self, resource: str) -> State:
        return self._states.get(resource, State())

    def _write(self) -> None:
        content = msgspec.json.encode(self._states) + b"\n"
        # One write, in place: a truncation would free the allocated space.
        padded = content.ljust(self._length, b"\0")
        self._length = len(padded)  # also if the write fails: a part of it may be in the file
        if os.pwrite(self._descriptor, padded, 0) < len(padded):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._length = len(content)


def read(root: Path) -> dict[str, State] | None:
    """Return the states of the daemons of a running gpu-plugin mps by resource; None if it does not run for this MPS root."""
    for _ in range(3):  # the other process may be in the middle of writing
        try:
            with open_file(root / FILE, links=False) as stream:
                if not _locked_elsewhere(stream.fileno()):
                    return None
                return msgspec.json.decode(stream.read(_LONGEST).rstrip(b"\0"), type=dict[str, State])
        except OSError:
            return None
        except (ValueError, RecursionError):  # ValueError: not UTF-8, or not JSON
            continue
    return {}


def supervised(root: Path) -> bool:
    """Return whether gpu-plugin mps runs for this MPS root."""
    return read(root) is not None


def why_down(
    root: Path,
    states: Mapping[str, State] | None,
    resource: str,
    gpus: Collection[str] = (),
    replicas: int = 0,
) -> str:
    """Return why the MPS daemon of a resource such as nvidia.com/gpu cannot be used; empty if it can.

    `states` is the result of `read`. The daemon must serve the GPUs with these uuids, for `replicas` clients each (0: any).
    """
    if states is None:
        if (root / FILE).exists():
            return f"its MPS daemon is down: gpu-plugin mps does not run on this node{TO_DO}{_START}"
        return (
            f"its MPS daemon is down: gpu-plugin mps has not run on this node, or not for the MPS root that is {root} here"
            f"{TO_DO}{_START}; if it runs, give it and this plugin the same --mps-root, mounted from the same directory of the "
            "node"
        )
    state = states.get(resource, State())
    if state.why:
        return f"its MPS daemon is down: {state.why}"
    if time.monotonic() - state.confirmed > STALE:
        return (
            f"its MPS daemon is down: gpu-plugin mps has not seen it answer for over {STALE:g} s{TO_DO}look in the log of "
            "gpu-plugin mps and at the free space of the disk of --mps-root; if neither helps, restart gpu-plugin mps, which "
            "ends the work of all clients of its daemons"
        )
    missing = [uuid for uuid in gpus if uuid not in state.gpus]
    if missing:
        return f"its MPS daemon does not serve GPU {missing[0]} (yet){TO_DO}{_SAME_CONFIGURATION}"
    if replicas and replicas != state.replicas:
        return f"its MPS daemon shares each GPU among {state.replicas} clients, not {replicas} (yet){TO_DO}{_SAME_CONFIGURATION}"
    return ""


def _locked_elsewhere(descriptor: int) -> bool:
    """Return whether another process holds the exclusive lock of an open file. Gets a shared lock for a moment."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
