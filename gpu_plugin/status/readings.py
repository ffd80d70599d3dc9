"""Stores the newest readings of each GPU, and converts them to the units of metrics and of the status page. No I/O."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import asdict, replace

from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.nvml_h import (
    CLOCKS_HW_POWER_BRAKE_SLOWDOWN,
    CLOCKS_HW_SLOWDOWN,
    CLOCKS_HW_THERMAL_SLOWDOWN,
    CLOCKS_SW_POWER_CAP,
    CLOCKS_SW_THERMAL_SLOWDOWN,
    FabricState,
    RecoveryAction,
)
from gpu_plugin.health.observation import Fabric, Sample

# The reasons for reduced clocks, by the bit of `Sample.clocks_event_reasons`.
CLOCKS_EVENTS: Mapping[str, int] = {
    "sw_power_cap": CLOCKS_SW_POWER_CAP,
    "hw_slowdown": CLOCKS_HW_SLOWDOWN,
    "sw_thermal_slowdown": CLOCKS_SW_THERMAL_SLOWDOWN,
    "hw_thermal_slowdown": CLOCKS_HW_THERMAL_SLOWDOWN,
    "hw_power_brake": CLOCKS_HW_POWER_BRAKE_SLOWDOWN,
}

# Recovery actions that a driver may request, by number.
RECOVERY_ACTIONS: tuple[str, ...] = tuple(action.name.lower() for action in RecoveryAction)

FABRIC_STATES = ("not_started", "in_progress", "completed", "failed")  # the states of a GPU in joining its fabric

_ABOUT_THE_LOOK = frozenset({"fault", "detail", "binding", "counting", "asked"})

_READ = tuple(name for name in Sample.__struct_fields__ if name not in _ABOUT_THE_LOOK)

# The counts and flags of memory, NVLink, PCIe and licenses.
_SHOWN_AS_READ = tuple(
    name
    for name in _READ
    if name.startswith(("ecc_", "sram_", "unrepairable_", "remap", "retired_", "nvlink_", "pcie_", "vgpu_"))
)


class Newest(NamedTuple):
    """The newest value of each reading of a GPU, and the time (Unix seconds) of the last look that read any value."""

    sample: Sample
    at: float


class Readings:
    """The newest readings of each GPU, by uuid. A look that finds a fault removes them, since they are outdated."""

    def __init__(self) -> None:
        self._newest: dict[str, Newest] = {}

    def saw(self, uuid: str, seen: Sample, now: float) -> None:
        """Store the result of a look at Unix time `now`. Values that it did not read are kept."""
        if seen.fault:
            self._newest.pop(uuid, None)
            return
        before = self._newest.get(uuid)
        if before is not None and seen.asked is not None:
            seen = replace(before.sample, **{name: getattr(seen, name) for name in _READ if name in seen.asked})
        self._newest[uuid] = Newest(seen, now)

    def keep(self, uuids: frozenset[str]) -> None:
        """Remove all GPUs except these."""
        for uuid in self._newest.keys() - uuids:
            del self._newest[uuid]

    def of(self, uuid: str) -> Newest | None:
        """Return the newest readings of a GPU; None before the first look, and after a look that found a fault."""
        return self._newest.get(uuid)


Told = Mapping[str, float | int | str | bool | None]


def told(gpu: Gpu, newest: Newest | None) -> Told:
    """Convert a GPU's readings for display to plain data. Values are None if NVML does not report them, or not yet.

    Returns:
        Limits and sizes, also after a fault: `slowdown_celsius`, `shutdown_celsius`, `gpu_max_celsius`, `memory_max_celsius`,
        `memory_total_bytes`. Readings: `at` (Unix seconds of the last look that read a value), `temperature_celsius`,
        `memory_temperature_celsius`, `margin_celsius`, `power_watts`, `power_limit_watts`, `energy_joules`,
        `utilization_ratio`, `memory_used_bytes`, `recovery_action` (of `RECOVERY_ACTIONS`, or an unknown number as text),
        `fabric` (of `FABRIC_STATES`; None if the GPU has no fabric), `nvlinks_active`, `nvlinks_inactive`, `clocks_events`
        (the mask), and with their names in `Sample` the counts and flags of memory, NVLink, PCIe and licenses.
    """
    seen, at = newest or Newest(Sample(), 0.0)
    links = seen.nvlinks
    return {
        **{f"{name}_celsius": limit for name, limit in asdict(gpu.thresholds).items()},
        "memory_total_bytes": gpu.memory_bytes,
        "at": at or None,
        "temperature_celsius": seen.temperature,
        "memory_temperature_celsius": seen.memory_temperature,
        "margin_celsius": seen.margin,
        "power_watts": _over(seen.power, 1000),
        "power_limit_watts": _over(seen.power_limit, 1000),
        "energy_joules": _over(seen.energy, 1000),
        "utilization_ratio": _over(seen.utilization, 100),
        "memory_used_bytes": seen.memory_used,
        "recovery_action": _action(seen.recovery_action),
        "fabric": _fabric(seen.fabric),
        "clocks_events": seen.clocks_event_reasons,
        "nvlinks_active": None if links is None else sum(links),
        "nvlinks_inactive": None if links is None else len(links) - sum(links),
        **{name: getattr(seen, name) for name in _SHOWN_AS_READ},
    }


def _over(number: int | None, unit: int) -> float | None:
    return None if number is None else number / unit


def _action(number: int | None) -> str | None:
    if number is None:
        return None
    return RECOVERY_ACTIONS[number] if 0 <= number < len(RECOVERY_ACTIONS) else str(number)


def _fabric(seen: Fabric | None) -> str | None:
    if seen is None or seen.state == FabricState.NOT_SUPPORTED:
        return None
    if seen.state == FabricState.COMPLETED:
        return "failed" if seen.status else "completed"
    return "not_started" if seen.state == FabricState.NOT_STARTED else "in_progress"
