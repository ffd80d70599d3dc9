"""What of a simulated node outlives the daemon, and the file that keeps it."""

import logging
from pathlib import Path

import msgspec

from gpu_plugin.runtime.regular_file import read_file, replace_file
from gpu_plugin.simulation.condition import Condition
from gpu_plugin.simulation.mig import lay_out
from gpu_plugin.simulation.profile import Profile
from gpu_plugin.state.directory import keep_aside, set_aside

_log = logging.getLogger(__name__)

_MAX_BYTES = 4 * 1024 * 1024
"""Of the file: 64 GPUs take some 100 KiB."""


class SavedGpu(Condition, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU, with `hung_until` on the wall clock.

    `mig` are the profiles that it was partitioned into, None out of MIG mode; left out: as the node's profile says.
    """

    mig: list[str] | msgspec.UnsetType | None = msgspec.UNSET

    @classmethod
    def of(cls, condition: Condition, hung_until: float | None, mig: list[str] | None) -> "SavedGpu":
        """What is to be kept of this condition."""
        return cls(**msgspec.structs.asdict(condition) | {"hung_until": hung_until, "mig": mig})

    def condition(self, hung_until: float | None) -> Condition:
        """The condition as it was kept."""
        kept = {name: getattr(self, name) for name in Condition.__struct_fields__}
        return Condition(**kept | {"hung_until": hung_until})


class SavedNode(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    profile: str
    boot_id: str
    gpus: list[SavedGpu]


def read(file: Path, profile: Profile, *, keep: bool = False) -> SavedNode | None:
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
