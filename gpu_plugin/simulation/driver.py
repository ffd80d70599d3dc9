"""A driver for simulated hardware that behaves like NVML, including return codes, event masks and blocking calls."""

import collections
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from gpu_plugin.devices.nvml_h import (
    EVENT_TYPES_ALL,
    FI_NVLINK_GET_STATE,
    FI_PCIE_REPLAY_COUNTER,
    FI_POWER_CURRENT_LIMIT,
    FI_POWER_INSTANT,
    FI_REMAPPED_COR,
    FI_REMAPPED_FAILURE,
    FI_REMAPPED_PENDING,
    FI_REMAPPED_UNC,
    FI_RETIRED_PENDING,
    FI_TOTAL_ENERGY_CONSUMPTION,
    ComputeMode,
    FabricState,
    Return,
    Threshold,
)
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml.port import (
    NVML_FUNCTIONS,
    Driver,
    Event,
    EventSet,
    Field,
    Handle,
    MigAttributes,
    NvmlError,
    PcieLink,
    RemappedRows,
)
from gpu_plugin.simulation.condition import FABRICS, LINK_FIELDS, Condition
from gpu_plugin.simulation.event_sets import GpuIsLostError
from gpu_plugin.simulation.hardware import SimulatedMigDevice, SimulatedNode
from gpu_plugin.simulation.mig import COMPUTE_SLICES
from gpu_plugin.simulation.profile import GpuProfile

T = TypeVar("T")

# Handles look like NVML's pointers. They depend on the number that a GPU got when the driver was opened.
_FIRST_HANDLE = 0x7F0000001000
_HANDLE_STRIDE = 0x1000

# Handles of MIG devices, by their numbers
_FIRST_MIG_HANDLE = 0x7F8000000000
_MIG_STRIDE = 0x100

# The fields of a Condition that NVML returns by functions and by these field ids
_PRESENT = {
    FI_REMAPPED_PENDING: "remap_pending",
    FI_REMAPPED_FAILURE: "remap_failure",
    FI_REMAPPED_UNC: "rows_uncorrectable",
    FI_RETIRED_PENDING: "retirement_pending",
    FI_PCIE_REPLAY_COUNTER: "pcie_replays",
}

_OF_ROWS = (
    FI_REMAPPED_PENDING,
    FI_REMAPPED_FAILURE,
    FI_REMAPPED_COR,
    FI_REMAPPED_UNC,
)  # not supported with MIG devices

_THRESHOLDS = {
    Threshold.SHUTDOWN: "shutdown",
    Threshold.SLOWDOWN: "slowdown",
    Threshold.MEM_MAX: "memory_max",
    Threshold.GPU_MAX: "gpu_max",
}

# By nvmlDeviceArchitecture_t: V100, T4, A100, L40S, H100, B200 (developer.nvidia.com/cuda-gpus).
_COMPUTE_CAPABILITIES = {5: (7, 0), 6: (7, 5), 7: (8, 0), 8: (8, 9), 9: (9, 0), 10: (10, 0)}

# The PCIe generation of NVIDIA's data center GPUs by nvmlDeviceArchitecture_t, from their data sheets.
_PCIE_GENERATIONS = {5: 3, 6: 3, 7: 4, 8: 4, 9: 5, 10: 5}


class SimulatedDriver(Driver):
    """Implements the port's `Driver` for a `SimulatedNode`, as opened by one process. Safe from any thread.

    All refusals are NvmlError:

    - Before `open`, and after as many calls of `close` as of `open`: UNINITIALIZED.
    - GPUs are numbered when it is opened. A GPU that appears later is only found after the last close and a new open.
    - A lost GPU: GPU_IS_LOST from all calls about it, including calls for its handle. Handles stay valid after heal.
    - A GPU that has vanished since the open: as a lost GPU, but NOT_FOUND by its uuid or bus id, even after its return.
    - A hung GPU: all calls about it block in the calling thread until the hang ends; `close` does not end it. A slow GPU: each
      call blocks for some time.
    - A GPU with persistence mode off: it is initialised again by the first `open` of the node's driver after the last `close`,
      or after the end of the last process that had it open. Its counters and its energy then begin at 0.
    - The handle of a former MIG device: INVALID_ARGUMENT from all calls.
    - A value that the GPU's profile lacks: NOT_SUPPORTED.

    `latency` makes calls, by their names here, longer by this many seconds. `calls` counts calls by name, including refused
    calls.
    """

    def __init__(
        self,
        node: SimulatedNode,
        *,
        latency: Mapping[str, float] | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if unknown := set(latency or ()) - set(NVML_FUNCTIONS):
            raise ValueError(f"latency of {', '.join(sorted(unknown))}: no such driver call")
        self.calls: collections.Counter[str] = collections.Counter()
        self._node = node
        self._profile = node.profile
        self._latency = dict(latency or {})
        self._sleep = sleep
        self._lock = threading.Lock()
        self._opened = 0
        self._gpus: tuple[int, ...] = ()
        self._departures: dict[int, int] = {}

    def open(self) -> None:
        """Open the driver. Openings are counted, as with nvmlInit: each needs a `close`."""
        self._begin("open", opened=False)
        with self._lock:
            if not self._opened:
                self._node.opened()
                self._departures = self._node.on_the_bus()
                self._gpus = tuple(self._departures)
            self._opened += 1

    def close(self) -> None:
        """Close the driver. The last `close` frees all event sets; a `wait` under way ends with UNINITIALIZED."""
        self._begin("close")
        with self._lock:
            last = self._opened == 1
            self._opened = max(self._opened - 1, 0)
        if last:
            self._node.closed()
            self._node.events.free_all()

    def _begin(self, call: str, gpu: int | None = None, *, opened: bool = True) -> None:
        """Do the first step of all calls: count, delay, and refuse."""
        with self._lock:
            self.calls[call] += 1
            ready = self._opened or not opened
        if seconds := self._latency.get(call):
            self._sleep(seconds)
        if not ready:
            raise refused(call, Return.UNINITIALIZED)
        if self._node.refusals and (code := self._node.refusal(call, gpu)) is not None:
            raise refused(call, code)

    # Values from a GPU's profile (`built`) and its present state (`now`)

    def minor_number(self, handle: Handle) -> int:
        return self._gpu("minor_number", handle).minor

    def pci_bus_id(self, handle: Handle) -> str:
        return self._gpu("pci_bus_id", handle).pci_bus_id

    def architecture(self, handle: Handle) -> int:
        return supported("architecture", self._gpu("architecture", handle).architecture)

    def compute_capability(self, handle: Handle) -> tuple[int, int]:
        """Return the profile's value, else the value of its architecture's first GPU for data centers."""
        built = self._gpu("compute_capability", handle)
        derived = _COMPUTE_CAPABILITIES.get(built.architecture or 0)
        return supported("compute_capability", built.compute_capability or derived)

    def memory_total(self, handle: Handle) -> int:
        return supported("memory_total", self._gpu("memory_total", handle).memory_bytes)

    def memory_used(self, handle: Handle) -> int:
        built, now = self._read("memory_used", handle)
        return supported("memory_used", None if built.memory_bytes is None else now.memory_used)

    def power_usage(self, handle: Handle) -> int:
        return _power(*self._read("power_usage", handle))

    def power_limit(self, handle: Handle) -> int:
        return 1000 * self._gpu("power_limit", handle).limit_watts

    def memory_affinity(self, handle: Handle) -> frozenset[int]:
        return frozenset(supported("memory_affinity", self._gpu("memory_affinity", handle).memory_affinity))

    def persistence_mode(self, handle: Handle) -> bool:
        return self._read("persistence_mode", handle)[1].persistence

    def temperature(self, handle: Handle) -> int:
        return _temperature(*self._read("temperature", handle))

    def margin_temperature(self, handle: Handle) -> int:
        """Return the present margin, which falls by a degree for each degree above the idle temperature."""
        built, now = self._read("margin_temperature", handle)
        idle = supported("margin_temperature", built.margin)
        return idle - (_temperature(built, now) - built.idle_temperature) if now.margin is None else now.margin

    def uncorrected_ecc_errors(self, handle: Handle) -> int:
        built, now = self._read("uncorrected_ecc_errors", handle)
        return supported("uncorrected_ecc_errors", now.ecc_uncorrected if built.ecc else None)

    def sram_threshold_exceeded(self, handle: Handle) -> bool:
        built, now = self._read("sram_threshold_exceeded", handle)
        return supported("sram_threshold_exceeded", now.sram_threshold if built.sram_status else None)

    def retired_pages_pending(self, handle: Handle) -> bool:
        built, now = self._read("retired_pages_pending", handle)
        return supported("retired_pages_pending", now.retirement_pending if built.page_retirement else None)

    def unrepairable_memory(self, handle: Handle) -> bool:
        built, now = self._read("unrepairable_memory", handle)
        return supported("unrepairable_memory", now.unrepairable_memory if built.unrepairable_memory else None)

    def clocks_event_reasons(self, handle: Handle) -> int:
        built, now = self._read("clocks_event_reasons", handle)
        idle = supported("clocks_event_reasons", built.clocks_event_reasons)
        return idle if now.clocks_event_reasons is None else now.clocks_event_reasons

    def fabric(self, handle: Handle) -> Fabric:
        """Return the state of a fault, else of the profile. In all completed states, cluster and clique are the profile's."""
        built, now = self._read("fabric", handle)
        own = supported("fabric", built.fabric)
        state = own if now.fabric is None else FABRICS[now.fabric]
        joined = state.state == FabricState.COMPLETED
        place = (own.cluster, own.clique) if joined else ("", 0)
        return Fabric(state.state, state.status, state.health_mask, state.summary, *place)

    def pcie_link(self, handle: Handle) -> PcieLink:
        built, now = self._read("pcie_link", handle)
        widest = supported("pcie_link", built.pcie_width)
        return PcieLink(widest if now.pcie_width is None else now.pcie_width, widest)

    def pcie_generation(self, handle: Handle) -> int:
        """Return the same as `pcie_max_generation`: the link is never idle."""
        return supported("pcie_generation", _pcie_generation(self._gpu("pcie_generation", handle)))

    def pcie_max_generation(self, handle: Handle) -> int:
        return supported("pcie_max_generation", _pcie_generation(self._gpu("pcie_max_generation", handle)))

    def pcie_replays(self, handle: Handle) -> int:
        built, now = self._read("pcie_replays", handle)
        return supported("pcie_replays", now.pcie_replays if built.pcie_width else None)

    def vgpu_licensed(self, handle: Handle) -> bool:
        return supported("vgpu_licensed", self._gpu("vgpu_licensed", handle).vgpu_licensed)

    def supported_event_types(self, handle: Handle) -> int:
        return supported("supported_event_types", self._gpu("supported_event_types", handle).event_types)

    # Calls about the node, GPUs and MIG devices

    def driver_version(self) -> str:
        self._begin("driver_version")
        return self._profile.driver_version

    def cuda_version(self) -> tuple[int, int]:
        self._begin("cuda_version")
        return self._profile.cuda_version

    def device_count(self) -> int:
        """Return the number of GPUs, including lost GPUs and GPUs that have vanished since."""
        self._begin("device_count")
        return len(self._gpus)

    def handle_by_index(self, index: int) -> Handle:
        """INVALID_ARGUMENT for an index that no GPU has."""
        gpu = self._gpus[index] if 0 <= index < len(self._gpus) else None
        self._begin("handle_by_index", gpu)
        if gpu is None:
            raise refused("handle_by_index", Return.INVALID_ARGUMENT)
        return self._handle("handle_by_index", gpu)

    def handle_by_uuid(self, uuid: str) -> Handle:
        """NOT_FOUND for a uuid that no GPU has."""
        gpus = (index for index, gpu in enumerate(self._profile.gpus) if gpu.uuid == uuid)
        return self._look_up("handle_by_uuid", next(gpus, None))

    def handle_by_pci_bus_id(self, bus_id: str) -> Handle:
        """NOT_FOUND for a bus id that no GPU has. As in NVML, its case is ignored, and the domain may have four digits."""
        return self._look_up("handle_by_pci_bus_id", self._profile.at(bus_id))

    def uuid(self, handle: Handle) -> str:
        found = self._mig_device("uuid", handle)
        return found.uuid if found else self._gpu("uuid", handle).uuid

    def name(self, handle: Handle) -> str:
        found = self._mig_device("name", handle)
        if found is None:
            return self._gpu("name", handle).name
        return f"{self._profile.gpus[found.gpu].name} MIG {found.instance.profile}"

    def utilization(self, handle: Handle) -> int:
        """Return the present percentage. NOT_SUPPORTED in MIG mode."""
        index = self._reach("utilization", handle)
        busy = self._node.condition(index).utilization
        return supported("utilization", busy if self._node.mig_devices(index) is None else None)

    def mig_mode(self, handle: Handle) -> tuple[int, int]:
        """Return the profile's (current, pending), until the GPU is repartitioned."""
        index = self._reach("mig_mode", handle)
        built = supported("mig_mode", self._profile.gpus[index].mig_mode)
        enabled = int(self._node.mig_devices(index) is not None)
        return built if built[0] == enabled else (enabled, enabled)

    def max_mig_devices(self, handle: Handle) -> int:
        """Return 0 outside MIG mode and for models without MIG, for which NVML returns no error here."""
        index = self._reach("max_mig_devices", handle)
        return 0 if self._node.mig_devices(index) is None else COMPUTE_SLICES

    def mig_handle(self, handle: Handle, index: int) -> Handle:
        """NOT_SUPPORTED outside MIG mode. NOT_FOUND for an index without a device, INVALID_ARGUMENT for a higher index."""
        gpu = self._reach("mig_handle", handle)
        devices = supported("mig_handle", self._node.mig_devices(gpu))
        if not 0 <= index < COMPUTE_SLICES:
            raise refused("mig_handle", Return.INVALID_ARGUMENT)
        if index >= len(devices):
            raise refused("mig_handle", Return.NOT_FOUND)
        return Handle(_FIRST_MIG_HANDLE + devices[index].number * _MIG_STRIDE)

    def gpu_instance_id(self, handle: Handle) -> int:
        """NOT_SUPPORTED for the handle of a whole GPU."""
        return self._mig("gpu_instance_id", handle).instance.gpu_instance

    def compute_instance_id(self, handle: Handle) -> int:
        """NOT_SUPPORTED for the handle of a whole GPU."""
        return self._mig("compute_instance_id", handle).instance.compute_instance

    def mig_attributes(self, handle: Handle) -> MigAttributes:
        """NOT_SUPPORTED for the handle of a whole GPU."""
        found = self._mig("mig_attributes", handle).instance
        return MigAttributes(found.gpu_instance_slices, found.compute_slices, found.memory_mb, found.engines)

    def compute_mode(self, handle: Handle) -> int:
        return self._node.compute_modes.get(self._reach("compute_mode", handle))

    def set_compute_mode(self, handle: Handle, mode: int) -> None:
        """INVALID_ARGUMENT for a mode that NVML does not have."""
        index = self._reach("set_compute_mode", handle)
        if mode not in set(ComputeMode):
            raise refused("set_compute_mode", Return.INVALID_ARGUMENT)
        self._node.compute_modes.set(index, mode)

    def temperature_threshold(self, handle: Handle, kind: Threshold) -> int:
        """Return the profile's threshold in °C. INVALID_ARGUMENT for a kind that NVML does not have."""
        thresholds = self._gpu("temperature_threshold", handle).thresholds
        if kind not in _THRESHOLDS:
            raise refused("temperature_threshold", Return.INVALID_ARGUMENT)
        limit: int | None = getattr(thresholds, _THRESHOLDS[kind])
        return supported("temperature_threshold", limit)

    def remapped_rows(self, handle: Handle) -> RemappedRows:
        """NOT_SUPPORTED also while the GPU is partitioned into MIG devices."""
        index = self._reach("remapped_rows", handle)
        now = self._node.condition(index)
        rows = RemappedRows(0, now.rows_uncorrectable, now.remap_pending, now.remap_failure)
        remaps = self._profile.gpus[index].row_remapping and not self._node.mig_devices(index)
        return supported("remapped_rows", rows if remaps else None)

    def nvlink_states(self, handle: Handle) -> tuple[bool, ...]:
        """Return the state of each link. A link that leads nowhere is inactive."""
        index = self._reach("nvlink_states", handle)
        if not self._profile.remotes[index]:
            raise refused("nvlink_states", Return.NOT_SUPPORTED)
        return tuple(remote is not None for remote in self._remotes(index))

    def nvlink_to_switch(self, handle: Handle, link: int) -> bool:
        """Return False for an inactive link, whose far end NVML does not report."""
        remote = self._remote("nvlink_to_switch", handle, link)
        return remote is not None and all(remote != gpu.pci_bus_id for gpu in self._profile.gpus)

    def total_energy(self, handle: Handle) -> int:
        """Return the energy in mJ, which grows with time and begins at 0 after a reset."""
        return self._node.energy(self._reach("total_energy", handle))

    def field_values(self, handle: Handle, fields: tuple[Field, ...]) -> tuple[int | NvmlError, ...]:
        """NOT_SUPPORTED for a field that the profile does not list, INVALID_ARGUMENT for a link that does not exist."""
        index = self._reach("field_values", handle)
        return tuple(self._field(index, field) for field in fields)

    def nvlink_remote_bus_id(self, handle: Handle, link: int) -> str | None:
        """Return a GPU's or an NVSwitch's bus id; None for a link that leads nowhere or is down."""
        return self._remote("nvlink_remote_bus_id", handle, link)

    def common_ancestor(self, one: Handle, other: Handle) -> int:
        """Return the profile's level if both GPUs answer. UNKNOWN if the place of one of them cannot be read."""
        low = self._reach("common_ancestor", one)
        high = self._answering("common_ancestor", other)
        if any(self._node.condition(index).topology for index in (low, high)):
            raise refused("common_ancestor", Return.UNKNOWN)
        return self._profile.ancestor(low, high)

    def event_set(self) -> EventSet:
        """Make an event set without GPUs."""
        self._begin("event_set")
        return self._node.events.create()

    def free_event_set(self, events: EventSet) -> None:
        """INVALID_ARGUMENT for a set that is freed already. A `wait` for the set ends with the same error."""
        self._begin("free_event_set")
        if not self._node.events.free(events):
            raise refused("free_event_set", Return.INVALID_ARGUMENT)

    def register_events(self, handle: Handle, mask: int, events: EventSet) -> None:
        """Add to the registrations. INVALID_ARGUMENT for bits that NVML lacks, NOT_SUPPORTED for bits that the GPU lacks.

        After UNKNOWN, due to the GPU or to an injected refusal, the set returns no more events.
        """
        try:
            index = self._reach("register_events", handle)
        except NvmlError as error:
            if error.code == Return.UNKNOWN:
                self._node.events.undefine(events)
            raise
        known = supported("register_events", self._profile.gpus[index].event_types)
        if mask & ~EVENT_TYPES_ALL:
            raise refused("register_events", Return.INVALID_ARGUMENT)
        if mask & ~known:
            raise refused("register_events", Return.NOT_SUPPORTED)
        if not self._node.events.register(index, handle, mask, events):
            raise refused("register_events", Return.INVALID_ARGUMENT)

    def wait(self, events: EventSet, timeout_ms: int) -> Event:
        """Return and remove the oldest event. GPU_IS_LOST if a GPU of the set is lost. A hung GPU has no effect."""
        self._begin("wait")
        try:
            event = self._node.events.next_event(events, timeout_ms / 1000)
        except GpuIsLostError:
            raise refused("wait", Return.GPU_IS_LOST) from None
        except LookupError:
            raise refused("wait", Return.INVALID_ARGUMENT if self._opened else Return.UNINITIALIZED) from None
        if not event:
            raise refused("wait", Return.TIMEOUT)
        return event

    # Steps of calls

    def _reach(self, call: str, handle: Handle) -> int:
        """Do the first steps of all calls about a GPU and return its index. Blocks while the GPU hangs."""
        self._begin(call, self._find(handle))
        return self._answering(call, handle)

    def _answering(self, call: str, handle: Handle) -> int:
        index = self._find(handle)
        if index is None:
            raise refused(call, Return.INVALID_ARGUMENT)
        self._check_answers(call, index)
        return index

    def _gpu(self, call: str, handle: Handle) -> GpuProfile:
        return self._profile.gpus[self._reach(call, handle)]

    def _read(self, call: str, handle: Handle) -> tuple[GpuProfile, Condition]:
        index = self._reach(call, handle)
        return self._profile.gpus[index], self._node.condition(index)

    def _mig_device(self, call: str, handle: Handle) -> SimulatedMigDevice | None:
        """Do the first steps of a call and return the MIG device of a handle; None if it is not a MIG device's handle."""
        if handle < _FIRST_MIG_HANDLE:
            return None
        number, rest = divmod(handle - _FIRST_MIG_HANDLE, _MIG_STRIDE)
        found = None if rest else self._node.mig_device(number)
        self._begin(call, found.gpu if found else None)
        if found is None:
            raise refused(call, Return.INVALID_ARGUMENT)
        self._check_answers(call, found.gpu)
        return found

    def _mig(self, call: str, handle: Handle) -> SimulatedMigDevice:
        found = self._mig_device(call, handle)
        if found is None:
            self._reach(call, handle)
        return supported(call, found)

    def _look_up(self, call: str, index: int | None) -> Handle:
        self._begin(call, index)
        if index not in self._departures or self._node.has_gone(index, self._departures[index]):
            raise refused(call, Return.NOT_FOUND)
        return self._handle(call, index)

    def _handle(self, call: str, index: int) -> Handle:
        self._check_answers(call, index)
        return Handle(_FIRST_HANDLE + self._gpus.index(index) * _HANDLE_STRIDE)

    def _check_answers(self, call: str, index: int) -> None:
        if (code := self._node.failing(index, self._departures.get(index, -1))) is not None:
            raise refused(call, code)

    def _find(self, handle: Handle) -> int | None:
        number, rest = divmod(handle - _FIRST_HANDLE, _HANDLE_STRIDE)
        return self._gpus[number] if not rest and 0 <= number < len(self._gpus) else None

    def _field(self, index: int, field: Field) -> int | NvmlError:
        built, now = self._profile.gpus[index], self._node.condition(index)
        number, links = field.number, self._remotes(index)
        of_link = number in LINK_FIELDS
        if of_link and links and not 0 <= field.scope < len(links):
            return refused("field_values", Return.INVALID_ARGUMENT)
        lacks = number not in built.fields or (of_link and not links)
        if lacks or (number in _OF_ROWS and self._node.mig_devices(index)):
            return refused("field_values", Return.NOT_SUPPORTED)
        own = built.fields[number]
        if number == FI_NVLINK_GET_STATE:
            return int(links[field.scope] is not None)
        if of_link:
            return now.link_fields.get(number, {}).get(field.scope, own)
        if number == FI_TOTAL_ENERGY_CONSUMPTION:
            return self._node.energy(index)
        if number == FI_POWER_INSTANT:
            return _power(built, now)
        if number == FI_POWER_CURRENT_LIMIT:
            return 1000 * built.limit_watts
        if number in _PRESENT:
            return int(getattr(now, _PRESENT[number]))
        return now.fields.get(number, own)

    def _remotes(self, index: int) -> tuple[str | None, ...]:
        """Return the far end of each of a GPU's links; None for an inactive link."""
        links, down = self._profile.remotes[index], self._node.condition(index).links_down
        return tuple(None if link in down else remote for link, remote in enumerate(links)) if down else links

    def _remote(self, call: str, handle: Handle, link: int) -> str | None:
        links = self._remotes(self._reach(call, handle))
        if not links:
            raise refused(call, Return.NOT_SUPPORTED)
        if not 0 <= link < len(links):
            raise refused(call, Return.INVALID_ARGUMENT)
        return links[link]


def refused(call: str, code: int) -> NvmlError:
    """Return the error of a call that fails with this nvmlReturn_t."""
    return NvmlError(code, NVML_FUNCTIONS[call])


def supported(call: str, value: T | None) -> T:
    """Return the value. None is raised as NOT_SUPPORTED."""
    if value is None:
        raise refused(call, Return.NOT_SUPPORTED)
    return value


def _temperature(built: GpuProfile, now: Condition) -> int:
    return built.idle_temperature if now.temperature is None else now.temperature


def _power(built: GpuProfile, now: Condition) -> int:
    return 1000 * (built.idle_watts if now.watts is None else now.watts)


def _pcie_generation(built: GpuProfile) -> int | None:
    return None if built.pcie_width is None else _PCIE_GENERATIONS.get(built.architecture or 0)
