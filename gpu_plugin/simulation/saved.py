"""The state of a simulated node that survives the daemon, and the files with it."""

import fcntl
import logging
import threading
from pathlib import Path

import msgspec

from gpu_plugin.runtime.regular_file import read_file, replace_file
from gpu_plugin.simulation.gpu import GpuState
from gpu_plugin.simulation.mig import lay_out
from gpu_plugin.simulation.profile import Profile
from gpu_plugin.state.directory import keep_aside, set_aside

_log = logging.getLogger(__name__)

COMPUTE_MODES_FILE = "simulated-compute-modes.json"

_MAX_BYTES = 4 * 1024 * 1024  # Largest size of a file: 64 GPUs need about 100 KiB


class SavedNode(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file. `hung_until` of GPUs is a time of the wall clock."""

    profile: str
    boot_id: str
    gpus: list[GpuState]


def read(file: Path, profile: Profile, *, keep: bool) -> SavedNode | None:
    """Read the saved state of this node. Return None to start fresh, with a log line if the file is unusable.

    `keep`: move an unreadable file away, since the file will be written.
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
    except (OSError, ValueError, RecursionError) as error:  # ValueError: the text is not UTF-8
        why = error.strerror or error if isinstance(error, OSError) else error
        kept = keep_aside(file) if keep and not isinstance(error, OSError) else ""
        _log.warning(f"{file}: {why}: the simulated node starts fresh, without its earlier faults{kept}")
        if keep:
            set_aside(file)
        return None
    return saved


def write(file: Path, saved: SavedNode) -> None:
    """Write the file with mode 0600: completely or not at all, and on disk when this returns."""
    content = msgspec.json.format(msgspec.json.encode(saved))
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(file, content, 0o600, durable=True)
    except OSError as error:
        _log.warning(f"{file}: {error}: the simulated node's faults will be lost when this daemon ends")


class _Modes(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `COMPUTE_MODES_FILE`: NVML's numbers of modes other than DEFAULT, by GPU index."""

    boot_id: str
    modes: dict[int, int] = {}


class SimulatedComputeModes:
    """Each GPU's compute mode by index; DEFAULT at first and after a reboot. Safe from any thread and process.

    The modes are in a separate file, so that a daemon that saves faults does not overwrite changes by `gpu-plugin mps`.
    Without a directory, only this object has the modes.
    """

    def __init__(self, state: Path | None, boot_id: str) -> None:
        self._file = state / COMPUTE_MODES_FILE if state else None
        self._boot_id = boot_id
        self._lock = threading.Lock()
        self._own: dict[int, int] = {}

    def get(self, gpu: int) -> int:
        """Return the GPU's mode."""
        with self._lock:
            return (self._modes(self._file) if self._file else self._own).get(gpu, 0)

    def set(self, gpu: int, mode: int) -> None:
        """Change the GPU's mode."""
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
        """Return the modes that the file has for this boot; empty if there is no usable file."""
        try:
            saved = msgspec.json.decode(read_file(file, _MAX_BYTES).decode(), type=_Modes)
        except (OSError, ValueError, RecursionError):  # ValueError: the text is not UTF-8
            return {}
        return saved.modes if saved.boot_id == self._boot_id else {}
