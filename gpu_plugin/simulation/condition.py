"""The changing state of one GPU of a simulated node, and the effects of a reset, a boot and a repair on it. Pure."""

from collections.abc import Mapping

import msgspec

from gpu_plugin.devices.nvml_h import (
    FABRIC_CONFIGURATION_SHIFT,
    FABRIC_FALSE,
    FABRIC_TRUE,
    FI_GET_GPU_RECOVERY_ACTION,
    FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    FI_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    FI_NVLINK_GET_STATE,
    FI_PCIE_COUNT_FATAL_ERROR,
    FI_PCIE_REPLAY_COUNTER,
    FI_POWER_CURRENT_LIMIT,
    FI_POWER_INSTANT,
    FI_REMAPPED_FAILURE,
    FI_REMAPPED_PENDING,
    FI_REMAPPED_UNC,
    FI_RETIRED_PENDING,
    FabricCondition,
    FabricConfiguration,
    FabricState,
    FabricSummary,
    Return,
)
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml.port import PcieLink, RemappedRows
from gpu_plugin.simulation.profile import GpuProfile

_VOLATILE_FIELDS = frozenset({FI_PCIE_COUNT_FATAL_ERROR, FI_GET_GPU_RECOVERY_ACTION})
"""Fields that a reset clears."""

LINK_FIELDS = frozenset(
    {
        FI_NVLINK_GET_STATE,
        FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        FI_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    }
)
"""Fields for which NVML needs the number of an NVLink, in scopeId."""


def _health(true: FabricCondition) -> int:
    """Return a health mask in which only this condition is true, and the configuration has no fault."""
    values = {each: FABRIC_TRUE if each is true else FABRIC_FALSE for each in _JUDGED}
    return (
        sum(value << shift for shift, value in values.items()) | FabricConfiguration.NONE << FABRIC_CONFIGURATION_SHIFT
    )


_JUDGED = (
    FabricCondition.DEGRADED_BW,
    FabricCondition.ROUTE_RECOVERY,
    FabricCondition.ROUTE_UNHEALTHY,
    FabricCondition.ACCESS_TIMEOUT_RECOVERY,
)

FABRICS: Mapping[str, Fabric] = {
    "in-progress": Fabric(state=FabricState.IN_PROGRESS),
    "unhealthy": Fabric(
        state=FabricState.COMPLETED,
        health_mask=_health(FabricCondition.ROUTE_UNHEALTHY),
        summary=FabricSummary.UNHEALTHY,
    ),
    "limited": Fabric(
        state=FabricState.COMPLETED,
        health_mask=_health(FabricCondition.DEGRADED_BW),
        summary=FabricSummary.LIMITED_CAPACITY,
    ),
}
"""The names of states that a fault can give a fabric. The name `completed` is the profile's state.

In all completed states, cluster and clique are the profile's.
"""

UNREADABLE = "unreadable"
UNKNOWN = "unknown"
"""Values of `topology` for an unknown place on PCIe: NVML does not report it; sysfs does not report it either."""


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The present state of one GPU. None and defaults mean the profile's value, or the state without faults.

    `energy_since` is a time of the wall clock and `hung_until` of the node's clock, both in seconds; temperatures are in °C.
    `binding` changes whenever the driver is bound again. `error` is the nvmlReturn_t of all calls about the GPU. `fields` are
    values by NVML_FI_* id that differ from the profile's, and `link_fields` are values of NVLinks by id and then by link.
    `links_down` are the numbers of NVLinks that are inactive at this end, `fabric` is a key of `FABRICS`, and `topology` is
    `UNREADABLE` or `UNKNOWN`. `ecc_uncorrected` and `pcie_replays` count since the last reset. `persistence` is whether the
    driver keeps the GPU initialised while no process uses it, and `slow` is the duration of each call about the GPU in seconds.
    `watts` is its power draw, `utilization` is in percent, `memory_used` in bytes. `mig` are the MIG profiles into which it is
    partitioned; None outside MIG mode.
    """

    energy_since: float
    binding: int = 1
    lost: bool = False
    vanished: bool = False
    hung_until: float | None = None
    error: int | None = None
    temperature: int | None = None
    margin: int | None = None
    fields: dict[int, int] = {}
    link_fields: dict[int, dict[int, int]] = {}
    ecc_uncorrected: int = 0
    sram_threshold: bool = False
    rows_uncorrectable: int = 0
    remap_pending: bool = False
    remap_failure: bool = False
    retirement_pending: bool = False
    unrepairable_memory: bool = False
    clocks_event_reasons: int | None = None
    links_down: tuple[int, ...] = ()
    fabric: str | None = None
    topology: str | None = None
    pcie_width: int | None = None
    pcie_replays: int = 0
    persistence: bool = True
    slow: float | None = None
    watts: int | None = None
    utilization: int = 0
    memory_used: int = 0
    mig: tuple[str, ...] | None = None


def reset(was: Condition, now: float, *, energy: bool = True) -> Condition:
    """Return the state after a reset of the GPU at `now` on the wall clock: counters are 0, pending changes are done.

    A lost or vanished GPU stays lost or vanished, and damage that only a repair fixes stays. Energy counts from the time when
    the driver was loaded (nvml.h): if the driver stays loaded during the reset, `energy` is False.
    """
    return msgspec.structs.replace(
        was,
        energy_since=now if energy else was.energy_since,
        hung_until=None,
        error=None if was.error == Return.RESET_REQUIRED else was.error,
        fields={number: value for number, value in was.fields.items() if number not in _VOLATILE_FIELDS},
        link_fields={},
        ecc_uncorrected=0,
        remap_pending=False,
        retirement_pending=False,
        links_down=(),
        fabric=None,
        pcie_replays=0,
    )


def initialised(was: Condition, now: float) -> Condition:
    """Return the state after the driver initialised the GPU at `now`, as it does if nothing kept the GPU initialised."""
    return msgspec.structs.replace(
        was,
        energy_since=now,
        fields={number: value for number, value in was.fields.items() if number != FI_PCIE_COUNT_FATAL_ERROR},
        link_fields={},
        ecc_uncorrected=0,
        pcie_replays=0,
    )


def booted(was: Condition, now: float) -> Condition:
    """Return the state after a boot of the node at `now` on the wall clock: reset, on the bus, and bound again."""
    return msgspec.structs.replace(
        reset(was, now), lost=False, vanished=False, error=None, hung_until=None, binding=was.binding + 1
    )


def returned(was: Condition, now: float) -> Condition:
    """Return the state after the GPU returned to the bus at `now` and was bound again: the driver's own counters are 0."""
    return msgspec.structs.replace(
        was, vanished=False, energy_since=now, ecc_uncorrected=0, pcie_replays=0, binding=was.binding + 1
    )


def healed(was: Condition, now: float) -> Condition:
    """Return the state after a repair or replacement at `now`: bound again, with the same partition and without faults."""
    return Condition(energy_since=now, binding=was.binding + 1, mig=was.mig)


def temperature(built: GpuProfile, now: Condition) -> int:
    """Return the temperature of the GPU sensor, in °C."""
    return built.idle_temperature if now.temperature is None else now.temperature


def margin(built: GpuProfile, now: Condition) -> int | None:
    """Return the degrees left to T.Limit, in °C; None: not supported."""
    if built.margin is None:
        return None
    if now.margin is not None:
        return now.margin
    return built.margin - (temperature(built, now) - built.idle_temperature)


def power(built: GpuProfile, now: Condition) -> int:
    """Return the power draw, in mW."""
    return 1000 * (built.idle_watts if now.watts is None else now.watts)


def power_limit(built: GpuProfile) -> int:
    """Return the power limit, in mW."""
    return 1000 * built.limit_watts


def clocks_event_reasons(built: GpuProfile, now: Condition) -> int | None:
    """Return the mask of reasons; None: not supported."""
    if built.clocks_event_reasons is None or now.clocks_event_reasons is None:
        return built.clocks_event_reasons
    return now.clocks_event_reasons


def pcie_link(built: GpuProfile, now: Condition) -> PcieLink | None:
    """Return the width of the PCIe link; None: not supported."""
    if built.pcie_width is None:
        return None
    return PcieLink(built.pcie_width if now.pcie_width is None else now.pcie_width, built.pcie_width)


_PCIE_GENERATIONS = {5: 3, 6: 3, 7: 4, 8: 4, 9: 5, 10: 5}
"""The PCIe generation of NVIDIA's data center GPUs by nvmlDeviceArchitecture_t, from their data sheets."""


def pcie_generation(built: GpuProfile) -> int | None:
    """Return the PCIe generation of a link that is never idle; None: not supported."""
    return None if built.pcie_width is None else _PCIE_GENERATIONS.get(built.architecture or 0)


_PRESENT: Mapping[int, str] = {
    FI_REMAPPED_PENDING: "remap_pending",
    FI_REMAPPED_FAILURE: "remap_failure",
    FI_REMAPPED_UNC: "rows_uncorrectable",
    FI_RETIRED_PENDING: "retirement_pending",
    FI_PCIE_REPLAY_COUNTER: "pcie_replays",
}
"""The fields of a Condition that NVML returns by functions and by these field ids."""


def field_value(built: GpuProfile, now: Condition, number: int) -> int | None:
    """Return a field's value by its NVML_FI_* id, except fields that count with time; None: not supported."""
    if number not in built.fields:
        return None
    if number == FI_POWER_INSTANT:
        return power(built, now)
    if number == FI_POWER_CURRENT_LIMIT:
        return power_limit(built)
    if number in _PRESENT:
        return int(getattr(now, _PRESENT[number]))
    return now.fields.get(number, built.fields[number])


def link_value(built: GpuProfile, now: Condition, number: int, link: int) -> int | None:
    """Return the value of a field of an NVLink by its NVML_FI_* id; None: not supported."""
    if number not in built.fields:
        return None
    return now.link_fields.get(number, {}).get(link, built.fields[number])


def remapped_rows(built: GpuProfile, now: Condition) -> RemappedRows | None:
    """Return the numbers of remapped rows; None: not supported."""
    if not built.row_remapping:
        return None
    return RemappedRows(0, now.rows_uncorrectable, now.remap_pending, now.remap_failure)


def fabric(built: GpuProfile, now: Condition) -> Fabric | None:
    """Return the state of the fabric; None: not supported."""
    if built.fabric is None:
        return None
    state = built.fabric if now.fabric is None else FABRICS[now.fabric]
    joined = state.state == FabricState.COMPLETED
    return Fabric(
        state.state,
        state.status,
        state.health_mask,
        state.summary,
        built.fabric.cluster if joined else "",
        built.fabric.clique if joined else 0,
    )
