"""The changing state of one GPU of a simulated node, and the effects of a reset, a boot and a return on it. Pure."""

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
    FabricCondition,
    FabricConfiguration,
    FabricState,
    FabricSummary,
    Return,
)
from gpu_plugin.health.observation import Fabric

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


class Condition(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The present state of one GPU. None and defaults mean the profile's value, or the state without faults.

    `energy_since` is a time of the wall clock and `hung_until` of the node's clock, both in seconds; temperatures are in °C.
    `binding` changes whenever the driver is bound again. `error` is the nvmlReturn_t of all calls about the GPU. `fields` are
    values by NVML_FI_* id that differ from the profile's, and `link_fields` are values of NVLinks by id and then by link; both
    are replaced by changes. `links_down` are the numbers of NVLinks that are inactive at this end, `fabric` is a key of
    `FABRICS`, and `topology` is `UNREADABLE` or `UNKNOWN`. `ecc_uncorrected` and `pcie_replays` count since the last reset.
    `persistence` is whether the driver keeps the GPU initialised while no process uses it, and `slow` is the duration of each
    call about the GPU in seconds. `watts` is its power draw, `utilization` is in percent, `memory_used` in bytes. `mig` are the
    MIG profiles into which it is partitioned; None outside MIG mode.
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

    def initialise(self, now: float) -> None:
        """Have the driver initialise the GPU at `now` on the wall clock, as it does if nothing kept the GPU initialised."""
        self.energy_since = now
        self.fields = _without(self.fields, FI_PCIE_COUNT_FATAL_ERROR)
        self.link_fields = {}
        self.ecc_uncorrected = self.pcie_replays = 0

    def reset(self, now: float, *, energy: bool = True) -> None:
        """Reset the GPU at `now` on the wall clock: counters are 0, pending changes are done.

        A lost or vanished GPU stays lost or vanished, and damage that only a repair fixes stays. Energy counts from the time
        when the driver was loaded (nvml.h): if the driver stays loaded during the reset, `energy` is False.
        """
        since = now if energy else self.energy_since
        self.initialise(now)
        self.energy_since = since
        self.fields = _without(self.fields, FI_GET_GPU_RECOVERY_ACTION)
        self.hung_until = self.fabric = None
        self.remap_pending = self.retirement_pending = False
        self.links_down = ()
        if self.error == Return.RESET_REQUIRED:
            self.error = None

    def boot(self, now: float) -> None:
        """Boot the node at `now` on the wall clock: the GPU is reset, on the bus, and bound again."""
        self.reset(now)
        self.lost = self.vanished = False
        self.error = None
        self.binding += 1

    def bring_back(self, now: float) -> None:
        """Return the GPU to the bus at `now` and bind the driver again, whose own counters are then 0."""
        self.energy_since = now
        self.vanished = False
        self.ecc_uncorrected = self.pcie_replays = 0
        self.binding += 1


def _without(fields: dict[int, int], number: int) -> dict[int, int]:
    return {each: value for each, value in fields.items() if each != number}
