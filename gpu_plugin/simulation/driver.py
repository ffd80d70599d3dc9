"""A driver for simulated hardware that behaves like NVML, including return codes, event masks and blocking calls."""

import collections
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gpu_plugin.devices.nvml_h import (
    EVENT_TYPES_ALL,
    FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    FI_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
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
    Return,
    Threshold,
)
from gpu_plugin.nvml.port import NVML_FUNCTIONS, Driver, Event, EventSet, Field, Handle, MigAttributes, NvmlError
from gpu_plugin.simulation.event_sets import GpuIsLostError
from gpu_plugin.simulation.gpu import SimulatedGpu, SimulatedMigDevice
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.mig import COMPUTE_SLICES

T = TypeVar("T")

# Handles look like NVML's pointers. They depend on the number that a GPU got when the driver was opened.
_FIRST_HANDLE = 0x7F0000001000
_HANDLE_STRIDE = 0x1000

# Handles of MIG devices, by their numbers
_FIRST_MIG_HANDLE = 0x7F8000000000
_MIG_STRIDE = 0x100

# Fields for which NVML needs the number of an NVLink, in scopeId
LINK_FIELDS = frozenset(
    {
        FI_NVLINK_GET_STATE,
        FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        FI_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    }
)


def refused(call: str, code: int) -> NvmlError:
    """Return the error of a call that fails with this nvmlReturn_t."""
    return NvmlError(code, NVML_FUNCTIONS[call])


def supported(call: str, value: T | None) -> T:
    """Return the value. None is raised as NOT_SUPPORTED."""
    if value is None:
        raise refused(call, Return.NOT_SUPPORTED)
    return value


def _answer(call: str) -> Any:
    """Return the method for a call that returns one value of a GPU."""

    def answer(self: "SimulatedDriver", handle: Handle) -> object:
        return supported(call, self._gpu(call, handle).answer(call))

    return answer


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

    # Values of `SimulatedGpu.answer`
    minor_number = _answer("minor_number")
    pci_bus_id = _answer("pci_bus_id")
    architecture = _answer("architecture")
    compute_capability = _answer("compute_capability")
    memory_total = _answer("memory_total")
    memory_used = _answer("memory_used")
    memory_affinity = _answer("memory_affinity")
    power_usage = _answer("power_usage")
    power_limit = _answer("power_limit")
    persistence_mode = _answer("persistence_mode")
    temperature = _answer("temperature")
    margin_temperature = _answer("margin_temperature")
    uncorrected_ecc_errors = _answer("uncorrected_ecc_errors")
    sram_threshold_exceeded = _answer("sram_threshold_exceeded")
    retired_pages_pending = _answer("retired_pages_pending")
    unrepairable_memory = _answer("unrepairable_memory")
    remapped_rows = _answer("remapped_rows")
    clocks_event_reasons = _answer("clocks_event_reasons")
    fabric = _answer("fabric")
    nvlink_states = _answer("nvlink_states")
    pcie_link = _answer("pcie_link")
    pcie_generation = _answer("pcie_generation")
    pcie_max_generation = _answer("pcie_max_generation")
    pcie_replays = _answer("pcie_replays")
    vgpu_licensed = _answer("vgpu_licensed")
    supported_event_types = _answer("supported_event_types")
    utilization = _answer("utilization")
    mig_mode = _answer("mig_mode")
    max_mig_devices = _answer("max_mig_devices")

    def temperature_threshold(self, handle: Handle, kind: Threshold) -> int:
        """Return the profile's threshold in °C. INVALID_ARGUMENT for a kind that NVML does not have."""
        limits = self._gpu("temperature_threshold", handle).built.thresholds
        by_kind = {
            Threshold.SHUTDOWN: limits.shutdown,
            Threshold.SLOWDOWN: limits.slowdown,
            Threshold.MEM_MAX: limits.memory_max,
            Threshold.GPU_MAX: limits.gpu_max,
        }
        if kind not in by_kind:
            raise refused("temperature_threshold", Return.INVALID_ARGUMENT)
        return supported("temperature_threshold", by_kind[kind])

    def total_energy(self, handle: Handle) -> int:
        """Return the energy in mJ, which grows with time and begins at 0 after a reset."""
        return self._node.energy(self._gpu("total_energy", handle).index)

    def field_values(self, handle: Handle, fields: tuple[Field, ...]) -> tuple[int | NvmlError, ...]:
        """NOT_SUPPORTED for a field that the profile does not list, INVALID_ARGUMENT for a link that does not exist."""
        gpu = self._gpu("field_values", handle)
        return tuple(self._field(gpu, field) for field in fields)

    def _field(self, gpu: SimulatedGpu, field: Field) -> int | NvmlError:
        now, number, links = gpu.state, field.number, gpu.links()
        of_link = number in LINK_FIELDS
        of_rows = number in (FI_REMAPPED_PENDING, FI_REMAPPED_FAILURE, FI_REMAPPED_COR, FI_REMAPPED_UNC)
        if of_link and links and not 0 <= field.scope < len(links):
            return refused("field_values", Return.INVALID_ARGUMENT)
        if number not in gpu.built.fields or (of_link and not links) or (of_rows and gpu.mig_devices):
            return refused("field_values", Return.NOT_SUPPORTED)
        own = gpu.built.fields[number]
        if number == FI_NVLINK_GET_STATE:
            return int(links[field.scope] is not None)
        if of_link:
            return now.link_fields.get(number, {}).get(field.scope, own)
        if number == FI_TOTAL_ENERGY_CONSUMPTION:
            return self._node.energy(gpu.index)
        of_functions = {
            FI_POWER_INSTANT: gpu.power(),
            FI_POWER_CURRENT_LIMIT: 1000 * gpu.built.limit_watts,
            FI_REMAPPED_PENDING: int(now.remap_pending),
            FI_REMAPPED_FAILURE: int(now.remap_failure),
            FI_REMAPPED_UNC: now.rows_uncorrectable,
            FI_RETIRED_PENDING: int(now.retirement_pending),
            FI_PCIE_REPLAY_COUNTER: now.pcie_replays,
        }
        return of_functions.get(number, now.fields.get(number, own))

    def compute_mode(self, handle: Handle) -> int:
        return self._node.compute_modes.get(self._gpu("compute_mode", handle).index)

    def set_compute_mode(self, handle: Handle, mode: int) -> None:
        """INVALID_ARGUMENT for a mode that NVML does not have."""
        gpu = self._gpu("set_compute_mode", handle)
        if mode not in set(ComputeMode):
            raise refused("set_compute_mode", Return.INVALID_ARGUMENT)
        self._node.compute_modes.set(gpu.index, mode)

    def common_ancestor(self, one: Handle, other: Handle) -> int:
        """Return the profile's level if both GPUs answer. UNKNOWN if the place of one of them cannot be read."""
        low = self._gpu("common_ancestor", one)
        high = self._answering("common_ancestor", other)
        if low.state.topology or high.state.topology:
            raise refused("common_ancestor", Return.UNKNOWN)
        return self._node.profile.ancestor(low.index, high.index)

    # NVLinks

    def nvlink_to_switch(self, handle: Handle, link: int) -> bool:
        """Return False for an inactive link, whose far end NVML does not report."""
        remote = self._remote("nvlink_to_switch", handle, link)
        return remote is not None and all(remote != gpu.pci_bus_id for gpu in self._node.profile.gpus)

    def nvlink_remote_bus_id(self, handle: Handle, link: int) -> str | None:
        """Return a GPU's or an NVSwitch's bus id; None for a link that leads nowhere or is down."""
        return self._remote("nvlink_remote_bus_id", handle, link)

    def _remote(self, call: str, handle: Handle, link: int) -> str | None:
        links = self._gpu(call, handle).links()
        if not links:
            raise refused(call, Return.NOT_SUPPORTED)
        if not 0 <= link < len(links):
            raise refused(call, Return.INVALID_ARGUMENT)
        return links[link]

    # The node, and handles of its GPUs

    def driver_version(self) -> str:
        self._begin("driver_version")
        return self._node.profile.driver_version

    def cuda_version(self) -> tuple[int, int]:
        self._begin("cuda_version")
        return self._node.profile.cuda_version

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
        gpus = (index for index, gpu in enumerate(self._node.profile.gpus) if gpu.uuid == uuid)
        return self._look_up("handle_by_uuid", next(gpus, None))

    def handle_by_pci_bus_id(self, bus_id: str) -> Handle:
        """NOT_FOUND for a bus id that no GPU has. As in NVML, its case is ignored, and the domain may have four digits."""
        return self._look_up("handle_by_pci_bus_id", self._node.profile.at(bus_id))

    def _look_up(self, call: str, index: int | None) -> Handle:
        self._begin(call, index)
        if index not in self._departures or self._node.gpus[index].departures != self._departures[index]:
            raise refused(call, Return.NOT_FOUND)
        return self._handle(call, index)

    def _handle(self, call: str, index: int) -> Handle:
        self._check_answers(call, index)
        return Handle(_FIRST_HANDLE + self._gpus.index(index) * _HANDLE_STRIDE)

    # MIG, and calls that GPUs and MIG devices answer

    def uuid(self, handle: Handle) -> str:
        found = self._mig_device("uuid", handle)
        return found.uuid if found else self._gpu("uuid", handle).built.uuid

    def name(self, handle: Handle) -> str:
        found = self._mig_device("name", handle)
        if found is None:
            return self._gpu("name", handle).built.name
        return f"{self._node.profile.gpus[found.gpu].name} MIG {found.instance.profile}"

    def mig_handle(self, handle: Handle, index: int) -> Handle:
        """NOT_SUPPORTED outside MIG mode. NOT_FOUND for an index without a device, INVALID_ARGUMENT for a higher index."""
        devices = supported("mig_handle", self._gpu("mig_handle", handle).mig_devices)
        if not 0 <= index < COMPUTE_SLICES:
            raise refused("mig_handle", Return.INVALID_ARGUMENT)
        if index >= len(devices):
            raise refused("mig_handle", Return.NOT_FOUND)
        return Handle(_FIRST_MIG_HANDLE + devices[index].number * _MIG_STRIDE)

    # NOT_SUPPORTED for the handle of a whole GPU

    def gpu_instance_id(self, handle: Handle) -> int:
        return self._mig("gpu_instance_id", handle).instance.gpu_instance

    def compute_instance_id(self, handle: Handle) -> int:
        return self._mig("compute_instance_id", handle).instance.compute_instance

    def mig_attributes(self, handle: Handle) -> MigAttributes:
        found = self._mig("mig_attributes", handle).instance
        return MigAttributes(found.gpu_instance_slices, found.compute_slices, found.memory_mb, found.engines)

    def _mig(self, call: str, handle: Handle) -> SimulatedMigDevice:
        found = self._mig_device(call, handle)
        if found is None:
            self._gpu(call, handle)
        return supported(call, found)

    def _mig_device(self, call: str, handle: Handle) -> SimulatedMigDevice | None:
        """Do the first steps of a call and return the MIG device of a handle; None if it is not a MIG device's handle."""
        if handle < _FIRST_MIG_HANDLE:
            return None
        devices = (device for gpu in self._node.gpus for device in gpu.mig_devices or ())
        found = next((each for each in devices if handle == _FIRST_MIG_HANDLE + each.number * _MIG_STRIDE), None)
        self._begin(call, found.gpu if found else None)
        if found is None:
            raise refused(call, Return.INVALID_ARGUMENT)
        self._check_answers(call, found.gpu)
        return found

    # Events

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
            gpu = self._gpu("register_events", handle)
        except NvmlError as error:
            if error.code == Return.UNKNOWN:
                self._node.events.undefine(events)
            raise
        known = supported("register_events", gpu.built.event_types)
        if mask & ~EVENT_TYPES_ALL:
            raise refused("register_events", Return.INVALID_ARGUMENT)
        if mask & ~known:
            raise refused("register_events", Return.NOT_SUPPORTED)
        if not self._node.events.register(gpu.index, handle, mask, events):
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

    def _gpu(self, call: str, handle: Handle) -> SimulatedGpu:
        """Do the first steps of all calls about a GPU and return it. Blocks while the GPU hangs."""
        self._begin(call, self._find(handle))
        return self._answering(call, handle)

    def _answering(self, call: str, handle: Handle) -> SimulatedGpu:
        index = self._find(handle)
        if index is None:
            raise refused(call, Return.INVALID_ARGUMENT)
        self._check_answers(call, index)
        return self._node.gpus[index]

    def _check_answers(self, call: str, index: int) -> None:
        if (code := self._node.failing(index, self._departures.get(index, -1))) is not None:
            raise refused(call, code)

    def _find(self, handle: Handle) -> int | None:
        number, rest = divmod(handle - _FIRST_HANDLE, _HANDLE_STRIDE)
        return self._gpus[number] if not rest and 0 <= number < len(self._gpus) else None
