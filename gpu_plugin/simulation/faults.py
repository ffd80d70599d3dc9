"""The faults of `gpu-plugin fault` for a simulated node. A new fault is a function with the decorator `fault`."""

import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

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
from gpu_plugin.health.xid_table import XID_TABLE
from gpu_plugin.simulation import device_nodes
from gpu_plugin.simulation.condition import FABRICS, UNKNOWN, UNREADABLE, Condition
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.profile import GpuProfile

HIGHEST_XID = 999  # Xids are numbered consecutively; the numbers in NVIDIA's catalog are below 200

# Higher values are typing errors.
_HOTTEST = 200  # °C
_MANY = 1_000_000  # errors
_MAX_ENERGY = 10**15  # mJ: a kilowatt for thirty years
_LONGEST_HANG = 86400.0  # seconds
_MANY_TIMES = 1000  # refusals
_MASK = 0xFFFFFFFF

# Values of `mig` other than profiles: no MIG mode, and MIG mode without a MIG device (as with an empty text)
_NONE = "none"
_EMPTY = "empty"

PERSISTENCE_MODES = ("on", "off")
"""Values of `persistence-mode`; the first is the default of the hardware."""

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
_RECOVERIES = {"reset": int(RecoveryAction.GPU_RESET), "reboot": int(RecoveryAction.NODE_REBOOT)}

INSTANCE = "instance"
"""The key for the instance of an Xid, such as 1 or 1/0. Without it, the Xid is of the whole GPU."""

TIMES = "times"
"""The key for the number of refusals to open the driver. Without it, they last while the daemon runs."""

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

Reader = Callable[[str, object], Any]
"""Converts the requested value of a fault, given the fault's name. Raises ConfigError if the value is invalid."""


class Target(msgspec.Struct, frozen=True):
    """A GPU of a node, by index, for which this fault is requested. `instance` is the value of `INSTANCE` in the request."""

    node: SimulatedNode
    gpu: int
    fault: str
    instance: object = None

    @property
    def built(self) -> GpuProfile:
        """The GPU's profile."""
        return self.node.profile.gpus[self.gpu]

    def require(self, has: object, lacks: str) -> None:
        """Raise ConfigError unless the GPU `has` a property that the fault needs; `lacks` says what its model does not do."""
        if not has:
            raise ConfigError(f"{self.fault}: {self.built.name}: the simulated one {lacks}")

    def changing(self) -> AbstractContextManager[Condition]:
        """Yield the GPU's state for changes."""
        return self.node.changing(self.gpu)

    def change(self, **changes: object) -> None:
        """Change these parts of the GPU's state."""
        self.node.change(self.gpu, **changes)

    def set_field(self, number: int, value: int) -> None:
        """Set a field by its NVML_FI_* id."""
        with self.changing() as now:
            now.fields = {**now.fields, number: value}


Effect = Callable[[Target, Any], str]
"""Applies a fault with its value to a GPU. Returns what was done, as the end of "GPU 3 (GPU-...): ".

Raises ConfigError if this GPU cannot have the fault; then nothing was changed.
"""


class Fault(msgspec.Struct, frozen=True):
    """A fault of a GPU. `needs` are required properties of the GPU's profile: keys of `_LACKS`, or NVML_FI_* ids of fields."""

    read: Reader
    effect: Effect
    needs: tuple[str | int, ...]

    def apply(self, target: Target, value: object) -> str:
        """Apply the fault and return the text of its `Effect`. Raises ConfigError, also if the GPU lacks a needed property."""
        read = self.read(target.fault, value)
        for need in self.needs:
            if isinstance(need, int):
                target.require(need in target.built.fields, f"does not have the field for it, {need}")
            else:
                has = getattr(target.built, need)
                target.require(has is not None and has is not False, _LACKS[need])
        return self.effect(target, read)


FAULTS: dict[str, Fault] = {}
"""Faults of a GPU by key, which is also the flag of `gpu-plugin fault`."""


def fault(key: str, read: Reader, *needs: str | int) -> Callable[[Effect], Effect]:
    """Declare the effect of a fault."""

    def declared(effect: Effect) -> Effect:
        FAULTS[key] = Fault(read, effect, needs)
        return effect

    return declared


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


def _unread(_: str, value: object) -> object:
    """Return the value, which the effect reads because its range is the GPU's."""
    return value


def _seconds(name: str, value: object) -> float:
    """Read a number of seconds up to a day."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name}: {value!r} is not a number of seconds")
    if not 0 < value <= _LONGEST_HANG:  # false for NaN too
        raise ConfigError(f"{name}: {value}: from above 0 to {_LONGEST_HANG:g} seconds")
    return float(value)


def _profiles(name: str, value: object) -> list[str] | None:
    """Read a list of MIG profiles; None outside MIG mode."""
    if not isinstance(value, str):
        raise ConfigError(
            f"{name}: {value!r} is not a list of MIG profiles such as 3g.20gb,3g.20gb, nor {_EMPTY} nor {_NONE}"
        )
    if value.strip() == _NONE:
        return None
    return [part.strip() for part in value.split(",")] if value.strip() not in ("", _EMPTY) else []


def _instances(value: object) -> tuple[int, int]:
    """Read a GPU instance and a compute instance such as 1/0. A text such as 1 means the whole GPU instance."""
    if isinstance(value, str):
        numbers = value.split("/")
        if len(numbers) <= 2 and all(part.isascii() and part.isdecimal() and len(part) <= 2 for part in numbers):
            return int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else ALL_INSTANCES
    raise ConfigError(f"instance: {value!r}: a GPU instance such as 1, or a compute instance of it such as 1/0")


_CELSIUS = whole(-40, _HOTTEST, " °C")
_COUNT = whole(1, _MANY)

# Events and the driver's requests


@fault("xid", whole(1, HIGHEST_XID))
def _xid(target: Target, number: int) -> str:
    instances = (ALL_INSTANCES, ALL_INSTANCES) if target.instance is None else _instances(target.instance)
    # An Xid of an instance only ends the work in the instance, so the driver requests no action for the whole GPU.
    action = _recovery_after(number) if target.instance is None else 0
    receivers = target.node.raise_xid(
        target.gpu, number, action, gpu_instance=instances[0], compute_instance=instances[1]
    )
    where = "" if target.instance is None else f" on instance {target.instance}"
    return f"Xid {number} raised{where}" + ("" if receivers else ", and nothing listens for its events")


def _recovery_after(xid: int) -> int:
    """Return the action that a driver requests after this Xid: for a fatal Xid its recovery, else 0.

    For Xids whose severity the driver decides (109, 144 to 146), the simulated driver requests no action. `--recovery-action`
    changes that.
    """
    row = XID_TABLE.get(xid)
    return _RECOVERIES.get(row.recovery, 0) if row is not None and row.verdict == "fatal" else 0


@fault("event", whole(1, _MASK))
def _event(target: Target, kind: int) -> str:
    if kind & EventType.XID_CRITICAL:
        raise ConfigError(f"event: {kind:#x}: {int(EventType.XID_CRITICAL):#x} is an Xid: ask for xid")
    unknown = kind & ~(target.built.event_types or 0)
    target.require(not unknown, f"sends no events of type {unknown:#x}")
    receivers = target.node.post(target.gpu, kind)
    return f"event of type {kind:#x} sent" + ("" if receivers else ", and nothing listens for it")


@fault("recovery-action", one_of(RECOVERY_ACTIONS), FI_GET_GPU_RECOVERY_ACTION)
def _recovery_action(target: Target, action: str) -> str:
    target.set_field(FI_GET_GPU_RECOVERY_ACTION, RECOVERY_ACTIONS[action])
    target.node.post(target.gpu, EventType.GPU_RECOVERY_ACTION)
    if not RECOVERY_ACTIONS[action]:
        return "its driver requests no recovery after any Xid, until reset"
    return f"its driver asks for {action}, until reset"


# Temperature, clocks and energy


@fault("temperature", _CELSIUS)
def _temperature(target: Target, celsius: int) -> str:
    target.change(temperature=celsius)
    return f"now at {celsius} °C, until healed"


@fault("memory-temperature", _CELSIUS, FI_MEMORY_TEMP)
def _memory_temperature(target: Target, celsius: int) -> str:
    target.set_field(FI_MEMORY_TEMP, celsius)
    return f"its memory is now at {celsius} °C, until healed"


@fault("margin", whole(-_HOTTEST, _HOTTEST, " °C"), "margin")
def _margin(target: Target, celsius: int) -> str:
    target.change(margin=celsius)
    return f"now {celsius} °C from its temperature limit, until healed"


@fault("clocks-event-reasons", whole(0, _MASK), "clocks_event_reasons")
def _clocks_event_reasons(target: Target, reasons: int) -> str:
    target.change(clocks_event_reasons=reasons)
    return f"its clocks event reasons are {reasons:#x}, until healed"


@fault("energy-dip", whole(1, _MAX_ENERGY, " mJ"))
def _energy_dip(target: Target, energy: int) -> str:
    target.node.dip(target.gpu, energy)
    return f"its energy counter is {energy} mJ less at the next reading than at the last, and counts on from there"


@fault("persistence-mode", one_of(PERSISTENCE_MODES))
def _persistence_mode(target: Target, mode: str) -> str:
    on = mode == PERSISTENCE_MODES[0]
    target.change(persistence=on)
    if on:
        return "persistence mode is on: its counters outlive the processes that have the driver open"
    return "persistence mode is off: its counters begin at 0 when nobody has the driver open any more, until healed"


# Memory


@fault("ecc-uncorrected", _COUNT, "ecc")
def _ecc_uncorrected(target: Target, errors: int) -> str:
    with target.changing() as now:
        now.ecc_uncorrected += errors
    target.node.post(target.gpu, EventType.DOUBLE_BIT_ECC)
    return f"{counted(errors, 'more uncorrected memory error')}, until reset"


@fault("ecc-cleared", flag, "ecc")
def _ecc_cleared(target: Target, _: None) -> str:
    target.change(ecc_uncorrected=0)
    return "its count of memory errors is 0 again, without a reset"


@fault("remap-pending", flag, "row_remapping")
def _remap_pending(target: Target, _: None) -> str:
    with target.changing() as now:
        now.rows_uncorrectable += 1
        now.remap_pending = True
    return "a memory row waits to be remapped, until reset"


@fault("remap-failure", flag, "row_remapping")
def _remap_failure(target: Target, _: None) -> str:
    target.change(remap_failure=True)
    return "a memory row could not be remapped, until healed"


@fault("retired-pages", whole(0, _MANY), "page_retirement", FI_RETIRED_DBE)
def _retired_pages(target: Target, pages: int) -> str:
    target.set_field(FI_RETIRED_DBE, pages)
    return f"{pages} memory pages are retired, until healed"


@fault("retirement-pending", flag, "page_retirement")
def _retirement_pending(target: Target, _: None) -> str:
    target.change(retirement_pending=True)
    return "a memory page waits to be retired, until reset"


@fault("sram-threshold", flag, "sram_status")
def _sram_threshold(target: Target, _: None) -> str:
    target.change(sram_threshold=True)
    return "its SRAM has had more errors than it may, until healed"


@fault("unrepairable-memory", flag, "unrepairable_memory")
def _unrepairable_memory(target: Target, _: None) -> str:
    target.change(unrepairable_memory=True)
    return "it has memory that cannot be repaired, until healed"


# NVLinks and PCIe


@fault("nvlink-down", _unread)
def _nvlink_down(target: Target, value: object) -> str:
    link = _link(target, value)
    with target.changing() as now:
        now.links_down = tuple(sorted({*now.links_down, link}))
    return f"its NVLink {link} is down, until reset"


@fault("nvlink-up", _unread)
def _nvlink_up(target: Target, value: object) -> str:
    link = _link(target, value)
    with target.changing() as now:
        now.links_down = tuple(each for each in now.links_down if each != link)
    return f"its NVLink {link} is up"


def _link(target: Target, value: object) -> int:
    """Read the number of a connected NVLink."""
    links = target.node.profile.remotes[target.gpu]
    target.require(links, "has no NVLinks")
    link = int(whole(0, len(links) - 1)(target.fault, value))
    target.require(links[link], f"has nothing at the other end of its NVLink {link}")
    return link


@fault("nvlink-errors", _COUNT, FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS)
def _nvlink_errors(target: Target, errors: int) -> str:
    link = _grow_on_link(target, FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, errors)
    return f"{errors} more recoveries of its NVLink {link} failed, until reset"


@fault("nvlink-crc-errors", _COUNT, FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL)
def _nvlink_crc_errors(target: Target, errors: int) -> str:
    link = _grow_on_link(target, FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, errors)
    return f"{errors} more CRC errors on its NVLink {link}, until reset"


def _grow_on_link(target: Target, number: int, by: int) -> int:
    """Add to a field of the GPU's last connected NVLink, and return the number of the link."""
    links = [at for at, remote in enumerate(target.node.profile.remotes[target.gpu]) if remote is not None]
    target.require(links, "has no NVLinks")
    link = links[-1]
    with target.changing() as now:
        counts = now.link_fields.get(number, {})
        value = by + counts.get(link, target.built.fields[number])
        now.link_fields = {**now.link_fields, number: {**counts, link: value}}
    return link


@fault("fabric", one_of((_COMPLETED, *FABRICS)))
def _fabric(target: Target, state: str) -> str:
    built = target.built.fabric
    target.require(built and built.state, "is part of no NVLink fabric")
    target.change(fabric=None if state == _COMPLETED else state)
    return f"its NVLink fabric is {state}" + ("" if state == _COMPLETED else ", until reset")


@fault("topology", one_of(TOPOLOGIES))
def _topology(target: Target, place: str) -> str:
    target.change(topology=place if place in (UNREADABLE, UNKNOWN) else None)
    return TOPOLOGIES[place]


@fault("pcie-width", _unread, "pcie_width")
def _pcie_width(target: Target, value: object) -> str:
    widest = target.built.pcie_width or 0
    lanes = whole(1, widest, " lanes")(target.fault, value)
    target.change(pcie_width=lanes)
    return f"its PCIe link has {lanes} of {widest} lanes, until healed"


@fault("pcie-replays", _COUNT, "pcie_width")
def _pcie_replays(target: Target, replays: int) -> str:
    with target.changing() as now:
        now.pcie_replays += replays
    return f"{replays} more replays on its PCIe link, until reset"


@fault("pcie-fatal-errors", _COUNT, FI_PCIE_COUNT_FATAL_ERROR)
def _pcie_fatal_errors(target: Target, errors: int) -> str:
    number = FI_PCIE_COUNT_FATAL_ERROR
    with target.changing() as now:
        now.fields = {**now.fields, number: errors + now.fields.get(number, target.built.fields[number])}
    return f"{errors} more fatal errors on its PCIe link, until reset"


# The whole GPU


@fault("lost", flag)
def _lost(target: Target, _: None) -> str:
    target.node.lose(target.gpu)
    return "fell off the bus, until healed"


@fault("vanish", flag)
def _vanish(target: Target, _: None) -> str:
    target.node.vanish(target.gpu)
    return "gone from its driver, until it returns or is healed"


@fault("return", flag)
def _return(target: Target, _: None) -> str:
    if not target.node.condition(target.gpu).vanished:
        raise ConfigError(f"return: GPU {target.gpu} has not vanished")
    target.node.bring_back(target.gpu)
    return "back, for whoever opens the driver from now on"


@fault("hang", _seconds)
def _hang(target: Target, seconds: float) -> str:
    target.node.hang(target.gpu, seconds)
    return f"every driver call hangs for {seconds:g} s"


@fault("slow", _seconds)
def _slow(target: Target, seconds: float) -> str:
    target.change(slow=seconds)
    return f"every driver call takes {seconds:g} s, until healed"


@fault("error", whole(Return.SUCCESS, Return.UNKNOWN))
def _error(target: Target, code: int) -> str:
    target.change(error=code or None)
    return f"every driver call fails with {code}, until healed" if code else "driver calls do not fail"


@fault("mig", _profiles)
def _mig(target: Target, profiles: list[str] | None) -> str:
    try:
        target.node.partition(target.gpu, profiles)
    except ConfigError as error:
        raise ConfigError(f"mig: {error}") from None
    device_nodes.remake(target.node)
    target.node.post(target.gpu, EventType.MIG_CONFIG_CHANGE, 0)
    return (
        "out of MIG mode" if profiles is None else f"in MIG mode, partitioned into {', '.join(profiles) or 'nothing'}"
    )


@fault("reset", flag)
def _reset(target: Target, _: None) -> str:
    target.node.reset(target.gpu)
    off = target.node.condition(target.gpu)
    return "reset" + (", and still off the bus" if off.lost or off.vanished else "")


@fault("reset-keeping-energy", flag)
def _reset_keeping_energy(target: Target, _: None) -> str:
    target.node.reset(target.gpu, energy=False)
    return "reset, and its energy counts on, as where the driver stays loaded"


@fault("heal", flag)
def _heal(target: Target, _: None) -> str:
    target.node.heal(target.gpu)
    return "repaired and reset"


# The whole node


def _reboot(node: SimulatedNode, request: Mapping[str, object]) -> str:
    flag("reboot", request["reboot"])
    node.reboot()
    return f"rebooted, with boot id {node.boot_id}"


def _init_error(node: SimulatedNode, request: Mapping[str, object]) -> str:
    code = whole(1, Return.UNKNOWN)("init-error", request["init-error"])
    times = whole(1, _MANY_TIMES)(TIMES, request[TIMES]) if TIMES in request else math.inf
    node.refuse("open", code, times=times)
    often = "until the daemon ends" if times == math.inf else "once" if times == 1 else f"{times} times"
    return f"its driver refuses to be opened with {code}, {often}"


NODE_FAULTS: Mapping[str, Callable[[SimulatedNode, Mapping[str, object]], str]] = {
    "reboot": _reboot,
    "init-error": _init_error,
}
"""Faults of the whole node by key. They get the request and need no GPU."""


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
    for option, goes_with in ((INSTANCE, "xid"), (TIMES, "init-error")):
        if option in request and name != goes_with:
            raise ConfigError(f"{option}: goes only with {goes_with}, not with {name}")
    if name in NODE_FAULTS:
        if "gpu" in request:
            _find_gpu(node, request["gpu"])
        return f"The node: {NODE_FAULTS[name](node, request)}."
    gpu = _find_gpu(node, request.get("gpu"))
    done = FAULTS[name].apply(Target(node, gpu, name, request.get(INSTANCE)), request[name])
    there = node.profile.gpus[gpu]
    return f"{called(Gpu(there.uuid, gpu, pci_bus_id=there.pci_bus_id))}: {done}."


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
