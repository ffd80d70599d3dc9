"""The faults that change the state of one simulated GPU. A new fault is a function with the decorator `fault`.

A function applies the value to the GPU's state, and returns the end of "GPU 3 (GPU-...): ". It raises ConfigError, without the
fault's name and before any change, if this GPU cannot have the fault.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

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
    Return,
)
from gpu_plugin.simulation.fault_values import Reader, flag, one_of, read_seconds, unread, whole
from gpu_plugin.simulation.gpu import FABRICS, UNKNOWN, UNREADABLE, SimulatedGpu

# Higher values are typing errors.
_HOTTEST = 200  # °C
_CELSIUS = whole(-40, _HOTTEST, " °C")
_MANY = 1_000_000  # errors
_COUNT = whole(1, _MANY)
MASK = 0xFFFFFFFF

PERSISTENCE_MODES = ("on", "off")  # Values of `persistence-mode`; the first is the default of the hardware

_COMPLETED = "completed"  # a value of `fabric` in addition to `FABRICS`: the profile's state

# Values of `topology` with their effects; the first is the profile's state
TOPOLOGIES = {
    "readable": "NVML and sysfs report its place on PCIe",
    UNREADABLE: "NVML does not report its place on PCIe, until healed",
    UNKNOWN: "neither NVML nor sysfs reports its place on PCIe, until healed",
}

# nvmlDeviceGpuRecoveryAction_t by the values of `recovery-action`
RECOVERY_ACTIONS: Mapping[str, int] = {action.name.lower().replace("_", "-"): int(action) for action in RecoveryAction}

# For each property that a GPU's profile may lack (None or False there), a text that says what its model does not do
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

Effect = Callable[[SimulatedGpu, Any], str]


class GpuFault(msgspec.Struct, frozen=True):
    """`needs` are required properties of the GPU's profile: keys of `_LACKS`, or NVML_FI_* ids of fields.

    `posts` is the type of an event that the driver sends after the change, or 0.
    """

    read: Reader
    effect: Effect
    needs: tuple[str | int, ...]
    posts: int

    def check(self, gpu: SimulatedGpu) -> None:
        """Raise ConfigError unless the GPU has the properties that the fault needs."""
        for need in self.needs:
            if isinstance(need, int):
                require(gpu, need in gpu.built.fields, f"does not have the field for it, {need}")
            else:
                has = getattr(gpu.built, need)
                require(gpu, has is not None and has is not False, _LACKS[need])


GPU_FAULTS: dict[str, GpuFault] = {}  # by key, which is also the flag of `gpu-plugin fault`


def fault(key: str, read: Reader, *needs: str | int, posts: int = 0) -> Callable[[Effect], Effect]:
    """Declare the effect of a fault."""

    def declared(effect: Effect) -> Effect:
        GPU_FAULTS[key] = GpuFault(read, effect, needs, posts)
        return effect

    return declared


def require(gpu: SimulatedGpu, has: object, lacks: str) -> None:
    """Raise ConfigError unless the GPU `has` a property that the fault needs; `lacks` says what its model does not do."""
    if not has:
        raise ConfigError(f"{gpu.built.name}: the simulated one {lacks}")


@fault("recovery-action", one_of(RECOVERY_ACTIONS), FI_GET_GPU_RECOVERY_ACTION, posts=EventType.GPU_RECOVERY_ACTION)
def _recovery_action(gpu: SimulatedGpu, action: str) -> str:
    _set_field(gpu, FI_GET_GPU_RECOVERY_ACTION, RECOVERY_ACTIONS[action])
    if not RECOVERY_ACTIONS[action]:
        return "its driver requests no recovery after any Xid, until reset"
    return f"its driver asks for {action}, until reset"


def _set_field(gpu: SimulatedGpu, number: int, value: int) -> None:
    gpu.state.fields = {**gpu.state.fields, number: value}


# Temperature, clocks and energy


@fault("temperature", _CELSIUS)
def _temperature(gpu: SimulatedGpu, celsius: int) -> str:
    gpu.state.temperature = celsius
    return f"now at {celsius} °C, until healed"


@fault("memory-temperature", _CELSIUS, FI_MEMORY_TEMP)
def _memory_temperature(gpu: SimulatedGpu, celsius: int) -> str:
    _set_field(gpu, FI_MEMORY_TEMP, celsius)
    return f"its memory is now at {celsius} °C, until healed"


@fault("margin", whole(-_HOTTEST, _HOTTEST, " °C"), "margin")
def _margin(gpu: SimulatedGpu, celsius: int) -> str:
    gpu.state.margin = celsius
    return f"now {celsius} °C from its temperature limit, until healed"


@fault("clocks-event-reasons", whole(0, MASK), "clocks_event_reasons")
def _clocks_event_reasons(gpu: SimulatedGpu, reasons: int) -> str:
    gpu.state.clocks_event_reasons = reasons
    return f"its clocks event reasons are {reasons:#x}, until healed"


@fault("energy-dip", whole(1, 10**15, " mJ"))  # a kilowatt for thirty years
def _energy_dip(gpu: SimulatedGpu, energy: int) -> str:
    gpu.energy_dip = energy
    return f"its energy counter is {energy} mJ less at the next reading than at the last, and counts on from there"


@fault("persistence-mode", one_of(PERSISTENCE_MODES))
def _persistence_mode(gpu: SimulatedGpu, mode: str) -> str:
    on = mode == PERSISTENCE_MODES[0]
    gpu.state.persistence = on
    if on:
        return "persistence mode is on: its counters outlive the processes that have the driver open"
    return "persistence mode is off: its counters begin at 0 when nobody has the driver open any more, until healed"


# Memory


@fault("ecc-uncorrected", _COUNT, "ecc", posts=EventType.DOUBLE_BIT_ECC)
def _ecc_uncorrected(gpu: SimulatedGpu, errors: int) -> str:
    gpu.state.ecc_uncorrected += errors
    return f"{counted(errors, 'more uncorrected memory error')}, until reset"


@fault("ecc-cleared", flag, "ecc")
def _ecc_cleared(gpu: SimulatedGpu, _: None) -> str:
    gpu.state.ecc_uncorrected = 0
    return "its count of memory errors is 0 again, without a reset"


@fault("remap-pending", flag, "row_remapping")
def _remap_pending(gpu: SimulatedGpu, _: None) -> str:
    gpu.state.rows_uncorrectable += 1
    gpu.state.remap_pending = True
    return "a memory row waits to be remapped, until reset"


@fault("remap-failure", flag, "row_remapping")
def _remap_failure(gpu: SimulatedGpu, _: None) -> str:
    gpu.state.remap_failure = True
    return "a memory row could not be remapped, until healed"


@fault("retired-pages", whole(0, _MANY), "page_retirement", FI_RETIRED_DBE)
def _retired_pages(gpu: SimulatedGpu, pages: int) -> str:
    _set_field(gpu, FI_RETIRED_DBE, pages)
    return f"{pages} memory pages are retired, until healed"


@fault("retirement-pending", flag, "page_retirement")
def _retirement_pending(gpu: SimulatedGpu, _: None) -> str:
    gpu.state.retirement_pending = True
    return "a memory page waits to be retired, until reset"


@fault("sram-threshold", flag, "sram_status")
def _sram_threshold(gpu: SimulatedGpu, _: None) -> str:
    gpu.state.sram_threshold = True
    return "its SRAM has had more errors than it may, until healed"


@fault("unrepairable-memory", flag, "unrepairable_memory")
def _unrepairable_memory(gpu: SimulatedGpu, _: None) -> str:
    gpu.state.unrepairable_memory = True
    return "it has memory that cannot be repaired, until healed"


# NVLinks and PCIe


@fault("nvlink-down", unread)
def _nvlink_down(gpu: SimulatedGpu, value: object) -> str:
    link = _link(gpu, value)
    gpu.state.links_down = tuple(sorted({*gpu.state.links_down, link}))
    return f"its NVLink {link} is down, until reset"


@fault("nvlink-up", unread)
def _nvlink_up(gpu: SimulatedGpu, value: object) -> str:
    link = _link(gpu, value)
    gpu.state.links_down = tuple(each for each in gpu.state.links_down if each != link)
    return f"its NVLink {link} is up"


def _link(gpu: SimulatedGpu, value: object) -> int:
    """Read the number of a connected NVLink."""
    links = gpu.remotes
    require(gpu, links, "has no NVLinks")
    link = int(whole(0, len(links) - 1)(value))
    require(gpu, links[link], f"has nothing at the other end of its NVLink {link}")
    return link


@fault("nvlink-errors", _COUNT, FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS)
def _nvlink_errors(gpu: SimulatedGpu, errors: int) -> str:
    link = _grow_on_link(gpu, FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, errors)
    return f"{errors} more recoveries of its NVLink {link} failed, until reset"


@fault("nvlink-crc-errors", _COUNT, FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL)
def _nvlink_crc_errors(gpu: SimulatedGpu, errors: int) -> str:
    link = _grow_on_link(gpu, FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, errors)
    return f"{errors} more CRC errors on its NVLink {link}, until reset"


def _grow_on_link(gpu: SimulatedGpu, number: int, by: int) -> int:
    """Add to a field of the GPU's last connected NVLink, and return the number of the link."""
    links = [at for at, remote in enumerate(gpu.remotes) if remote is not None]
    require(gpu, links, "has no NVLinks")
    link = links[-1]
    counts = gpu.state.link_fields.get(number, {})
    value = by + counts.get(link, gpu.built.fields[number])
    gpu.state.link_fields = {**gpu.state.link_fields, number: {**counts, link: value}}
    return link


@fault("fabric", one_of((_COMPLETED, *FABRICS)))
def _fabric(gpu: SimulatedGpu, state: str) -> str:
    built = gpu.built.fabric
    require(gpu, built and built.state, "is part of no NVLink fabric")
    gpu.state.fabric = None if state == _COMPLETED else state
    return f"its NVLink fabric is {state}" + ("" if state == _COMPLETED else ", until reset")


@fault("topology", one_of(TOPOLOGIES))
def _topology(gpu: SimulatedGpu, place: str) -> str:
    gpu.state.topology = place if place in (UNREADABLE, UNKNOWN) else None
    return TOPOLOGIES[place]


@fault("pcie-width", unread, "pcie_width")
def _pcie_width(gpu: SimulatedGpu, value: object) -> str:
    widest = gpu.built.pcie_width or 0
    lanes = whole(1, widest, " lanes")(value)
    gpu.state.pcie_width = lanes
    return f"its PCIe link has {lanes} of {widest} lanes, until healed"


@fault("pcie-replays", _COUNT, "pcie_width")
def _pcie_replays(gpu: SimulatedGpu, replays: int) -> str:
    gpu.state.pcie_replays += replays
    return f"{replays} more replays on its PCIe link, until reset"


@fault("pcie-fatal-errors", _COUNT, FI_PCIE_COUNT_FATAL_ERROR)
def _pcie_fatal_errors(gpu: SimulatedGpu, errors: int) -> str:
    number = FI_PCIE_COUNT_FATAL_ERROR
    gpu.state.fields = {**gpu.state.fields, number: errors + gpu.state.fields.get(number, gpu.built.fields[number])}
    return f"{errors} more fatal errors on its PCIe link, until reset"


# Calls


@fault("slow", read_seconds)
def _slow(gpu: SimulatedGpu, seconds: float) -> str:
    gpu.state.slow = seconds
    return f"every driver call takes {seconds:g} s, until healed"


@fault("error", whole(Return.SUCCESS, Return.UNKNOWN))
def _error(gpu: SimulatedGpu, code: int) -> str:
    gpu.state.error = code or None
    return f"every driver call fails with {code}, until healed" if code else "driver calls do not fail"
