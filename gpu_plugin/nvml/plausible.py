"""Which values of NVML can be true. Pure: a value that cannot be true is unknown (None), for every signal.

Two kinds of values are odd: one outside the range in the table, and a counter that goes back in one look and not in the next.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from gpu_plugin.devices.node import Thresholds
from gpu_plugin.health.observation import Fabric, Sample


class Range(NamedTuple):
    """The least and the most that a value can be, both included, and the source of that."""

    least: int
    most: int
    source: str

    def within(self, value: int | None) -> int | None:
        """The value; None if it is outside, or unknown."""
        return value if value is not None and self.least <= value <= self.most else None


# Means "no value" in many structures of nvml.h. Registers of a device off the bus read as all ones, too.
UINT_MAX = 2**32 - 1

THRESHOLD = Range(40, 200, "°C; H200 87 to 95. Virtual functions report 0, and small numbers are no limit of a GPU")
MARGIN = Range(-200, 200, "°C relative to T.Limit, fields 193 to 196")

_CELSIUS = Range(0, 200, "°C; silicon fails below 200, and cooled rooms do not freeze")
_COUNT = Range(0, UINT_MAX - 1, "events; a 32-bit counter that is all ones is no count")
_MILLIWATTS = Range(0, 10_000_000, "mW; 10 kW is five times what any GPU draws")
_GENERATION = Range(1, 10, "PCI Express Base Specification: 1 to 7, with room for later ones")
_LANES = Range(1, 32, "PCI Express Base Specification: x1 to x32")

# By field of a Sample
RANGES: Mapping[str, Range] = {
    "temperature": _CELSIUS,
    "memory_temperature": _CELSIUS,
    "margin": MARGIN,
    "energy": Range(1, 2 * 10**15, "mJ; a GPU that is on draws power, and 2 kW for 30 years are 2 * 10^15 mJ"),
    "recovery_action": Range(0, 1000, "nvmlDeviceGpuRecoveryAction_t: 0 to 7, with room for later ones"),
    "ecc_uncorrected": _COUNT,
    "ecc_corrected": _COUNT,
    "retired_pages": Range(0, 1000, "NVIDIA, Dynamic Page Retirement: 64 at most"),
    "remapped_correctable": _COUNT,
    "remapped_uncorrectable": _COUNT,
    "clocks_event_reasons": Range(
        0, 2**31 - 1, "nvmlClocksEventReason*: a mask of which a dozen low bits have a meaning"
    ),
    "nvlink_crc_errors": _COUNT,
    "nvlink_failed_recoveries": _COUNT,
    "pcie_width": _LANES,
    "pcie_max_width": _LANES,
    "pcie_generation": _GENERATION,
    "pcie_max_generation": _GENERATION,
    "pcie_replays": _COUNT,
    "pcie_fatal_errors": _COUNT,
    "power": _MILLIWATTS,
    "power_limit": _MILLIWATTS,
    "utilization": Range(0, 100, "percent"),
    "memory_used": Range(0, 2**50, "bytes"),
}

# Fields of a Sample that only grow until a reset sets them back
COUNTERS = (
    "energy",
    "ecc_uncorrected",
    "ecc_corrected",
    "retired_pages",
    "remapped_correctable",
    "remapped_uncorrectable",
    "nvlink_crc_errors",
    "nvlink_failed_recoveries",
    "pcie_replays",
    "pcie_fatal_errors",
)

_FABRIC_STATE = Range(0, 15, "nvmlGpuFabricState_t: 0 to 3, with room for later ones")
_FABRIC_STATUS = Range(0, 999, "nvmlReturn_t: 0 to 999")

_ALL_ONES = frozenset({-1, UINT_MAX, 2**64 - 1})  # All bits set, in each type that NVML has for a flag


def plausible(values: Mapping[str, Any]) -> dict[str, Any]:
    """These values of fields of a Sample, with None for each that cannot be true."""
    found = {name: RANGES[name].within(value) if name in RANGES else value for name, value in values.items()}
    fabric = values.get("fabric")
    return found if fabric is None else found | {"fabric": _fabric(fabric)}


def flag(value: int) -> bool | None:
    """Whether a flag is set: any number but 0, and unknown (None) if it is all ones."""
    return None if value in _ALL_ONES else bool(value)


def plausible_limits(limits: Thresholds, within: Range) -> Thresholds:
    """These limits, with None for each that no GPU has."""
    return Thresholds(
        within.within(limits.shutdown),
        within.within(limits.slowdown),
        within.within(limits.memory_max),
        within.within(limits.gpu_max),
    )


def _fabric(reported: Fabric) -> Fabric | None:
    if _FABRIC_STATE.within(reported.state) is None or _FABRIC_STATUS.within(reported.status) is None:
        return None
    return replace(reported, health_mask=0) if reported.health_mask == UINT_MAX else reported


class CounterHistory:
    """The counters of one GPU as they were read last, to find a counter that goes back in one look and not in the next."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._back: dict[str, int] = {}

    def confirmed(self, seen: Sample) -> Sample:
        """The sample, in which each counter that went back is unknown unless the look before read it as low already."""
        unconfirmed: dict[str, Any] = {}
        for name in COUNTERS:
            value = getattr(seen, name)
            if value is None:
                continue
            back = self._back.pop(name, None)
            if value < self._last.get(name, 0) and (back is None or value < back):
                self._back[name] = value
                unconfirmed[name] = None
            else:
                self._last[name] = value
        return replace(seen, **unconfirmed, unknown=seen.unknown.union(unconfirmed)) if unconfirmed else seen

    @property
    def doubtful(self) -> bool:
        """Whether the next look decides about a counter."""
        return bool(self._back)
