"""The compute modes of a simulated node's GPUs, seen and set by every process that simulates the node, as a driver's are."""

import fcntl
import threading
from pathlib import Path

import msgspec

from gpu_plugin.runtime.regular_file import read_file, replace_file

STATE_FILE = "simulated-compute-modes.json"

_MAX_BYTES = 64 * 1024


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `STATE_FILE`: modes as NVML numbers them, by index; those that are not DEFAULT."""

    boot_id: str
    modes: dict[int, int] = {}


class SimulatedComputeModes:
    """Each GPU's mode by index, DEFAULT at first and after a reboot. Safe from any thread and process.

    Kept in a file of its own: a daemon that writes down its faults must not write over what `gpu-plugin mps` has set. Without
    a directory, the modes are this object's alone.
    """

    def __init__(self, state: Path | None, boot_id: str) -> None:
        self._file = state / STATE_FILE if state else None
        self._boot_id = boot_id
        self._lock = threading.Lock()
        self._own: dict[int, int] = {}

    def get(self, gpu: int) -> int:
        """The GPU's mode."""
        with self._lock:
            if not self._file:
                return self._own.get(gpu, 0)
            try:
                return self._decode(read_file(self._file, _MAX_BYTES)).get(gpu, 0)
            except OSError:  # there is none yet, or it is none of ours
                return 0

    def set(self, gpu: int, mode: int) -> None:
        """Changes the GPU's mode."""
        with self._lock:
            if not self._file:
                self._own[gpu] = mode
                return
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._file.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                modes = self._decode(read_file(self._file, _MAX_BYTES)) if self._file.is_file() else {}
                saved = _Saved(boot_id=self._boot_id, modes={**modes, gpu: mode})
                replace_file(self._file, msgspec.json.encode(saved), 0o644)

    def _decode(self, content: bytes) -> dict[int, int]:
        try:
            saved = msgspec.json.decode(content.decode(), type=_Saved)
        except (ValueError, RecursionError):  # text that is no UTF-8 is a ValueError
            return {}
        return saved.modes if saved.boot_id == self._boot_id else {}
