"""The state directory at the start: its lock, and the memory of earlier processes that it holds."""

import stat
from pathlib import Path

import msgspec

from gpu_plugin.daemon.state_files import FILES
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.runtime.control import SOCKET
from gpu_plugin.state.directory import StateDirectory, set_aside
from gpu_plugin.state.event_store import EventStore
from gpu_plugin.state.memory import Memory, Remembered
from gpu_plugin.state.node_lock import NodeLock

STATE_PATIENCE = 3.0
"""Seconds that the state directory may take at the start before the kubelet is served without its content."""


class Recalled(msgspec.Struct, frozen=True):
    """The memory of earlier processes.

    Attributes:
        gpus: the GPUs of this boot.
        before: the GPUs of an earlier boot.
        evidence: the evidence against GPUs, and the orders of operators.
        devices: the devices in the lists for the kubelet.
    """

    gpus: tuple[Gpu, ...]
    before: tuple[Gpu, ...]
    evidence: tuple[Evidence, ...]
    devices: Remembered


class OpenedState(msgspec.Struct, frozen=True):
    """A locked state directory and its content, for the next daemon of this process."""

    lock: NodeLock
    memory: Memory
    events: EventStore
    recalled: Recalled


class Next(msgspec.Struct, frozen=True):
    """The next daemon of this process.

    Attributes:
        opened: the state directory as the daemon before it locked and read it; None if the next daemon has to do both.
        claims: whether it asks a running daemon for the node. A daemon that has handed the node over waits instead.
    """

    opened: OpenedState | None = None
    claims: bool = True


def recall(state: StateDirectory, memory: Memory, events: EventStore) -> Recalled:
    """Read the memory of earlier processes, after the removal of leftover files. Blocks as long as the disk does."""
    state.tidy(FILES)
    events.recall(memory.log.load().events)
    return Recalled(memory.gpus(), memory.before(), memory.evidence(), memory.devices())


def make_way(state_dir: Path) -> None:
    """Move away any file at the control socket's path that is not a socket."""
    set_aside(state_dir / SOCKET, stat.S_ISSOCK)
