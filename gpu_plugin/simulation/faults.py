"""The faults of `gpu-plugin fault` for a simulated node. A new fault is a function with the decorator `fault`."""

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.words import counted
from gpu_plugin.devices.gpu_names import called
from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.nvml_h import (
    ALL_INSTANCES,
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
from gpu_plugin.health.latch import Proof, Verdict
from gpu_plugin.health.xid_table import XID_TABLE
from gpu_plugin.simulation import device_nodes
from gpu_plugin.simulation.condition import FABRICS, UNKNOWN, UNREADABLE
from gpu_plugin.simulation.fault_values import (
    Reader,
    flag,
    one_of,
    read_instance,
    read_profiles,
    read_seconds,
    unread,
    whole,
)
from gpu_plugin.simulation.hardware import SimulatedNode

HIGHEST_XID = 999  # Xids are numbered consecutively; the numbers in NVIDIA's catalog are below 200

# Higher values are typing errors.
_HOTTEST = 200  # °C
_MANY = 1_000_000  # errors
_MAX_ENERGY = 10**15  # mJ: a kilowatt for thirty years
_MANY_TIMES = 1000  # refusals
_MASK = 0xFFFFFFFF

PERSISTENCE_MODES = ("on", "off")  # Values of `persistence-mode`; the first is the default of the hardware

_COMPLETED = "completed"  # a value of `fabric` in addition to `FABRICS`: the profile's state

TOPOLOGIES = {
    "readable": "NVML and sysfs report its place on PCIe",
    UNREADABLE: "NVML does not report its place on PCIe, until healed",
    UNKNOWN: "neither NVML nor sysfs reports its place on PCIe, until healed",
}
"""Values of `topology` with their effects; the first is the profile's state."""

RECOVERY_ACTIONS: Mapping[str, int] = {action.name.lower().replace("_", "-"): int(action) for action in RecoveryAction}
"""nvmlDeviceGpuRecoveryAction_t by the values of `recovery-action`."""

# The action that a driver requests after a fatal Xid, by the Xid's way of recovery
_RECOVERIES = {Proof.RESET: int(RecoveryAction.GPU_RESET), Proof.REBOOT: int(RecoveryAction.NODE_REBOOT)}

INSTANCE = "instance"  # The key for the instance of an Xid, such as 1 or 1/0. Without it, the Xid is of the whole GPU.

TIMES = "times"  # The key for the number of refusals to open the driver. Without it, they last while the daemon runs.

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

Effect = Callable[..., str]
"""Applies a fault to a node, given a GPU by index, the value, and options by key.

Returns what was done, as the end of "GPU 3 (GPU-...): ". Raises ConfigError without the fault's name if this GPU cannot have the
fault; then nothing was changed.
"""


class Fault(msgspec.Struct, frozen=True):
    """A fault of a GPU. `needs` are required properties of the GPU's profile: keys of `_LACKS`, or NVML_FI_* ids of fields."""

    read: Reader
    effect: Effect
    needs: tuple[str | int, ...]


FAULTS: dict[str, Fault] = {}  # Faults of a GPU by key, which is also the flag of `gpu-plugin fault`


def fault(key: str, read: Reader, *needs: str | int) -> Callable[[Effect], Effect]:
    """Declare the effect of a fault."""

    def declared(effect: Effect) -> Effect:
        FAULTS[key] = Fault(read, effect, needs)
        return effect

    return declared


def require(node: SimulatedNode, gpu: int, has: object, lacks: str) -> None:
    """Raise ConfigError unless the GPU `has` a property that the fault needs; `lacks` says what its model does not do."""
    if not has:
        raise ConfigError(f"{node.profile.gpus[gpu].name}: the simulated one {lacks}")


def _set_field(node: SimulatedNode, gpu: int, number: int, value: int) -> None:
    with node.changing(gpu) as now:
        now.fields = {**now.fields, number: value}


_CELSIUS = whole(-40, _HOTTEST, " °C")
_COUNT = whole(1, _MANY)

# Events and the driver's requests


@fault("xid", whole(1, HIGHEST_XID))
def _xid(node: SimulatedNode, gpu: int, number: int, instance: str = "") -> str:
    of_gpu, _, of_compute = instance.partition("/")
    receivers = node.raise_xid(
        gpu,
        number,
        # An Xid of an instance only ends the work in the instance, so the driver requests no action for the whole GPU.
        0 if instance else _recovery_after(number),
        gpu_instance=int(of_gpu or ALL_INSTANCES),
        compute_instance=int(of_compute or ALL_INSTANCES),
    )
    where = f" on instance {instance}" if instance else ""
    return f"Xid {number} raised{where}" + ("" if receivers else ", and nothing listens for its events")


def _recovery_after(xid: int) -> int:
    """Return the action that a driver requests after this Xid: for a fatal Xid its recovery, else 0.

    For Xids whose severity the driver decides (109, 144 to 146), the simulated driver requests no action. `--recovery-action`
    changes that.
    """
    row = XID_TABLE.get(xid)
    return _RECOVERIES.get(row.recovery, 0) if row is not None and row.verdict is Verdict.FATAL else 0


@fault("event", whole(1, _MASK))
def _event(node: SimulatedNode, gpu: int, kind: int) -> str:
    if kind & EventType.XID_CRITICAL:
        raise ConfigError(f"{kind:#x}: {int(EventType.XID_CRITICAL):#x} is an Xid: ask for xid")
    unknown = kind & ~(node.profile.gpus[gpu].event_types or 0)
    require(node, gpu, not unknown, f"sends no events of type {unknown:#x}")
    receivers = node.post(gpu, kind)
    return f"event of type {kind:#x} sent" + ("" if receivers else ", and nothing listens for it")


@fault("recovery-action", one_of(RECOVERY_ACTIONS), FI_GET_GPU_RECOVERY_ACTION)
def _recovery_action(node: SimulatedNode, gpu: int, action: str) -> str:
    _set_field(node, gpu, FI_GET_GPU_RECOVERY_ACTION, RECOVERY_ACTIONS[action])
    node.post(gpu, EventType.GPU_RECOVERY_ACTION)
    if not RECOVERY_ACTIONS[action]:
        return "its driver requests no recovery after any Xid, until reset"
    return f"its driver asks for {action}, until reset"


# Temperature, clocks and energy


@fault("temperature", _CELSIUS)
def _temperature(node: SimulatedNode, gpu: int, celsius: int) -> str:
    node.change(gpu, temperature=celsius)
    return f"now at {celsius} °C, until healed"


@fault("memory-temperature", _CELSIUS, FI_MEMORY_TEMP)
def _memory_temperature(node: SimulatedNode, gpu: int, celsius: int) -> str:
    _set_field(node, gpu, FI_MEMORY_TEMP, celsius)
    return f"its memory is now at {celsius} °C, until healed"


@fault("margin", whole(-_HOTTEST, _HOTTEST, " °C"), "margin")
def _margin(node: SimulatedNode, gpu: int, celsius: int) -> str:
    node.change(gpu, margin=celsius)
    return f"now {celsius} °C from its temperature limit, until healed"


@fault("clocks-event-reasons", whole(0, _MASK), "clocks_event_reasons")
def _clocks_event_reasons(node: SimulatedNode, gpu: int, reasons: int) -> str:
    node.change(gpu, clocks_event_reasons=reasons)
    return f"its clocks event reasons are {reasons:#x}, until healed"


@fault("energy-dip", whole(1, _MAX_ENERGY, " mJ"))
def _energy_dip(node: SimulatedNode, gpu: int, energy: int) -> str:
    node.dip(gpu, energy)
    return f"its energy counter is {energy} mJ less at the next reading than at the last, and counts on from there"


@fault("persistence-mode", one_of(PERSISTENCE_MODES))
def _persistence_mode(node: SimulatedNode, gpu: int, mode: str) -> str:
    on = mode == PERSISTENCE_MODES[0]
    node.change(gpu, persistence=on)
    if on:
        return "persistence mode is on: its counters outlive the processes that have the driver open"
    return "persistence mode is off: its counters begin at 0 when nobody has the driver open any more, until healed"


# Memory


@fault("ecc-uncorrected", _COUNT, "ecc")
def _ecc_uncorrected(node: SimulatedNode, gpu: int, errors: int) -> str:
    with node.changing(gpu) as now:
        now.ecc_uncorrected += errors
    node.post(gpu, EventType.DOUBLE_BIT_ECC)
    return f"{counted(errors, 'more uncorrected memory error')}, until reset"


@fault("ecc-cleared", flag, "ecc")
def _ecc_cleared(node: SimulatedNode, gpu: int, _: None) -> str:
    node.change(gpu, ecc_uncorrected=0)
    return "its count of memory errors is 0 again, without a reset"


@fault("remap-pending", flag, "row_remapping")
def _remap_pending(node: SimulatedNode, gpu: int, _: None) -> str:
    with node.changing(gpu) as now:
        now.rows_uncorrectable += 1
        now.remap_pending = True
    return "a memory row waits to be remapped, until reset"


@fault("remap-failure", flag, "row_remapping")
def _remap_failure(node: SimulatedNode, gpu: int, _: None) -> str:
    node.change(gpu, remap_failure=True)
    return "a memory row could not be remapped, until healed"


@fault("retired-pages", whole(0, _MANY), "page_retirement", FI_RETIRED_DBE)
def _retired_pages(node: SimulatedNode, gpu: int, pages: int) -> str:
    _set_field(node, gpu, FI_RETIRED_DBE, pages)
    return f"{pages} memory pages are retired, until healed"


@fault("retirement-pending", flag, "page_retirement")
def _retirement_pending(node: SimulatedNode, gpu: int, _: None) -> str:
    node.change(gpu, retirement_pending=True)
    return "a memory page waits to be retired, until reset"


@fault("sram-threshold", flag, "sram_status")
def _sram_threshold(node: SimulatedNode, gpu: int, _: None) -> str:
    node.change(gpu, sram_threshold=True)
    return "its SRAM has had more errors than it may, until healed"


@fault("unrepairable-memory", flag, "unrepairable_memory")
def _unrepairable_memory(node: SimulatedNode, gpu: int, _: None) -> str:
    node.change(gpu, unrepairable_memory=True)
    return "it has memory that cannot be repaired, until healed"


# NVLinks and PCIe


@fault("nvlink-down", unread)
def _nvlink_down(node: SimulatedNode, gpu: int, value: object) -> str:
    link = _link(node, gpu, value)
    with node.changing(gpu) as now:
        now.links_down = tuple(sorted({*now.links_down, link}))
    return f"its NVLink {link} is down, until reset"


@fault("nvlink-up", unread)
def _nvlink_up(node: SimulatedNode, gpu: int, value: object) -> str:
    link = _link(node, gpu, value)
    with node.changing(gpu) as now:
        now.links_down = tuple(each for each in now.links_down if each != link)
    return f"its NVLink {link} is up"


def _link(node: SimulatedNode, gpu: int, value: object) -> int:
    """Read the number of a connected NVLink."""
    links = node.profile.remotes[gpu]
    require(node, gpu, links, "has no NVLinks")
    link = int(whole(0, len(links) - 1)(value))
    require(node, gpu, links[link], f"has nothing at the other end of its NVLink {link}")
    return link


@fault("nvlink-errors", _COUNT, FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS)
def _nvlink_errors(node: SimulatedNode, gpu: int, errors: int) -> str:
    link = _grow_on_link(node, gpu, FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, errors)
    return f"{errors} more recoveries of its NVLink {link} failed, until reset"


@fault("nvlink-crc-errors", _COUNT, FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL)
def _nvlink_crc_errors(node: SimulatedNode, gpu: int, errors: int) -> str:
    link = _grow_on_link(node, gpu, FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, errors)
    return f"{errors} more CRC errors on its NVLink {link}, until reset"


def _grow_on_link(node: SimulatedNode, gpu: int, number: int, by: int) -> int:
    """Add to a field of the GPU's last connected NVLink, and return the number of the link."""
    links = [at for at, remote in enumerate(node.profile.remotes[gpu]) if remote is not None]
    require(node, gpu, links, "has no NVLinks")
    link = links[-1]
    with node.changing(gpu) as now:
        counts = now.link_fields.get(number, {})
        value = by + counts.get(link, node.profile.gpus[gpu].fields[number])
        now.link_fields = {**now.link_fields, number: {**counts, link: value}}
    return link


@fault("fabric", one_of((_COMPLETED, *FABRICS)))
def _fabric(node: SimulatedNode, gpu: int, state: str) -> str:
    built = node.profile.gpus[gpu].fabric
    require(node, gpu, built and built.state, "is part of no NVLink fabric")
    node.change(gpu, fabric=None if state == _COMPLETED else state)
    return f"its NVLink fabric is {state}" + ("" if state == _COMPLETED else ", until reset")


@fault("topology", one_of(TOPOLOGIES))
def _topology(node: SimulatedNode, gpu: int, place: str) -> str:
    node.change(gpu, topology=place if place in (UNREADABLE, UNKNOWN) else None)
    return TOPOLOGIES[place]


@fault("pcie-width", unread, "pcie_width")
def _pcie_width(node: SimulatedNode, gpu: int, value: object) -> str:
    widest = node.profile.gpus[gpu].pcie_width or 0
    lanes = whole(1, widest, " lanes")(value)
    node.change(gpu, pcie_width=lanes)
    return f"its PCIe link has {lanes} of {widest} lanes, until healed"


@fault("pcie-replays", _COUNT, "pcie_width")
def _pcie_replays(node: SimulatedNode, gpu: int, replays: int) -> str:
    with node.changing(gpu) as now:
        now.pcie_replays += replays
    return f"{replays} more replays on its PCIe link, until reset"


@fault("pcie-fatal-errors", _COUNT, FI_PCIE_COUNT_FATAL_ERROR)
def _pcie_fatal_errors(node: SimulatedNode, gpu: int, errors: int) -> str:
    number = FI_PCIE_COUNT_FATAL_ERROR
    with node.changing(gpu) as now:
        now.fields = {**now.fields, number: errors + now.fields.get(number, node.profile.gpus[gpu].fields[number])}
    return f"{errors} more fatal errors on its PCIe link, until reset"


# The whole GPU


@fault("lost", flag)
def _lost(node: SimulatedNode, gpu: int, _: None) -> str:
    node.lose(gpu)
    return "fell off the bus, until healed"


@fault("vanish", flag)
def _vanish(node: SimulatedNode, gpu: int, _: None) -> str:
    node.vanish(gpu)
    return "gone from its driver, until it returns or is healed"


@fault("return", flag)
def _return(node: SimulatedNode, gpu: int, _: None) -> str:
    if not node.condition(gpu).vanished:
        raise ConfigError(f"GPU {gpu} has not vanished")
    node.bring_back(gpu)
    return "back, for whoever opens the driver from now on"


@fault("hang", read_seconds)
def _hang(node: SimulatedNode, gpu: int, seconds: float) -> str:
    node.hang(gpu, seconds)
    return f"every driver call hangs for {seconds:g} s"


@fault("slow", read_seconds)
def _slow(node: SimulatedNode, gpu: int, seconds: float) -> str:
    node.change(gpu, slow=seconds)
    return f"every driver call takes {seconds:g} s, until healed"


@fault("error", whole(Return.SUCCESS, Return.UNKNOWN))
def _error(node: SimulatedNode, gpu: int, code: int) -> str:
    node.change(gpu, error=code or None)
    return f"every driver call fails with {code}, until healed" if code else "driver calls do not fail"


@fault("mig", read_profiles)
def _mig(node: SimulatedNode, gpu: int, profiles: list[str] | None) -> str:
    node.partition(gpu, profiles)
    device_nodes.remake(node)
    node.post(gpu, EventType.MIG_CONFIG_CHANGE, 0)
    return (
        "out of MIG mode" if profiles is None else f"in MIG mode, partitioned into {', '.join(profiles) or 'nothing'}"
    )


@fault("reset", flag)
def _reset(node: SimulatedNode, gpu: int, _: None) -> str:
    node.reset(gpu)
    off = node.condition(gpu)
    return "reset" + (", and still off the bus" if off.lost or off.vanished else "")


@fault("reset-keeping-energy", flag)
def _reset_keeping_energy(node: SimulatedNode, gpu: int, _: None) -> str:
    node.reset(gpu, energy=False)
    return "reset, and its energy counts on, as where the driver stays loaded"


@fault("heal", flag)
def _heal(node: SimulatedNode, gpu: int, _: None) -> str:
    node.heal(gpu)
    return "repaired and reset"


# The whole node


def _reboot(node: SimulatedNode, value: object) -> str:
    flag(value)
    node.reboot()
    return f"rebooted, with boot id {node.boot_id}"


def _init_error(node: SimulatedNode, value: object, times: float = math.inf) -> str:
    code = whole(1, Return.UNKNOWN)(value)
    node.refuse("open", code, times=times)
    often = "until the daemon ends" if times == math.inf else "once" if times == 1 else f"{times} times"
    return f"its driver refuses to be opened with {code}, {often}"


NODE_FAULTS: Mapping[str, Effect] = {"reboot": _reboot, "init-error": _init_error}
"""Faults of the whole node by key. They get no GPU."""

_OPTIONS = {INSTANCE: ("xid", read_instance), TIMES: ("init-error", whole(1, _MANY_TIMES))}
"""For each option, its fault and the reader of its value."""


def apply(node: SimulatedNode, request: Mapping[str, object]) -> str:
    """Apply a fault such as `{"gpu": 3, "xid": 79}` and return a sentence about it. `gpu` is an index or a uuid.

    The request is checked first. Driver threads see the fault before the node's state is on disk. The state is on disk when
    this returns, so it may block for as long as the disk does.

    Raises:
        ConfigError: there is no such GPU, not exactly one fault, or an invalid value.
    """
    known = (*FAULTS, *NODE_FAULTS)
    if unknown := set(request) - {*known, INSTANCE, TIMES, "gpu"}:
        raise ConfigError(f"{', '.join(sorted(unknown))}: no such fault; there are {', '.join(known)}")
    asked = [name for name in known if name in request]
    if len(asked) != 1:
        raise ConfigError(f"one fault at a time, of {', '.join(known)}: {' and '.join(asked) or 'none'} given")
    (name,) = asked
    options = {}
    for option, (goes_with, read) in _OPTIONS.items():
        if option in request:
            if name != goes_with:
                raise ConfigError(f"{option}: goes only with {goes_with}, not with {name}")
            with _naming(option):
                options[option] = read(request[option])
    gpu = _find_gpu(node, request.get("gpu")) if name in FAULTS or "gpu" in request else None
    with _naming(name):
        if gpu is None or name in NODE_FAULTS:
            return f"The node: {NODE_FAULTS[name](node, request[name], **options)}."
        there = node.profile.gpus[gpu]
        return f"{called(Gpu(there.uuid, gpu, pci_bus_id=there.pci_bus_id))}: {_apply(node, gpu, name, request[name], options)}."


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Put a key before the text of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _apply(node: SimulatedNode, gpu: int, name: str, value: object, options: Mapping[str, object]) -> str:
    asked, built = FAULTS[name], node.profile.gpus[gpu]
    read = asked.read(value)
    for need in asked.needs:
        if isinstance(need, int):
            require(node, gpu, need in built.fields, f"does not have the field for it, {need}")
        else:
            has = getattr(built, need)
            require(node, gpu, has is not None and has is not False, _LACKS[need])
    return asked.effect(node, gpu, read, **options)


def _find_gpu(node: SimulatedNode, value: object) -> int:
    """Return the index of the GPU with this index or uuid."""
    gpus = node.profile.gpus
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 <= value < len(gpus):
            return value
        raise ConfigError(
            f"GPU {value}: this node has {f'GPUs 0 to {len(gpus) - 1}' if len(gpus) > 1 else 'only GPU 0'}"
        )
    for index, gpu in enumerate(gpus):
        if gpu.uuid == value:
            return index
    if isinstance(value, str):
        raise ConfigError(f"GPU {value}: no GPU of this node has this name; give an index from 0 to {len(gpus) - 1}")
    raise ConfigError("gpu: missing: which GPU, by index or uuid")


def verb(node: SimulatedNode) -> Callable[[Mapping[str, object]], Awaitable[Mapping[str, object]]]:
    """Return `apply` as a verb of the daemon's control socket: it gets a request and returns `{"done": sentence, "at": time}`.

    `at` is the time of the fault in seconds of this machine's monotonic clock, for measurements.
    """

    async def requested(request: Mapping[str, object]) -> Mapping[str, object]:
        from anyio import to_thread  # noqa: PLC0415 - reading a profile needs no event loop

        return await to_thread.run_sync(_timed, node, request)

    return requested


def _timed(node: SimulatedNode, request: Mapping[str, object]) -> Mapping[str, object]:
    at = time.monotonic()
    return {"done": apply(node, request), "at": at}
