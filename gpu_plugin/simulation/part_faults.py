"""What can go wrong with a part of a simulated GPU: heat, memory, links, and what its driver makes of it."""

from collections.abc import Callable, Mapping

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

Fault = Callable[[SimulatedNode, int, object], str]
"""Applies a fault to a GPU by index with the value asked for; gives what was done, to follow "GPU 3 (GPU-...): ".

Raises:
    ConfigError: the value cannot be, or not on this GPU; nothing was done.
"""

_COLDEST = -40
_HOTTEST = 200
"""°C. No sensor says more or less; a slip of the finger does."""

_MANY = 1_000_000
"""More errors than a test counts; a slip of the finger does."""

_MAX_ENERGY = 10**15
"""mJ: what a kilowatt makes of thirty years."""

PERSISTENCE_MODES = ("on", "off")
"""What `persistence-mode` takes; the first is as it is built."""

_COMPLETED = "completed"
"""What `fabric` takes besides `FABRICS`: as the profile says."""

TOPOLOGIES = {
    "readable": "NVML and sysfs tell its place on PCIe",
    UNREADABLE: "NVML does not tell its place on PCIe, until healed",
    UNKNOWN: "neither NVML nor sysfs tells its place on PCIe, until healed",
}
"""What `topology` takes, and what it does; the first is as the profile says."""

RECOVERY_ACTIONS: Mapping[str, int] = {action.name.lower().replace("_", "-"): int(action) for action in RecoveryAction}
"""nvmlDeviceGpuRecoveryAction_t by the words that `recovery-action` takes for it."""


def _temperature(node: SimulatedNode, gpu: int, value: object) -> str:
    celsius = integer("temperature", value, _COLDEST, _HOTTEST, " °C")
    node.set_temperature(gpu, celsius)
    return f"now at {celsius} °C, until healed"


def _memory_temperature(node: SimulatedNode, gpu: int, value: object) -> str:
    celsius = integer("memory-temperature", value, _COLDEST, _HOTTEST, " °C")
    _set_field(node, gpu, "memory-temperature", FI_MEMORY_TEMP, celsius)
    return f"its memory is now at {celsius} °C, until healed"


def _margin(node: SimulatedNode, gpu: int, value: object) -> str:
    celsius = integer("margin", value, -_HOTTEST, _HOTTEST, " °C")
    require(node, gpu, "margin", node.profile.gpus[gpu].margin is not None, "tells no margin temperature")
    node.change(gpu, margin=celsius)
    return f"now {celsius} °C from its temperature limit, until healed"


def _clocks_event_reasons(node: SimulatedNode, gpu: int, value: object) -> str:
    reasons = mask("clocks-event-reasons", value)
    require(
        node,
        gpu,
        "clocks-event-reasons",
        node.profile.gpus[gpu].clocks_event_reasons is not None,
        "tells no clocks event reasons",
    )
    node.change(gpu, clocks_event_reasons=reasons)
    return f"its clocks event reasons are {reasons:#x}, until healed"


def _ecc_uncorrected(node: SimulatedNode, gpu: int, value: object) -> str:
    errors = integer("ecc-uncorrected", value, 1, _MANY)
    require(node, gpu, "ecc-uncorrected", node.profile.gpus[gpu].ecc, "counts no memory errors")
    node.grow(gpu, "ecc_uncorrected", errors)
    node.post(gpu, EventType.DOUBLE_BIT_ECC)
    return f"{counted(errors, 'more uncorrected memory error')}, until reset"


def _ecc_cleared(node: SimulatedNode, gpu: int, value: object) -> str:
    check_flag("ecc-cleared", value)
    require(node, gpu, "ecc-cleared", node.profile.gpus[gpu].ecc, "counts no memory errors")
    node.change(gpu, ecc_uncorrected=0)
    return "its count of memory errors is 0 again, without a reset"


def _energy_dip(node: SimulatedNode, gpu: int, value: object) -> str:
    energy = integer("energy-dip", value, 1, _MAX_ENERGY, " mJ")
    node.dip(gpu, energy)
    return f"its energy counter is {energy} mJ less at the next reading than at the last, and counts on from there"


def _persistence_mode(node: SimulatedNode, gpu: int, value: object) -> str:
    if value not in PERSISTENCE_MODES:
        raise ConfigError(f"persistence-mode: {value!r}: one of {', '.join(PERSISTENCE_MODES)}")
    on = value == PERSISTENCE_MODES[0]
    node.change(gpu, persistence=on)
    if on:
        return "persistence mode is on: its counters outlive the processes that have the driver open"
    return "persistence mode is off: its counters begin at 0 when nobody has the driver open any more, until healed"


def _remap_pending(node: SimulatedNode, gpu: int, value: object) -> str:
    check_flag("remap-pending", value)
    require(node, gpu, "remap-pending", node.profile.gpus[gpu].row_remapping, "remaps no memory rows")
    node.change(gpu, rows_uncorrectable=node.condition(gpu).rows_uncorrectable + 1, remap_pending=True)
    return "a memory row waits to be remapped, until reset"


def _remap_failure(node: SimulatedNode, gpu: int, value: object) -> str:
    check_flag("remap-failure", value)
    require(node, gpu, "remap-failure", node.profile.gpus[gpu].row_remapping, "remaps no memory rows")
    node.change(gpu, remap_failure=True)
    return "a memory row could not be remapped, until healed"


def _retired_pages(node: SimulatedNode, gpu: int, value: object) -> str:
    pages = integer("retired-pages", value, 0, _MANY)
    require(node, gpu, "retired-pages", node.profile.gpus[gpu].page_retirement, "retires no memory pages")
    _set_field(node, gpu, "retired-pages", FI_RETIRED_DBE, pages)
    return f"{pages} memory pages are retired, until healed"


def _retirement_pending(node: SimulatedNode, gpu: int, value: object) -> str:
    check_flag("retirement-pending", value)
    require(node, gpu, "retirement-pending", node.profile.gpus[gpu].page_retirement, "retires no memory pages")
    node.change(gpu, retirement_pending=True)
    return "a memory page waits to be retired, until reset"


def _sram_threshold(node: SimulatedNode, gpu: int, value: object) -> str:
    check_flag("sram-threshold", value)
    require(node, gpu, "sram-threshold", node.profile.gpus[gpu].sram_status, "tells nothing of its SRAM")
    node.change(gpu, sram_threshold=True)
    return "its SRAM has had more errors than it may, until healed"


def _unrepairable_memory(node: SimulatedNode, gpu: int, value: object) -> str:
    check_flag("unrepairable-memory", value)
    require(
        node,
        gpu,
        "unrepairable-memory",
        node.profile.gpus[gpu].unrepairable_memory,
        "tells nothing of unrepairable memory",
    )
    node.change(gpu, unrepairable_memory=True)
    return "it has memory that cannot be repaired, until healed"


def _recovery_action(node: SimulatedNode, gpu: int, value: object) -> str:
    action = RECOVERY_ACTIONS.get(value) if isinstance(value, str) else None
    if action is None:
        raise ConfigError(f"recovery-action: {value!r}: one of {', '.join(RECOVERY_ACTIONS)}")
    _set_field(node, gpu, "recovery-action", FI_GET_GPU_RECOVERY_ACTION, action)
    node.post(gpu, EventType.GPU_RECOVERY_ACTION)
    if not action:
        return "its driver asks for no recovery, whatever Xid is raised, until reset"
    return f"its driver asks for {value}, until reset"


def _nvlink_down(node: SimulatedNode, gpu: int, value: object) -> str:
    link = _link(node, gpu, "nvlink-down", value)
    node.change(gpu, links_down=tuple(sorted({*node.condition(gpu).links_down, link})))
    return f"its NVLink {link} is down, until reset"


def _nvlink_up(node: SimulatedNode, gpu: int, value: object) -> str:
    link = _link(node, gpu, "nvlink-up", value)
    node.change(gpu, links_down=tuple(each for each in node.condition(gpu).links_down if each != link))
    return f"its NVLink {link} is up"


def _nvlink_errors(node: SimulatedNode, gpu: int, value: object) -> str:
    errors = integer("nvlink-errors", value, 1, _MANY)
    link = _grow_on_link(node, gpu, "nvlink-errors", FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, errors)
    return f"{errors} more recoveries of its NVLink {link} failed, until reset"


def _nvlink_crc_errors(node: SimulatedNode, gpu: int, value: object) -> str:
    errors = integer("nvlink-crc-errors", value, 1, _MANY)
    link = _grow_on_link(node, gpu, "nvlink-crc-errors", FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, errors)
    return f"{errors} more CRC errors on its NVLink {link}, until reset"


def _fabric(node: SimulatedNode, gpu: int, value: object) -> str:
    if value not in (_COMPLETED, *FABRICS):
        raise ConfigError(f"fabric: {value!r}: one of {', '.join((_COMPLETED, *FABRICS))}")
    built = node.profile.gpus[gpu].fabric
    require(node, gpu, "fabric", built and built.state, "is part of no NVLink fabric")
    node.change(gpu, fabric=None if value == _COMPLETED else value)
    return f"its NVLink fabric is {value}" + ("" if value == _COMPLETED else ", until reset")


def _topology(node: SimulatedNode, gpu: int, value: object) -> str:
    if not isinstance(value, str) or value not in TOPOLOGIES:
        raise ConfigError(f"topology: {value!r}: one of {', '.join(TOPOLOGIES)}")
    node.change(gpu, topology=value if value in (UNREADABLE, UNKNOWN) else None)
    return TOPOLOGIES[value]


def _pcie_width(node: SimulatedNode, gpu: int, value: object) -> str:
    widest = node.profile.gpus[gpu].pcie_width or 0
    require(node, gpu, "pcie-width", widest, "tells nothing of its PCIe link")
    lanes = integer("pcie-width", value, 1, widest, " lanes")
    node.change(gpu, pcie_width=lanes)
    return f"its PCIe link has {lanes} of {widest} lanes, until healed"


def _pcie_replays(node: SimulatedNode, gpu: int, value: object) -> str:
    replays = integer("pcie-replays", value, 1, _MANY)
    require(node, gpu, "pcie-replays", node.profile.gpus[gpu].pcie_width is not None, "tells nothing of its PCIe link")
    node.grow(gpu, "pcie_replays", replays)
    return f"{replays} more replays on its PCIe link, until reset"


def _pcie_fatal_errors(node: SimulatedNode, gpu: int, value: object) -> str:
    errors = integer("pcie-fatal-errors", value, 1, _MANY)
    _set_field(node, gpu, "pcie-fatal-errors", FI_PCIE_COUNT_FATAL_ERROR, errors, more=True)
    return f"{errors} more fatal errors on its PCIe link, until reset"


def _set_field(node: SimulatedNode, gpu: int, name: str, number: int, value: int, *, more: bool = False) -> None:
    _require_field(node, gpu, name, number)
    node.set_field(gpu, number, value, more=more)


def _grow_on_link(node: SimulatedNode, gpu: int, name: str, number: int, by: int) -> int:
    """Has a count of the last NVLink that leads anywhere grow; gives its number."""
    _require_field(node, gpu, name, number)
    links = [at for at, remote in enumerate(node.profile.remotes[gpu]) if remote is not None]
    require(node, gpu, name, links, "has no NVLinks")
    node.grow_on_link(gpu, links[-1], number, by)
    return links[-1]


def _link(node: SimulatedNode, gpu: int, name: str, value: object) -> int:
    links = node.profile.remotes[gpu]
    require(node, gpu, name, links, "has no NVLinks")
    link = integer(name, value, 0, len(links) - 1)
    require(node, gpu, name, links[link], f"has nothing at the other end of its NVLink {link}")
    return link


def _require_field(node: SimulatedNode, gpu: int, name: str, number: int) -> None:
    has = number in node.profile.gpus[gpu].fields
    require(node, gpu, name, has, f"does not have the field that tells it, {number}")


def require(node: SimulatedNode, gpu: int, name: str, has: object, lacks: str) -> None:
    """Raises ConfigError unless the GPU `has` what a fault takes; `lacks` says what its model does not do."""
    if not has:
        raise ConfigError(f"{name}: {node.profile.gpus[gpu].name}: the simulated one {lacks}")


def integer(name: str, value: object, low: int, high: int, unit: str = "") -> int:
    """The value, if it is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {value!r} is not a whole number")
    if not low <= value <= high:
        raise ConfigError(f"{name}: {value}: from {low} to {high}{unit}")
    return value


def mask(name: str, value: object, low: int = 0) -> int:
    """The value, if it is a mask of 32 bits, and no less than `low`."""
    return integer(name, value, low, 0xFFFFFFFF)


def check_flag(name: str, value: object) -> None:
    """Raises ConfigError unless the value is true."""
    if value is not True:
        raise ConfigError(f"{name}: {value!r}: it is either asked for with true or left out")


PART_FAULTS: Mapping[str, Fault] = {
    "temperature": _temperature,
    "memory-temperature": _memory_temperature,
    "margin": _margin,
    "clocks-event-reasons": _clocks_event_reasons,
    "ecc-uncorrected": _ecc_uncorrected,
    "ecc-cleared": _ecc_cleared,
    "energy-dip": _energy_dip,
    "persistence-mode": _persistence_mode,
    "remap-pending": _remap_pending,
    "remap-failure": _remap_failure,
    "retired-pages": _retired_pages,
    "retirement-pending": _retirement_pending,
    "sram-threshold": _sram_threshold,
    "unrepairable-memory": _unrepairable_memory,
    "recovery-action": _recovery_action,
    "nvlink-down": _nvlink_down,
    "nvlink-up": _nvlink_up,
    "nvlink-errors": _nvlink_errors,
    "nvlink-crc-errors": _nvlink_crc_errors,
    "fabric": _fabric,
    "topology": _topology,
    "pcie-width": _pcie_width,
    "pcie-replays": _pcie_replays,
    "pcie-fatal-errors": _pcie_fatal_errors,
}
"""By the key that asks for it."""
