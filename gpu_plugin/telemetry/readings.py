"""What the looks at each GPU read last: kept for whoever shows it, in the units that people and programs expect. No I/O."""

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

CLOCKS_EVENTS: Mapping[str, int] = {
    "sw_power_cap": CLOCKS_SW_POWER_CAP,
    "hw_slowdown": CLOCKS_HW_SLOWDOWN,
    "sw_thermal_slowdown": CLOCKS_SW_THERMAL_SLOWDOWN,
    "hw_thermal_slowdown": CLOCKS_HW_THERMAL_SLOWDOWN,
    "hw_power_brake": CLOCKS_HW_POWER_BRAKE_SLOWDOWN,
}
"""What holds clocks down, by the bit of `Sample.clocks_event_reasons`."""

RECOVERY_ACTIONS: tuple[str, ...] = tuple(action.name.lower() for action in RecoveryAction)
"""What a driver may ask for, by number."""

FABRIC_STATES = ("not_started", "in_progress", "completed", "failed")
"""How far a GPU may have come in joining its fabric."""

_ABOUT_THE_LOOK = frozenset({"fault", "detail", "binding", "counting", "asked"})

_READ = tuple(name for name in Sample.__struct_fields__ if name not in _ABOUT_THE_LOOK)

_SHOWN_AS_READ = tuple(
    name
    for name in _READ
    if name.startswith(("ecc_", "sram_", "unrepairable_", "remap", "retired_", "nvlink_", "pcie_", "vgpu_"))
)
"""The counts and flags of memory, NVLink, PCIe and licenses."""


class Newest(NamedTuple):
    """The newest of everything that was read of a GPU, and when (Unix seconds) a look brought any of it last."""

    sample: Sample
    at: float


class Readings:
    """The newest readings of each GPU, by its uuid. A look that finds a fault ends them: what was read before is past."""

    def __init__(self) -> None:
        self._newest: dict[str, Newest] = {}

    def saw(self, uuid: str, seen: Sample, now: float) -> None:
        """Takes in a look at Unix time `now`. What it did not ask for is as an earlier one read it."""
        if seen.fault:
            self._newest.pop(uuid, None)
            return
        before = self._newest.get(uuid)
        if before is not None and seen.asked is not None:
            seen = replace(before.sample, **{name: getattr(seen, name) for name in _READ if name in seen.asked})
        self._newest[uuid] = Newest(seen, now)

    def keep(self, uuids: frozenset[str]) -> None:
        """Forgets the GPUs that are none of these."""
        for uuid in self._newest.keys() - uuids:
            del self._newest[uuid]

    def of(self, uuid: str) -> Newest | None:
        """The newest readings of a GPU; None before the first look, and after one that found a fault."""
        return self._newest.get(uuid)


Told = Mapping[str, float | int | str | bool | None]


def told(gpu: Gpu, newest: Newest | None) -> Told:
    """What is shown of a GPU's readings: plain data, None where NVML does not say, or has not said yet.

    Returns:
        Limits and sizes, which outlive a fault: `slowdown_celsius`, `shutdown_celsius`, `gpu_max_celsius`, `memory_max_celsius`,
        `memory_total_bytes`. Readings: `at` (Unix seconds of the last look that read anything), `temperature_celsius`,
        `memory_temperature_celsius`, `margin_celsius`, `power_watts`, `power_limit_watts`, `energy_joules`,
        `utilization_ratio`, `memory_used_bytes`, `recovery_action` (of `RECOVERY_ACTIONS`, or the number of a later one),
        `fabric` (of `FABRIC_STATES`; None where the GPU has none), `nvlinks_active`, `nvlinks_inactive`, `clocks_events` (the
        mask), and under their names as in `Sample` the counts and flags of memory, NVLink, PCIe and licenses.
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
