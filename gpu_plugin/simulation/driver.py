"""A driver that answers for simulated hardware as NVML does: return codes, event masks, blocking calls and all."""

import collections
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from gpu_plugin.nvml.port import Event, EventSet, Handle, MigAttributes, NvmlError, Return, Threshold
from gpu_plugin.simulation.hardware import SimulatedNode, Slice
from gpu_plugin.simulation.mig import COMPUTE_SLICES
from gpu_plugin.simulation.profile import GpuProfile

NVML_FUNCTIONS = {
    "open": "nvmlInit_v2",
    "close": "nvmlShutdown",
    "driver_version": "nvmlSystemGetDriverVersion",
    "device_count": "nvmlDeviceGetCount_v2",
    "handle_by_index": "nvmlDeviceGetHandleByIndex_v2",
    "handle_by_uuid": "nvmlDeviceGetHandleByUUID",
    "uuid": "nvmlDeviceGetUUID",
    "minor_number": "nvmlDeviceGetMinorNumber",
    "pci_bus_id": "nvmlDeviceGetPciInfo_v3",
    "name": "nvmlDeviceGetName",
    "architecture": "nvmlDeviceGetArchitecture",
    "memory_total": "nvmlDeviceGetMemoryInfo",
    "mig_mode": "nvmlDeviceGetMigMode",
    "max_mig_devices": "nvmlDeviceGetMaxMigDeviceCount",
    "mig_handle": "nvmlDeviceGetMigDeviceHandleByIndex",
    "gpu_instance_id": "nvmlDeviceGetGpuInstanceId",
    "compute_instance_id": "nvmlDeviceGetComputeInstanceId",
    "mig_attributes": "nvmlDeviceGetAttributes_v2",
    "numa_node": "nvmlDeviceGetNumaNodeId",
    "compute_mode": "nvmlDeviceGetComputeMode",
    "set_compute_mode": "nvmlDeviceSetComputeMode",
    "temperature": "nvmlDeviceGetTemperature",
    "temperature_threshold": "nvmlDeviceGetTemperatureThreshold",
    "total_energy": "nvmlDeviceGetTotalEnergyConsumption",
    "supported_event_types": "nvmlDeviceGetSupportedEventTypes",
    "field_values": "nvmlDeviceGetFieldValues",
    "nvlink_remote_bus_id": "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "common_ancestor": "nvmlDeviceGetTopologyCommonAncestor",
    "event_set": "nvmlEventSetCreate",
    "free_event_set": "nvmlEventSetFree",
    "register_events": "nvmlDeviceRegisterEvents",
    "wait": "nvmlEventSetWait_v2",
}
"""The port's calls and the NVML function that an error of each names."""

_ALL_EVENT_TYPES = 0xFF9F
"""nvmlEventTypeAll: a bit beyond it is no event type at all."""

_FIRST_HANDLE, _HANDLE_STRIDE = 0x7F0000001000, 0x1000
"""Handles look like the pointers they are in NVML; the index of a GPU is not a handle."""

_FIRST_MIG_HANDLE, _MIG_GPU_STRIDE, _MIG_STRIDE = 0x7F8000000000, 0x100000000, 0x100
"""Those of MIG devices, by GPU and then by the number of the slice."""

_COMPUTE_MODES = range(4)
"""nvmlComputeMode_t: default, exclusive thread, prohibited, exclusive process."""

_THRESHOLDS = {
    Threshold.SHUTDOWN: "shutdown",
    Threshold.SLOWDOWN: "slowdown",
    Threshold.MEM_MAX: "memory_max",
    Threshold.GPU_MAX: "gpu_max",
}

_Value = TypeVar("_Value")


class SimulatedDriver:
    """The port's `Driver` on a `SimulatedNode`, safe from any thread; every refusal is an NvmlError.

    - Before `open` and after as many `close` as there were `open`: UNINITIALIZED.
    - A lost GPU: GPU_IS_LOST from every call about it, getting its handle included. Handles stay valid over heal.
    - A hung GPU: every call about it blocks in the calling thread until the hang ends; `close` does not end it.
    - What the profile lacks: NOT_SUPPORTED.
    - The handle of a MIG device that is no more: INVALID_ARGUMENT from every call.

    `latency` makes a call, by its name here, take that many seconds longer. `calls` counts calls by name, refused ones
    included.
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

    def open(self) -> None:
        """Counted, as nvmlInit is: each needs a `close`."""
        self._begin("open", opened=False)
        with self._lock:
            self._opened += 1

    def close(self) -> None:
        """The last one forgets every event set; a `wait` still going on then ends with UNINITIALIZED."""
        self._begin("close")
        with self._lock:
            self._opened = max(self._opened - 1, 0)
            last = not self._opened
        if last:
            self._node.close_listeners()

    def driver_version(self) -> str:
        self._begin("driver_version")
        return self._profile.driver_version

    def device_count(self) -> int:
        """Lost GPUs are counted: NVML numbers GPUs once, when it is opened."""
        self._begin("device_count")
        return len(self._profile.gpus)

    def handle_by_index(self, index: int) -> Handle:
        """INVALID_ARGUMENT beyond the last one."""
        known = 0 <= index < len(self._profile.gpus)
        self._begin("handle_by_index", index if known else None)
        if not known:
            raise _refused("handle_by_index", Return.INVALID_ARGUMENT)
        return self._handle("handle_by_index", index)

    def handle_by_uuid(self, uuid: str) -> Handle:
        """NOT_FOUND for a uuid that is no GPU's."""
        index = next((index for index, gpu in enumerate(self._profile.gpus) if gpu.uuid == uuid), None)
        self._begin("handle_by_uuid", index)
        if index is None:
            raise _refused("handle_by_uuid", Return.NOT_FOUND)
        return self._handle("handle_by_uuid", index)

    def uuid(self, handle: Handle) -> str:
        found = self._slice("uuid", handle)
        return found.uuid if found else self._gpu("uuid", handle).uuid

    def minor_number(self, handle: Handle) -> int:
        return self._gpu("minor_number", handle).minor

    def pci_bus_id(self, handle: Handle) -> str:
        return self._gpu("pci_bus_id", handle).pci_bus_id

    def name(self, handle: Handle) -> str:
        found = self._slice("name", handle)
        if found is None:
            return self._gpu("name", handle).name
        return f"{self._profile.gpus[_gpu_of_mig(handle)].name} MIG {found.instance.profile}"

    def architecture(self, handle: Handle) -> int:
        return _supported("architecture", self._gpu("architecture", handle).architecture)

    def memory_total(self, handle: Handle) -> int:
        """The profile's, bytes."""
        return _supported("memory_total", self._gpu("memory_total", handle).memory_bytes)

    def mig_mode(self, handle: Handle) -> tuple[int, int]:
        """The profile's (current, pending), until the GPU is cut anew."""
        index = self._reach("mig_mode", handle)
        built = _supported("mig_mode", self._profile.gpus[index].mig_mode)
        enabled = int(self._node.cut(index) is not None)
        return built if built[0] == enabled else (enabled, enabled)

    def max_mig_devices(self, handle: Handle) -> int:
        """0 outside MIG mode, and for parts that have none: NVML gives no error here."""
        return COMPUTE_SLICES if self._node.cut(self._reach("max_mig_devices", handle)) else 0

    def mig_handle(self, handle: Handle, index: int) -> Handle:
        """NOT_SUPPORTED outside MIG mode; NOT_FOUND for an index without a device, INVALID_ARGUMENT beyond the last one."""
        gpu = self._reach("mig_handle", handle)
        slices = _supported("mig_handle", self._node.cut(gpu)).slices
        if not 0 <= index < COMPUTE_SLICES:
            raise _refused("mig_handle", Return.INVALID_ARGUMENT)
        if index >= len(slices):
            raise _refused("mig_handle", Return.NOT_FOUND)
        return Handle(_FIRST_MIG_HANDLE + gpu * _MIG_GPU_STRIDE + slices[index].number * _MIG_STRIDE)

    def gpu_instance_id(self, handle: Handle) -> int:
        """NOT_SUPPORTED for a handle that is a whole GPU's."""
        return self._mig("gpu_instance_id", handle).instance.gpu_instance

    def compute_instance_id(self, handle: Handle) -> int:
        """NOT_SUPPORTED for a handle that is a whole GPU's."""
        return self._mig("compute_instance_id", handle).instance.compute_instance

    def mig_attributes(self, handle: Handle) -> MigAttributes:
        """NOT_SUPPORTED for a handle that is a whole GPU's."""
        found = self._mig("mig_attributes", handle).instance
        return MigAttributes(found.gpu_instance_slices, found.compute_slices, found.memory_mb)

    def numa_node(self, handle: Handle) -> int:
        """NOT_SUPPORTED but where a GPU's memory is a NUMA node; sysfs knows the node a PCIe GPU is near."""
        return _supported("numa_node", self._gpu("numa_node", handle).nvml_numa_node)

    def compute_mode(self, handle: Handle) -> int:
        return self._node.compute_modes.get(self._reach("compute_mode", handle))

    def set_compute_mode(self, handle: Handle, mode: int) -> None:
        """INVALID_ARGUMENT for a mode that NVML does not know."""
        index = self._reach("set_compute_mode", handle)
        if mode not in _COMPUTE_MODES:
            raise _refused("set_compute_mode", Return.INVALID_ARGUMENT)
        self._node.compute_modes.set(index, mode)

    def temperature(self, handle: Handle) -> int:
        """°C now."""
        return self._node.temperature(self._reach("temperature", handle))

    def temperature_threshold(self, handle: Handle, kind: Threshold) -> int:
        """The profile's, °C; INVALID_ARGUMENT for a kind that NVML does not have."""
        thresholds = self._gpu("temperature_threshold", handle).thresholds
        if kind not in _THRESHOLDS:
            raise _refused("temperature_threshold", Return.INVALID_ARGUMENT)
        limit: int | None = getattr(thresholds, _THRESHOLDS[kind])
        return _supported("temperature_threshold", limit)

    def total_energy(self, handle: Handle) -> int:
        """Energy in mJ, growing with time; from 0 again after heal."""
        return self._node.energy(self._reach("total_energy", handle))

    def supported_event_types(self, handle: Handle) -> int:
        """The profile's mask."""
        return _supported("supported_event_types", self._gpu("supported_event_types", handle).event_types)

    def field_values(self, handle: Handle, fields: tuple[int, ...]) -> tuple[int | None, ...]:
        """The profile's; None for a field it does not list."""
        known = self._gpu("field_values", handle).fields
        return tuple(known.get(number) for number in fields)

    def nvlink_remote_bus_id(self, handle: Handle, link: int) -> str | None:
        """A GPU's bus id or, with NVSwitch, a switch's; None for a link that leads nowhere."""
        links = self._profile.remotes[self._reach("nvlink_remote_bus_id", handle)]
        if not links:
            raise _refused("nvlink_remote_bus_id", Return.NOT_SUPPORTED)
        if not 0 <= link < len(links):
            raise _refused("nvlink_remote_bus_id", Return.INVALID_ARGUMENT)
        return links[link]

    def common_ancestor(self, one: Handle, other: Handle) -> int:
        """The profile's; both GPUs must answer."""
        low = self._reach("common_ancestor", one)
        high = self._index("common_ancestor", other)
        self._check_answers("common_ancestor", high)
        return self._profile.ancestor(low, high)

    def event_set(self) -> EventSet:
        """An event set without a GPU in it."""
        self._begin("event_set")
        return self._node.open_listener()

    def free_event_set(self, events: EventSet) -> None:
        """INVALID_ARGUMENT for one that is freed already; a `wait` for it ends the same way."""
        self._begin("free_event_set")
        if not self._node.close_listener(events):
            raise _refused("free_event_set", Return.INVALID_ARGUMENT)

    def register_events(self, handle: Handle, mask: int, events: EventSet) -> None:
        """Adds to what is registered. Bits that NVML has not: INVALID_ARGUMENT; that the part has not: NOT_SUPPORTED."""
        index = self._reach("register_events", handle)
        supported = _supported("register_events", self._profile.gpus[index].event_types)
        if mask & ~_ALL_EVENT_TYPES:
            raise _refused("register_events", Return.INVALID_ARGUMENT)
        if mask & ~supported:
            raise _refused("register_events", Return.NOT_SUPPORTED)
        if not self._node.listen(index, mask, events):
            raise _refused("register_events", Return.INVALID_ARGUMENT)

    def wait(self, events: EventSet, timeout_ms: int) -> Event:
        """The oldest event not fetched yet. No GPU's hang or loss shows here: a real driver's need not either."""
        self._begin("wait")
        try:
            event = self._node.next_event(events, timeout_ms / 1000)
        except LookupError:
            raise _refused("wait", Return.INVALID_ARGUMENT if self._opened else Return.UNINITIALIZED) from None
        if not event:
            raise _refused("wait", Return.TIMEOUT)
        gpu, kind, data = event
        return Event(_handle_of(gpu), kind, data)

    def _begin(self, call: str, gpu: int | None = None, *, opened: bool = True) -> None:
        """What every call goes through first."""
        with self._lock:
            self.calls[call] += 1
            ready = self._opened or not opened
        if seconds := self._latency.get(call):
            self._sleep(seconds)
        if not ready:
            raise _refused(call, Return.UNINITIALIZED)
        if (code := self._node.refusal(call, gpu)) is not None:
            raise NvmlError(code, NVML_FUNCTIONS[call])

    def _reach(self, call: str, handle: Handle) -> int:
        """What every call about a GPU goes through first; gives its index. Blocks while the GPU hangs."""
        self._begin(call, self._find(handle))
        index = self._index(call, handle)
        self._check_answers(call, index)
        return index

    def _gpu(self, call: str, handle: Handle) -> GpuProfile:
        return self._profile.gpus[self._reach(call, handle)]

    def _slice(self, call: str, handle: Handle) -> Slice | None:
        """The slice that a handle is about, after what every call goes through; None for a handle that is no slice's."""
        if handle < _FIRST_MIG_HANDLE:
            return None
        gpu, number = _gpu_of_mig(handle), (handle - _FIRST_MIG_HANDLE) % _MIG_GPU_STRIDE
        known = gpu < len(self._profile.gpus)
        self._begin(call, gpu if known else None)
        if known:
            self._check_answers(call, gpu)
            cut = self._node.cut(gpu)
            for each in cut.slices if cut else ():
                if each.number * _MIG_STRIDE == number:
                    return each
        raise _refused(call, Return.INVALID_ARGUMENT)

    def _mig(self, call: str, handle: Handle) -> Slice:
        found = self._slice(call, handle)
        if found is None:
            self._reach(call, handle)
        return _supported(call, found)

    def _handle(self, call: str, index: int) -> Handle:
        self._check_answers(call, index)
        return _handle_of(index)

    def _check_answers(self, call: str, index: int) -> None:
        if self._node.is_lost(index):
            raise _refused(call, Return.GPU_IS_LOST)

    def _find(self, handle: Handle) -> int | None:
        index, rest = divmod(handle - _FIRST_HANDLE, _HANDLE_STRIDE)
        return index if not rest and 0 <= index < len(self._profile.gpus) else None

    def _index(self, call: str, handle: Handle) -> int:
        index = self._find(handle)
        if index is None:
            raise _refused(call, Return.INVALID_ARGUMENT)
        return index


def _handle_of(index: int) -> Handle:
    return Handle(_FIRST_HANDLE + index * _HANDLE_STRIDE)


def _gpu_of_mig(handle: Handle) -> int:
    return (handle - _FIRST_MIG_HANDLE) // _MIG_GPU_STRIDE


def _refused(call: str, code: Return) -> NvmlError:
    return NvmlError(code, NVML_FUNCTIONS[call])


def _supported(call: str, value: _Value | None) -> _Value:
    if value is None:
        raise _refused(call, Return.NOT_SUPPORTED)
    return value
