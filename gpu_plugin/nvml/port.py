"""The interface to a GPU driver, with NVML's names. The pynvml driver and the simulated driver implement it.

Calls are synchronous and may be made from any thread, as with NVML. A call may block for minutes if a GPU is faulty. Values
are plain Python values without ctypes. Each refused call raises NvmlError.

Numbers have NVML's meaning; `devices.nvml_h` names the numbers that the code distinguishes.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, NewType, ParamSpec, TypeVar

import msgspec

from gpu_plugin.devices.node import Engines
from gpu_plugin.devices.nvml_h import ALL_INSTANCES, UNSUPPORTED, Return, Threshold
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml.plausible import flag

# A device handle: the value of NVML's opaque pointer, comparable between calls and with an event's device
Handle = NewType("Handle", int)

EventSet = NewType("EventSet", int)

P = ParamSpec("P")
T = TypeVar("T")


class NvmlError(Exception):
    """A driver call failed. `code` is an nvmlReturn_t, which `Return` may not list; `call` is the name of the NVML function."""

    def __init__(self, code: int, call: str, text: str = "") -> None:
        self.code = code
        self.call = call
        self.text = text or _name(code)
        super().__init__(f"{call}: {self.text} ({code})")

    @property
    def unsupported(self) -> bool:
        """True if this GPU model or driver version does not support the call and never will."""
        return self.code in UNSUPPORTED


def is_permanent(refusal: NvmlError) -> bool:
    """Return whether the GPU model or the driver never answers this field. Old drivers refuse new ids as INVALID_ARGUMENT."""
    return refusal.unsupported or refusal.code == Return.INVALID_ARGUMENT


def _name(code: int) -> str:
    try:
        return Return(code).name.replace("_", " ").lower()
    except ValueError:
        return "unnamed error"


class Event(msgspec.Struct, frozen=True):
    """nvmlEventData_t. `data` is the Xid of an XID_CRITICAL event. ALL_INSTANCES means that the event is of the whole GPU."""

    handle: Handle
    kind: int
    data: int
    gpu_instance: int = ALL_INSTANCES
    compute_instance: int = ALL_INSTANCES


class Field(NamedTuple):
    """A field for nvmlDeviceGetFieldValues: an `FI_*` of `devices.nvml_h`, and the scopeId if nvml.h requires it."""

    number: int
    scope: int = 0


class MigAttributes(msgspec.Struct, frozen=True):
    """nvmlDeviceAttributes_t of a MIG device: numbers of slices, memorySizeMB (in MiB), and the number of engines by kind."""

    gpu_instance_slices: int
    compute_instance_slices: int
    memory_mb: int
    engines: Engines | None = None


class RemappedRows(NamedTuple):
    """nvmlDeviceGetRemappedRows: numbers of remapped rows by kind of error, and flags.

    `pending` means that a remapping takes effect at the next reset, `failure` that a remapping failed; None means unknown.
    """

    correctable: int = 0
    uncorrectable: int = 0
    pending: bool | None = False
    failure: bool | None = False


class PcieLink(NamedTuple):
    """Current and maximum number of lanes of the PCIe link (nvmlDeviceGetCurrPcieLinkWidth, ...MaxPcieLinkWidth)."""

    width: int
    max_width: int


_FUNCTIONS: dict[Callable[..., object], str] = {}  # The NVML function of each declared call, which error messages name


def answered_by(function: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Declare a call with its NVML function. A driver that does not override the call raises NOT_SUPPORTED."""

    def declared(call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def unanswered(*arguments: P.args, **_named: P.kwargs) -> T:
            raise NvmlError(Return.NOT_SUPPORTED, function, getattr(arguments[0], "why_unanswered", ""))

        _FUNCTIONS[unanswered] = function
        return unanswered

    return declared


def getter(function: str, kind: Callable[[Any], T]) -> Callable[["Driver", Handle], T]:
    """Declare a call about a handle that returns the result of one NVML function, converted by `kind`."""

    def answer(self: "Driver", handle: Handle) -> T:
        return kind(self.ask(function, handle))

    _FUNCTIONS[answer] = function
    return answer


def _pair(pair: Sequence[int]) -> tuple[int, int]:
    return int(pair[0]), int(pair[1])


class Driver:
    """The driver's calls. All raise NvmlError, with NOT_SUPPORTED if the subclass does not implement the call."""

    # Text for NOT_SUPPORTED errors that says why calls are not implemented; empty if there is nothing to add.
    why_unanswered = ""

    def ask(self, function: str, handle: Handle, *arguments: Any) -> Any:
        """Call the NVML function of this name for a GPU or MIG device, with these arguments, and return its result."""
        del handle, arguments
        raise NvmlError(Return.NOT_SUPPORTED, function, self.why_unanswered)

    @answered_by("nvmlInit_v2")
    def open(self) -> None:
        """nvmlInit_v2. The text of LIBRARY_NOT_FOUND lists each path that was tried."""

    @answered_by("nvmlShutdown")
    def close(self) -> None:
        """nvmlShutdown."""

    @answered_by("nvmlSystemGetDriverVersion")
    def driver_version(self) -> str:
        """nvmlSystemGetDriverVersion, such as 580.159.04."""

    @answered_by("nvmlSystemGetCudaDriverVersion_v2")
    def cuda_version(self) -> tuple[int, int]:
        """nvmlSystemGetCudaDriverVersion_v2: the newest CUDA version that the driver supports, such as (13, 0)."""

    @answered_by("nvmlDeviceGetCount_v2")
    def device_count(self) -> int:
        """nvmlDeviceGetCount_v2."""

    @answered_by("nvmlDeviceGetHandleByIndex_v2")
    def handle_by_index(self, index: int) -> Handle:
        """nvmlDeviceGetHandleByIndex_v2."""

    @answered_by("nvmlDeviceGetHandleByUUID")
    def handle_by_uuid(self, uuid: str) -> Handle:
        """nvmlDeviceGetHandleByUUID."""

    @answered_by("nvmlDeviceGetHandleByPciBusId_v2")
    def handle_by_pci_bus_id(self, bus_id: str) -> Handle:
        """nvmlDeviceGetHandleByPciBusId_v2: the only call for a handle that does not wake other (released) GPUs (nvml.h)."""

    # About one GPU, or one MIG device
    uuid = getter("nvmlDeviceGetUUID", str)  # GPU-92e1c9b6-dd9b-778f-6e34-6f0d728ad189; of a MIG device MIG-<uuid>
    minor_number = getter("nvmlDeviceGetMinorNumber", int)  # N of /dev/nvidiaN
    name = getter("nvmlDeviceGetName", str)  # NVIDIA H200; of a MIG device NVIDIA H200 MIG 1g.18gb
    architecture = getter(
        "nvmlDeviceGetArchitecture", int
    )  # 5 Volta, 6 Turing, 7 Ampere, 8 Ada, 9 Hopper, 10 Blackwell
    compute_capability = getter("nvmlDeviceGetCudaComputeCapability", _pair)  # major and minor number, such as (9, 0)
    power_usage = getter("nvmlDeviceGetPowerUsage", int)  # mW
    power_limit = getter("nvmlDeviceGetEnforcedPowerLimit", int)  # mW: the lowest of all limits in force
    mig_mode = getter("nvmlDeviceGetMigMode", _pair)  # (current, pending), 1 is enabled
    max_mig_devices = getter(
        "nvmlDeviceGetMaxMigDeviceCount", int
    )  # the number of MIG indices; 0 while MIG mode is off
    gpu_instance_id = getter("nvmlDeviceGetGpuInstanceId", int)  # of a MIG device
    compute_instance_id = getter(
        "nvmlDeviceGetComputeInstanceId", int
    )  # of a MIG device, counted within its GPU instance
    compute_mode = getter("nvmlDeviceGetComputeMode", int)  # a ComputeMode
    persistence_mode = getter(
        "nvmlDeviceGetPersistenceMode", flag
    )  # whether the GPU stays initialised while no process has it open
    margin_temperature = getter(
        "nvmlDeviceGetMarginTemperature", int
    )  # °C left to the GPU's T.Limit, negative beyond it
    retired_pages_pending = getter(
        "nvmlDeviceGetRetiredPagesPendingStatus", flag
    )  # NOT_SUPPORTED on parts that remap rows
    pcie_generation = getter("nvmlDeviceGetCurrPcieLinkGeneration", int)  # of the link now; an idle GPU lowers it
    pcie_max_generation = getter("nvmlDeviceGetMaxPcieLinkGeneration", int)  # supported by GPU and slot
    pcie_replays = getter("nvmlDeviceGetPcieReplayCounter", int)  # since the driver was loaded or the GPU reset
    # mJ since the driver was loaded last. A lower value proves that the driver was loaded again.
    total_energy = getter("nvmlDeviceGetTotalEnergyConsumption", int)
    supported_event_types = getter("nvmlDeviceGetSupportedEventTypes", int)  # a mask of EventType bits and other bits

    @answered_by("nvmlDeviceGetPciInfo_v3")
    def pci_bus_id(self, handle: Handle, /) -> str:
        """nvmlDeviceGetPciInfo_v3's busId, such as 00000000:00:06.0."""

    @answered_by("nvmlDeviceGetMemoryInfo")
    def memory_total(self, handle: Handle, /) -> int:
        """The `total` of nvmlDeviceGetMemoryInfo, in bytes. Some GPU models do not report it (NOT_SUPPORTED)."""

    @answered_by("nvmlDeviceGetMemoryInfo")
    def memory_used(self, handle: Handle, /) -> int:
        """The `used` of nvmlDeviceGetMemoryInfo_v2, in bytes; the older version also counts memory that the driver reserves."""

    @answered_by("nvmlDeviceGetUtilizationRates")
    def utilization(self, handle: Handle, /) -> int:
        """nvmlDeviceGetUtilizationRates's gpu: percent of the last sample period in which a kernel ran.

        NOT_SUPPORTED in MIG mode.
        """

    @answered_by("nvmlDeviceGetGridLicensableFeatures_v4")
    def vgpu_licensed(self, handle: Handle, /) -> bool:
        """Return whether a virtual machine's vGPU has a license. NOT_SUPPORTED for a GPU that is not a vGPU."""

    @answered_by("nvmlDeviceGetMigDeviceHandleByIndex")
    def mig_handle(self, handle: Handle, index: int) -> Handle:
        """nvmlDeviceGetMigDeviceHandleByIndex. NOT_FOUND: no MIG device has that index now.

        The handle is valid only while the MIG device exists. After that it may refer to another MIG device.
        """

    @answered_by("nvmlDeviceGetAttributes_v2")
    def mig_attributes(self, handle: Handle, /) -> MigAttributes:
        """nvmlDeviceGetAttributes_v2 of a MIG device."""

    @answered_by("nvmlDeviceSetComputeMode")
    def set_compute_mode(self, handle: Handle, mode: int) -> None:
        """nvmlDeviceSetComputeMode, until the driver is unloaded. NO_PERMISSION for users other than root."""

    @answered_by("nvmlDeviceGetTemperature")
    def temperature(self, handle: Handle, /) -> int:
        """nvmlDeviceGetTemperature of the GPU sensor, °C."""

    @answered_by("nvmlDeviceGetTemperatureThreshold")
    def temperature_threshold(self, handle: Handle, kind: Threshold) -> int:
        """nvmlDeviceGetTemperatureThreshold, °C."""

    @answered_by("nvmlDeviceGetTotalEccErrors")
    def uncorrected_ecc_errors(self, handle: Handle, /) -> int:
        """nvmlDeviceGetTotalEccErrors, uncorrected and volatile: since the driver was loaded or the GPU reset."""

    @answered_by("nvmlDeviceGetSramEccErrorStatus")
    def sram_threshold_exceeded(self, handle: Handle, /) -> bool | None:
        """bThresholdExceeded of nvmlDeviceGetSramEccErrorStatus: the part must be replaced due to its number of SRAM errors."""

    @answered_by("nvmlDeviceGetRemappedRows")
    def remapped_rows(self, handle: Handle, /) -> RemappedRows:
        """nvmlDeviceGetRemappedRows. NOT_SUPPORTED before Ampere, and on a GPU that is partitioned into MIG instances."""

    @answered_by("nvmlDeviceGetUnrepairableMemoryFlag_v1")
    def unrepairable_memory(self, handle: Handle, /) -> bool | None:
        """nvmlDeviceGetUnrepairableMemoryFlag_v1: memory that cannot be repaired."""

    @answered_by("nvmlDeviceGetCurrentClocksEventReasons")
    def clocks_event_reasons(self, handle: Handle, /) -> int:
        """nvmlDeviceGetCurrentClocksEventReasons: a mask of the reasons why clocks are reduced. Bit 0 means that it is idle."""

    @answered_by("nvmlDeviceGetNvLinkState")
    def nvlink_states(self, handle: Handle, /) -> tuple[bool, ...]:
        """nvmlDeviceGetNvLinkState of each link: whether it is active. NOT_SUPPORTED: the GPU has no NVLink."""

    @answered_by("nvmlDeviceGetNvLinkRemoteDeviceType")
    def nvlink_to_switch(self, handle: Handle, link: int) -> bool:
        """nvmlDeviceGetNvLinkRemoteDeviceType: whether an active link leads to an NVSwitch (2), not to a GPU (0)."""

    @answered_by("nvmlDeviceGetGpuFabricInfoV")
    def fabric(self, handle: Handle, /) -> Fabric:
        """nvmlDeviceGetGpuFabricInfo_v4, else nvmlDeviceGetGpuFabricInfoV with the newest version that the driver supports."""

    @answered_by("nvmlDeviceGetCurrPcieLinkWidth")
    def pcie_link(self, handle: Handle, /) -> PcieLink:
        """nvmlDeviceGetCurrPcieLinkWidth and nvmlDeviceGetMaxPcieLinkWidth."""

    @answered_by("nvmlDeviceGetFieldValues")
    def field_values(self, handle: Handle, fields: tuple[Field, ...]) -> tuple[int | NvmlError, ...]:
        """nvmlDeviceGetFieldValues: for each field, in order, its value as an integer or its error, which is not raised."""

    @answered_by("nvmlDeviceGetNvLinkRemotePciInfo_v2")
    def nvlink_remote_bus_id(self, handle: Handle, link: int) -> str | None:
        """The PCI bus id at the far end of an active link (nvmlDeviceGetNvLinkState, ...GetNvLinkRemotePciInfo_v2).

        None if the link is down; empty if the link is active and the driver does not report its far end.
        NOT_SUPPORTED: the GPU has no NVLink. INVALID_ARGUMENT: the GPU has no link of this number.
        """

    @answered_by("nvmlDeviceGetMemoryAffinity")
    def memory_affinity(self, handle: Handle, /) -> frozenset[int]:
        """nvmlDeviceGetMemoryAffinity with node scope: the NUMA nodes whose memory is nearest to the GPU."""

    @answered_by("nvmlDeviceGetTopologyCommonAncestor")
    def common_ancestor(self, one: Handle, other: Handle) -> int:
        """nvmlDeviceGetTopologyCommonAncestor: a TopologyLevel."""

    @answered_by("nvmlEventSetCreate")
    def event_set(self) -> EventSet:
        """nvmlEventSetCreate."""

    @answered_by("nvmlEventSetFree")
    def free_event_set(self, events: EventSet) -> None:
        """nvmlEventSetFree."""

    @answered_by("nvmlDeviceRegisterEvents")
    def register_events(self, handle: Handle, mask: int, events: EventSet) -> None:
        """nvmlDeviceRegisterEvents. NOT_SUPPORTED on GPU models that are too old for events."""

    @answered_by("nvmlEventSetWait_v2")
    def wait(self, events: EventSet, timeout_ms: int) -> Event:
        """nvmlEventSetWait_v2. Raises TIMEOUT if no event arrives within `timeout_ms` milliseconds."""


# The NVML function of each call of the interface, in the order of `Driver`. Error messages name the function.
NVML_FUNCTIONS = {
    name: _FUNCTIONS[call] for name, call in vars(Driver).items() if callable(call) and call in _FUNCTIONS
}
