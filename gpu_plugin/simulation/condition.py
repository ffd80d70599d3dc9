"""What changes about one GPU of a simulated node, and what a reset, a boot and a repair make of it. Pure."""

from collections.abc import Mapping
from enum import IntEnum

import msgspec

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml.port import RemappedRows
from gpu_plugin.simulation.profile import GpuProfile


class Field(IntEnum):
    """NVML_FI_DEV_* of the fields that faults change, where a profile lists them."""

    RETIRED_PAGES = 30
    """RETIRED_DBE: pages retired for a double-bit error."""
    NVLINK_CRC_ERRORS = 38
    """NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL."""
    MEMORY_TEMPERATURE = 82
    """MEMORY_TEMP, °C."""
    PCIE_FATAL_ERRORS = 180
    """PCIE_COUNT_FATAL_ERROR."""
    NVLINK_FAILED_RECOVERIES = 214
    """NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS."""
    RECOVERY_ACTION = 230
    """GET_GPU_RECOVERY_ACTION: nvmlDeviceGpuRecoveryAction_t."""


_VOLATILE_FIELDS = frozenset(
    {Field.NVLINK_CRC_ERRORS, Field.PCIE_FATAL_ERRORS, Field.NVLINK_FAILED_RECOVERIES, Field.RECOVERY_ACTION}
)
"""Fields that a reset sets back."""

COMPLETED = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED: before it a GPU is in no cluster and no clique."""

# nvmlGpuFabricInfoV_t: NVML_GPU_FABRIC_HEALTH_MASK_* are pairs of bits from DEGRADED_BW up, 1 true and 2 false, then from bit
# 8 INCORRECT_CONFIGURATION, of which 1 is none.
FABRICS: Mapping[str, Fabric] = {
    "in-progress": Fabric(state=2),
    "unhealthy": Fabric(state=COMPLETED, health_mask=0x19A, summary=2),  # ROUTE_UNHEALTHY is true
    "limited": Fabric(state=COMPLETED, health_mask=0x1A9, summary=3),  # DEGRADED_BW is true
}
"""What a fabric can be told to be, by its name, besides `completed`, which is what the profile says.

Once it is completed, cluster and clique are the profile's all the same.
"""

UNREADABLE, UNKNOWN = "unreadable", "unknown"
"""How little a GPU's place on PCIe can be told to be known: NVML does not say what it shares with others; nor does sysfs."""


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU now. None, and what is left out: as its profile says, or as it is when nothing is wrong with it.

    `energy_since` is on the wall clock and `hung_until` on the node's own, both in seconds; temperatures are in °C.
    `binding` is another number whenever the driver was bound anew. `error` is the nvmlReturn_t of every call about the GPU.
    `fields` are values by NVML_FI_* id that differ from the profile's, `links_down` NVLinks by number that are inactive at
    this end, `fabric` is a key of `FABRICS`, `topology` is `UNREADABLE` or `UNKNOWN`. `ecc_uncorrected`, `pcie_replays` count
    from the last reset.
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


def reset(was: Condition, now: float) -> Condition:
    """After a reset of the GPU at `now` on the wall clock: what the driver counts begins at 0, what waited for one is done.

    A GPU that is lost or has vanished stays so, and what only a repair mends stays too.
    """
    return msgspec.structs.replace(
        was,
        energy_since=now,
        hung_until=None,
        error=None if was.error == Return.RESET_REQUIRED else was.error,
        fields={number: value for number, value in was.fields.items() if number not in _VOLATILE_FIELDS},
        ecc_uncorrected=0,
        remap_pending=False,
        retirement_pending=False,
        links_down=(),
        fabric=None,
        pcie_replays=0,
    )


def booted(was: Condition, now: float) -> Condition:
    """After a boot of the node at `now` on the wall clock: reset, back on the bus, and bound anew."""
    return msgspec.structs.replace(
        reset(was, now), lost=False, vanished=False, error=None, hung_until=None, binding=was.binding + 1
    )


def returned(was: Condition, now: float) -> Condition:
    """Back on the bus at `now` on the wall clock, and bound anew: the driver's own counters begin at 0."""
    return msgspec.structs.replace(
        was, vanished=False, energy_since=now, ecc_uncorrected=0, pcie_replays=0, binding=was.binding + 1
    )


def healed(was: Condition, now: float) -> Condition:
    """Repaired, or replaced by a sound one, at `now` on the wall clock: bound anew, and nothing is wrong with it."""
    return Condition(energy_since=now, binding=was.binding + 1)


def temperature(built: GpuProfile, now: Condition) -> int:
    """°C of the GPU sensor."""
    return built.idle_temperature if now.temperature is None else now.temperature


def margin(built: GpuProfile, now: Condition) -> int | None:
    """°C left to T.Limit; None: not supported."""
    if built.margin is None:
        return None
    if now.margin is not None:
        return now.margin
    return built.margin - (temperature(built, now) - built.idle_temperature)


def field_value(built: GpuProfile, now: Condition, number: int) -> int | None:
    """The value of a field by its NVML_FI_* id; None: not supported."""
    return now.fields.get(number, built.fields[number]) if number in built.fields else None


def remapped_rows(built: GpuProfile, now: Condition) -> RemappedRows | None:
    """None: not supported."""
    if not built.row_remapping:
        return None
    return RemappedRows(0, now.rows_uncorrectable, now.remap_pending, now.remap_failure)


def fabric(built: GpuProfile, now: Condition) -> Fabric | None:
    """None: not supported."""
    if built.fabric is None:
        return None
    told = built.fabric if now.fabric is None else FABRICS[now.fabric]
    joined = told.state == COMPLETED
    return Fabric(
        told.state,
        told.status,
        told.health_mask,
        told.summary,
        built.fabric.cluster if joined else "",
        built.fabric.clique if joined else 0,
    )
