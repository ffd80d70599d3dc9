"""What of a simulated node outlives the daemon, and the files that keep it."""

import fcntl
import logging
import threading
from pathlib import Path

import msgspec

from gpu_plugin.runtime.regular_file import read_file, replace_file
from gpu_plugin.simulation.condition import Condition
from gpu_plugin.simulation.mig import lay_out
from gpu_plugin.simulation.profile import Profile
from gpu_plugin.state.directory import keep_aside, set_aside

_log = logging.getLogger(__name__)

COMPUTE_MODES_FILE = "simulated-compute-modes.json"

_MAX_BYTES = 4 * 1024 * 1024
"""Of a file: 64 GPUs take some 100 KiB."""


class SavedNode(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file: GPUs with `hung_until` on the wall clock."""

    profile: str
    boot_id: str
    gpus: list[Condition]


def read(file: Path, profile: Profile, *, keep: bool) -> SavedNode | None:
    """What the file remembers of this very node; None, with a warning where it should, to start fresh.

    `keep`: one that cannot be understood is set aside, since the file is written next.
    """
    try:
        saved = msgspec.json.decode(read_file(file, _MAX_BYTES).decode(), type=SavedNode)
        if saved.profile != profile.name or len(saved.gpus) != len(profile.gpus):
            _log.info(f"{file}: of another node, {saved.profile} with {len(saved.gpus)} GPUs: starting fresh")
            return None
        for gpu, was in zip(profile.gpus, saved.gpus, strict=True):
            if was.mig and gpu.mig_profiles:
                lay_out(gpu.mig_profiles, was.mig)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # text that is no UTF-8 is a ValueError
        why = error.strerror or error if isinstance(error, OSError) else error
        kept = keep_aside(file) if keep and not isinstance(error, OSError) else ""
        _log.warning(f"{file}: {why}: the simulated node starts fresh, without its earlier faults{kept}")
        if keep:
            set_aside(file)
        return None
    return saved


def write(file: Path, saved: SavedNode) -> None:
    """Writes the file, readable by its owner alone: all of it or nothing, and on disk when this returns."""
    content = msgspec.json.format(msgspec.json.encode(saved))
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(file, content, 0o600, durable=True)
    except OSError as error:
        _log.warning(f"{file}: {error}: the simulated node's faults will not outlive this daemon")


class _Modes(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `COMPUTE_MODES_FILE`: modes as NVML numbers them, by index; those that are not DEFAULT."""

    boot_id: str
    modes: dict[int, int] = {}


class SimulatedComputeModes:
    """Each GPU's mode by index, DEFAULT at first and after a reboot. Safe from any thread and process.

    Kept in a file of its own: a daemon that writes down its faults must not write over what `gpu-plugin mps` has set. Without
    a directory, the modes are this object's alone.
    """

    def __init__(self, state: Path | None, boot_id: str) -> None:
        self._file = state / COMPUTE_MODES_FILE if state else None
        self._boot_id = boot_id
        self._lock = threading.Lock()
        self._own: dict[int, int] = {}

    def get(self, gpu: int) -> int:
        """The GPU's mode."""
        with self._lock:
            return (self._modes(self._file) if self._file else self._own).get(gpu, 0)

    def set(self, gpu: int, mode: int) -> None:
        """Changes the GPU's mode."""
        with self._lock:
            if not self._file:
                self._own[gpu] = mode
                return
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._file.with_suffix(".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                saved = _Modes(boot_id=self._boot_id, modes={**self._modes(self._file), gpu: mode})
                replace_file(self._file, msgspec.json.encode(saved), 0o644)

    def _modes(self, file: Path) -> dict[int, int]:
        """What the file says of this boot: nothing where there is none yet, or it is none of ours."""
        try:
            saved = msgspec.json.decode(read_file(file, _MAX_BYTES).decode(), type=_Modes)
        except (OSError, ValueError, RecursionError):  # text that is no UTF-8 is a ValueError
            return {}
        return saved.modes if saved.boot_id == self._boot_id else {}
