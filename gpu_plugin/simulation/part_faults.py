"""Faults of the parts of a simulated GPU: temperature, memory, links, and the driver's values for it."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.words import counted
from gpu_plugin.devices.nvml_h import (
    FI_GET_GPU_RECOVERY_ACTION,
    FI_MEMORY_TEMP,
    FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    FI_PCIE_COUNT_FATAL_ERROR,
    FI_RETIRED_DBE,
    EventType,
    RecoveryAction,
)
from gpu_plugin.simulation.condition import FABRICS, UNKNOWN, UNREADABLE
from gpu_plugin.simulation.hardware import SimulatedNode

Reader = Callable[[str, object], Any]
"""Converts the requested value of a fault, given the fault's name. Raises ConfigError if the value is invalid."""

Effect = Callable[[SimulatedNode, int, Any], str]
"""Applies a fault with its value to a GPU by index. Returns what was done, as the end of "GPU 3 (GPU-...): ".

Raises ConfigError if this GPU cannot have the fault; then nothing was changed.
"""

_LACKS = {
    "margin": "does not report a margin temperature",
    "clocks_event_reasons": "does not report clocks event reasons",
    "ecc": "does not count memory errors",
    "row_remapping": "does not remap memory rows",
    "page_retirement": "does not retire memory pages",
    "sram_status": "does not report SRAM errors",
    "unrepairable_memory": "does not report unrepairable memory",
    "pcie_width": "does not report its PCIe link",
}
"""For each property that a GPU's profile may lack (None or False there), a text that says what its model does not do."""

MASK = 0xFFFFFFFF
"""The largest mask of 32 bits."""

_HOTTEST = 200
"""°C. No sensor reports more, so a higher value is a typing error."""

_MANY = 1_000_000
"""No test counts more errors, so a higher value is a typing error."""

_MAX_ENERGY = 10**15
"""mJ: a kilowatt for thirty years."""

PERSISTENCE_MODES = ("on", "off")
"""Values of `persistence-mode`; the first is the default of the hardware."""

_COMPLETED = "completed"
"""A value of `fabric` in addition to `FABRICS`: the profile's state."""

TOPOLOGIES = {
    "readable": "NVML and sysfs report its place on PCIe",
    UNREADABLE: "NVML does not report its place on PCIe, until healed",
    UNKNOWN: "neither NVML nor sysfs reports its place on PCIe, until healed",
}
"""Values of `topology` with their effects; the first is the profile's state."""

RECOVERY_ACTIONS: Mapping[str, int] = {action.name.lower().replace("_", "-"): int(action) for action in RecoveryAction}
"""nvmlDeviceGpuRecoveryAction_t by the values of `recovery-action`."""


class Fault:
    """A fault of a GPU. `needs` are required properties of the GPU's profile: keys of `_LACKS`, or NVML_FI_* ids of fields."""

    def __init__(self, read: Reader, effect: Effect, *needs: str | int) -> None:
        self.read = read
        self.effect = effect
        self._needs = needs

    def apply(self, node: SimulatedNode, gpu: int, name: str, value: object) -> str:
        """Apply the fault and return the text of its `Effect`. Raises ConfigError, also if the GPU lacks a needed property."""
        read, built = self.read(name, value), node.profile.gpus[gpu]
        for need in self._needs:
            if isinstance(need, int):
                require(node, gpu, name, need in built.fields, f"does not have the field for it, {need}")
            else:
                has = getattr(built, need)
                require(node, gpu, name, has is not None and has is not False, _LACKS[need])
        return self.effect(node, gpu, read)


def require(node: SimulatedNode, gpu: int, name: str, has: object, lacks: str) -> None:
    """Raise ConfigError unless the GPU `has` a property that a fault needs; `lacks` says what its model does not do."""
    if not has:
        raise ConfigError(f"{name}: {node.profile.gpus[gpu].name}: the simulated one {lacks}")


# Readers of values


def whole(low: int, high: int, unit: str = "") -> Reader:
    """Return a reader of whole numbers from `low` to `high`."""

    def read(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name}: {value!r} is not a whole number")
        if not low <= value <= high:
            raise ConfigError(f"{name}: {value}: from {low} to {high}{unit}")
        return value

    return read


def flag(name: str, value: object) -> None:
    """Read a value that must be true."""
    if value is not True:
        raise ConfigError(f"{name}: {value!r}: it is either asked for with true or left out")


def one_of(words: Collection[str]) -> Reader:
    """Return a reader of one of these words."""

    def read(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise ConfigError(f"{name}: {value!r}: one of {', '.join(words)}")
        return value

    return read


# Effects


def change(says: str, *named: str, **others: object) -> Effect:
    """Return an effect that sets the fields `named` of `Condition` to the value, and `others`; `says` is its text with a {}."""

    def effect(node: SimulatedNode, gpu: int, value: object) -> str:
        node.change(gpu, **dict.fromkeys(named, value), **others)
        return says.format(value)

    return effect


def _set_field(says: str, number: int, *, more: bool = False) -> Effect:
    """Return an effect that sets a field of the GPU to the value, or adds it with `more`; `says` as in `change`."""

    def effect(node: SimulatedNode, gpu: int, value: int) -> str:
        node.set_field(gpu, number, value, more=more)
        return says.format(value)

    return effect


def _grow_on_link(says: str, name: str, number: int) -> Effect:
    """Return an effect that adds to a count of the GPU's last connected NVLink; `says` has places for value and link."""

    def effect(node: SimulatedNode, gpu: int, value: int) -> str:
        links = [at for at, remote in enumerate(node.profile.remotes[gpu]) if remote is not None]
        require(node, gpu, name, links, "has no NVLinks")
        node.grow_on_link(gpu, links[-1], number, value)
        return says.format(value, links[-1])

    return effect


def _ecc_uncorrected(node: SimulatedNode, gpu: int, errors: int) -> str:
    node.grow(gpu, "ecc_uncorrected", errors)
    node.post(gpu, EventType.DOUBLE_BIT_ECC)
    return f"{counted(errors, 'more uncorrected memory error')}, until reset"


def _energy_dip(node: SimulatedNode, gpu: int, energy: int) -> str:
    node.dip(gpu, energy)
    return f"its energy counter is {energy} mJ less at the next reading than at the last, and counts on from there"


def _persistence_mode(node: SimulatedNode, gpu: int, mode: str) -> str:
    on = mode == PERSISTENCE_MODES[0]
    node.change(gpu, persistence=on)
    if on:
        return "persistence mode is on: its counters outlive the processes that have the driver open"
    return "persistence mode is off: its counters begin at 0 when nobody has the driver open any more, until healed"


def _remap_pending(node: SimulatedNode, gpu: int, _: object) -> str:
    node.change(gpu, rows_uncorrectable=node.condition(gpu).rows_uncorrectable + 1, remap_pending=True)
    return "a memory row waits to be remapped, until reset"


def _recovery_action(node: SimulatedNode, gpu: int, action: str) -> str:
    node.set_field(gpu, FI_GET_GPU_RECOVERY_ACTION, RECOVERY_ACTIONS[action])
    node.post(gpu, EventType.GPU_RECOVERY_ACTION)
    if not RECOVERY_ACTIONS[action]:
        return "its driver requests no recovery after any Xid, until reset"
    return f"its driver asks for {action}, until reset"


def _nvlink_down(node: SimulatedNode, gpu: int, value: object) -> str:
    link = _link(node, gpu, "nvlink-down", value)
    node.change(gpu, links_down=tuple(sorted({*node.condition(gpu).links_down, link})))
    return f"its NVLink {link} is down, until reset"


def _nvlink_up(node: SimulatedNode, gpu: int, value: object) -> str:
    link = _link(node, gpu, "nvlink-up", value)
    node.change(gpu, links_down=tuple(each for each in node.condition(gpu).links_down if each != link))
    return f"its NVLink {link} is up"


def _link(node: SimulatedNode, gpu: int, name: str, value: object) -> int:
    links = node.profile.remotes[gpu]
    require(node, gpu, name, links, "has no NVLinks")
    link = int(whole(0, len(links) - 1)(name, value))
    require(node, gpu, name, links[link], f"has nothing at the other end of its NVLink {link}")
    return link


def _fabric(node: SimulatedNode, gpu: int, state: str) -> str:
    built = node.profile.gpus[gpu].fabric
    require(node, gpu, "fabric", built and built.state, "is part of no NVLink fabric")
    node.change(gpu, fabric=None if state == _COMPLETED else state)
    return f"its NVLink fabric is {state}" + ("" if state == _COMPLETED else ", until reset")


def _topology(node: SimulatedNode, gpu: int, place: str) -> str:
    node.change(gpu, topology=place if place in (UNREADABLE, UNKNOWN) else None)
    return TOPOLOGIES[place]


def _pcie_width(node: SimulatedNode, gpu: int, value: object) -> str:
    widest = node.profile.gpus[gpu].pcie_width or 0
    lanes = whole(1, widest, " lanes")("pcie-width", value)
    node.change(gpu, pcie_width=lanes)
    return f"its PCIe link has {lanes} of {widest} lanes, until healed"


def _pcie_replays(node: SimulatedNode, gpu: int, replays: int) -> str:
    node.grow(gpu, "pcie_replays", replays)
    return f"{replays} more replays on its PCIe link, until reset"


_CELSIUS = whole(-40, _HOTTEST, " °C")
_COUNT = whole(1, _MANY)
_LINK_ERRORS = FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS
_CRC_ERRORS = FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL

PART_FAULTS: Mapping[str, Fault] = {
    "temperature": Fault(_CELSIUS, change("now at {} °C, until healed", "temperature")),
    "memory-temperature": Fault(
        _CELSIUS, _set_field("its memory is now at {} °C, until healed", FI_MEMORY_TEMP), FI_MEMORY_TEMP
    ),
    "margin": Fault(
        whole(-_HOTTEST, _HOTTEST, " °C"),
        change("now {} °C from its temperature limit, until healed", "margin"),
        "margin",
    ),
    "clocks-event-reasons": Fault(
        whole(0, MASK),
        change("its clocks event reasons are {:#x}, until healed", "clocks_event_reasons"),
        "clocks_event_reasons",
    ),
    "ecc-uncorrected": Fault(_COUNT, _ecc_uncorrected, "ecc"),
    "ecc-cleared": Fault(
        flag, change("its count of memory errors is 0 again, without a reset", ecc_uncorrected=0), "ecc"
    ),
    "energy-dip": Fault(whole(1, _MAX_ENERGY, " mJ"), _energy_dip),
    "persistence-mode": Fault(one_of(PERSISTENCE_MODES), _persistence_mode),
    "remap-pending": Fault(flag, _remap_pending, "row_remapping"),
    "remap-failure": Fault(
        flag, change("a memory row could not be remapped, until healed", remap_failure=True), "row_remapping"
    ),
    "retired-pages": Fault(
        whole(0, _MANY),
        _set_field("{} memory pages are retired, until healed", FI_RETIRED_DBE),
        "page_retirement",
        FI_RETIRED_DBE,
    ),
    "retirement-pending": Fault(
        flag, change("a memory page waits to be retired, until reset", retirement_pending=True), "page_retirement"
    ),
    "sram-threshold": Fault(
        flag, change("its SRAM has had more errors than it may, until healed", sram_threshold=True), "sram_status"
    ),
    "unrepairable-memory": Fault(
        flag,
        change("it has memory that cannot be repaired, until healed", unrepairable_memory=True),
        "unrepairable_memory",
    ),
    "recovery-action": Fault(one_of(RECOVERY_ACTIONS), _recovery_action, FI_GET_GPU_RECOVERY_ACTION),
    "nvlink-down": Fault(lambda _, link: link, _nvlink_down),
    "nvlink-up": Fault(lambda _, link: link, _nvlink_up),
    "nvlink-errors": Fault(
        _COUNT,
        _grow_on_link("{} more recoveries of its NVLink {} failed, until reset", "nvlink-errors", _LINK_ERRORS),
        _LINK_ERRORS,
    ),
    "nvlink-crc-errors": Fault(
        _COUNT,
        _grow_on_link("{} more CRC errors on its NVLink {}, until reset", "nvlink-crc-errors", _CRC_ERRORS),
        _CRC_ERRORS,
    ),
    "fabric": Fault(one_of((_COMPLETED, *FABRICS)), _fabric),
    "topology": Fault(one_of(TOPOLOGIES), _topology),
    "pcie-width": Fault(lambda _, lanes: lanes, _pcie_width, "pcie_width"),
    "pcie-replays": Fault(_COUNT, _pcie_replays, "pcie_width"),
    "pcie-fatal-errors": Fault(
        _COUNT,
        _set_field("{} more fatal errors on its PCIe link, until reset", FI_PCIE_COUNT_FATAL_ERROR, more=True),
        FI_PCIE_COUNT_FATAL_ERROR,
    ),
}
"""The faults by key."""
