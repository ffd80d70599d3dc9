"""What this plugin asks of a GPU driver, as NVML names it: the port under which pynvml and the simulated driver sit.

Calls are synchronous, may block for as long as the driver likes (a sick GPU can hold one for minutes), and are safe from
any thread, as NVML's are. Values are plain: no ctypes leaves the adapter. Every refusal is an `NvmlError`.

Numbers are NVML's own; `devices.nvml_h` has those that are told apart.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, NewType, ParamSpec, TypeVar

import msgspec

from gpu_plugin.devices.node import Engines
from gpu_plugin.devices.nvml_h import ALL_INSTANCES, UNSUPPORTED, Return, Threshold
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml.plausible import flag

Handle = NewType("Handle", int)
"""A device handle: the value of NVML's opaque pointer, comparable between calls and with an event's device."""

EventSet = NewType("EventSet", int)

P = ParamSpec("P")
T = TypeVar("T")


class NvmlError(Exception):
    """A driver call refused. `code` is nvmlReturn_t (an int outside `Return` is possible), `call` NVML's function name."""

    def __init__(self, code: int, call: str, text: str = "") -> None:
        self.code = code
        self.call = call
        self.text = text or _name(code)
        super().__init__(f"{call}: {self.text} ({code})")

    @property
    def unsupported(self) -> bool:
        """Whether the part or the driver will never answer this call."""
        return self.code in UNSUPPORTED


def never(refusal: NvmlError) -> bool:
    """Whether a field so refused is one that the part or the driver will never answer: older drivers know no such id."""
    return refusal.unsupported or refusal.code == Return.INVALID_ARGUMENT


def _name(code: int) -> str:
    try:
        return Return(code).name.replace("_", " ").lower()
    except ValueError:
        return "unnamed error"


class Event(msgspec.Struct, frozen=True):
    """nvmlEventData_t. `data` is the Xid for XID_CRITICAL; instances are ALL_INSTANCES when the whole GPU is meant."""

    handle: Handle
    kind: int
    data: int
    gpu_instance: int = ALL_INSTANCES
    compute_instance: int = ALL_INSTANCES


class Field(NamedTuple):
    """What to ask nvmlDeviceGetFieldValues for: an `FI_*` of `devices.nvml_h` and, where the header wants one, its scopeId."""

    number: int
    scope: int = 0


class MigAttributes(msgspec.Struct, frozen=True):
    """nvmlDeviceAttributes_t of a MIG device: slices, memorySizeMB, which are MiB, and how many engines it has of each kind."""

    gpu_instance_slices: int
    compute_instance_slices: int
    memory_mb: int
    engines: Engines | None = None


class RemappedRows(NamedTuple):
    """nvmlDeviceGetRemappedRows: how many rows, by what was wrong; whether one waits for a reset, whether one failed.

    A flag that is None is unknown.
    """

    correctable: int = 0
    uncorrectable: int = 0
    pending: bool | None = False
    failure: bool | None = False


class PcieLink(NamedTuple):
    """Lanes that the GPU's PCIe link has now, and could have (nvmlDeviceGetCurrPcieLinkWidth, ...MaxPcieLinkWidth)."""

    width: int
    max_width: int


_FUNCTIONS: dict[Callable[..., object], str] = {}
"""The NVML function behind each call that is declared, which an error of it names."""


def answered_by(function: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Declares a call by the NVML function behind it. Where a driver does not have the call, it is NOT_SUPPORTED."""

    def declared(call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def unanswered(*arguments: P.args, **_named: P.kwargs) -> T:
            raise NvmlError(Return.NOT_SUPPORTED, function, getattr(arguments[0], "why_unanswered", ""))

        _FUNCTIONS[unanswered] = function
        return unanswered

    return declared


def getter(function: str, kind: Callable[[Any], T]) -> Callable[["Driver", Handle], T]:
    """Declares a call about a handle, which the NVML function answers by itself; `kind` makes the plain value of the answer."""

    def answer(self: "Driver", handle: Handle) -> T:
        return kind(self.ask(function, handle))

    _FUNCTIONS[answer] = function
    return answer


def _pair(told: Sequence[int]) -> tuple[int, int]:
    return int(told[0]), int(told[1])


class Driver:
    """The calls. Each raises NvmlError, and NOT_SUPPORTED where a driver has no answer of its own."""

    why_unanswered = ""
    """Why it has none, for people; empty where there is nothing to add to the code."""

    def ask(self, function: str, handle: Handle, *arguments: Any) -> Any:
        """What the NVML function of this name says of a GPU or MIG device, given these arguments."""
        del handle, arguments
        raise NvmlError(Return.NOT_SUPPORTED, function, self.why_unanswered)

    @answered_by("nvmlInit_v2")
    def open(self) -> None:
        """nvmlInit_v2. LIBRARY_NOT_FOUND says every path tried."""

    @answered_by("nvmlShutdown")
    def close(self) -> None:
        """nvmlShutdown."""

    @answered_by("nvmlSystemGetDriverVersion")
    def driver_version(self) -> str:
        """nvmlSystemGetDriverVersion, such as 580.159.04."""

    @answered_by("nvmlSystemGetCudaDriverVersion_v2")
    def cuda_version(self) -> tuple[int, int]:
        """nvmlSystemGetCudaDriverVersion_v2: the newest CUDA that the driver is good for, such as (13, 0)."""

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
        """nvmlDeviceGetHandleByPciBusId_v2: the only way to a GPU that wakes no other (nvml.h), as one released must not be."""

    # About one GPU, or one MIG device
    uuid = getter("nvmlDeviceGetUUID", str)  # GPU-92e1c9b6-dd9b-778f-6e34-6f0d728ad189; of a MIG device MIG-<uuid>
    minor_number = getter("nvmlDeviceGetMinorNumber", int)  # N of /dev/nvidiaN
    name = getter("nvmlDeviceGetName", str)  # NVIDIA H200; of a MIG device NVIDIA H200 MIG 1g.18gb
    architecture = getter(
        "nvmlDeviceGetArchitecture", int
    )  # 5 Volta, 6 Turing, 7 Ampere, 8 Ada, 9 Hopper, 10 Blackwell
    compute_capability = getter("nvmlDeviceGetCudaComputeCapability", _pair)  # major and minor number, such as (9, 0)
    power_usage = getter("nvmlDeviceGetPowerUsage", int)  # mW
    power_limit = getter("nvmlDeviceGetEnforcedPowerLimit", int)  # mW: the lowest of all that hold
    mig_mode = getter("nvmlDeviceGetMigMode", _pair)  # (current, pending), 1 is enabled
    max_mig_devices = getter(
        "nvmlDeviceGetMaxMigDeviceCount", int
    )  # how many MIG indices there are; 0 while MIG mode is off
    gpu_instance_id = getter("nvmlDeviceGetGpuInstanceId", int)  # of a MIG device
    compute_instance_id = getter(
        "nvmlDeviceGetComputeInstanceId", int
    )  # of a MIG device, counted within its GPU instance
    compute_mode = getter("nvmlDeviceGetComputeMode", int)  # a ComputeMode
    persistence_mode = getter(
        "nvmlDeviceGetPersistenceMode", flag
    )  # whether the GPU stays initialised while nobody has it open
    margin_temperature = getter(
        "nvmlDeviceGetMarginTemperature", int
    )  # °C left to the GPU's T.Limit, negative beyond it
    retired_pages_pending = getter(
        "nvmlDeviceGetRetiredPagesPendingStatus", flag
    )  # NOT_SUPPORTED on parts that remap rows
    pcie_generation = getter("nvmlDeviceGetCurrPcieLinkGeneration", int)  # of the link now; an idle GPU lowers it
    pcie_max_generation = getter("nvmlDeviceGetMaxPcieLinkGeneration", int)  # that GPU and slot can both have
    pcie_replays = getter("nvmlDeviceGetPcieReplayCounter", int)  # since the driver was loaded or the GPU reset
    total_energy = getter("nvmlDeviceGetTotalEnergyConsumption", int)
    """mJ since the driver was last loaded; going backwards proves a reload."""
    supported_event_types = getter("nvmlDeviceGetSupportedEventTypes", int)  # a mask of EventType bits and others

    @answered_by("nvmlDeviceGetPciInfo_v3")
    def pci_bus_id(self, handle: Handle, /) -> str:
        """nvmlDeviceGetPciInfo_v3's busId, such as 00000000:00:06.0."""

    @answered_by("nvmlDeviceGetMemoryInfo")
    def memory_total(self, handle: Handle, /) -> int:
        """nvmlDeviceGetMemoryInfo's total, bytes. Some parts have none (NOT_SUPPORTED)."""

    @answered_by("nvmlDeviceGetMemoryInfo")
    def memory_used(self, handle: Handle, /) -> int:
        """nvmlDeviceGetMemoryInfo_v2's used, bytes; of an older driver nvmlDeviceGetMemoryInfo's, with what it reserves."""

    @answered_by("nvmlDeviceGetUtilizationRates")
    def utilization(self, handle: Handle, /) -> int:
        """nvmlDeviceGetUtilizationRates's gpu: percent of the last sample period in which a kernel ran.

        NOT_SUPPORTED in MIG mode.
        """

    @answered_by("nvmlDeviceGetGridLicensableFeatures_v4")
    def vgpu_licensed(self, handle: Handle, /) -> bool:
        """Whether a vGPU of a virtual machine has a license. NOT_SUPPORTED for a GPU that is none."""

    @answered_by("nvmlDeviceGetMigDeviceHandleByIndex")
    def mig_handle(self, handle: Handle, index: int) -> Handle:
        """nvmlDeviceGetMigDeviceHandleByIndex. NOT_FOUND: no MIG device has that index now.

        It is worth something only as long as the MIG device exists, and may come to mean another one after that.
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
        """nvmlDeviceGetSramEccErrorStatus's bThresholdExceeded: so many SRAM errors that the part is to be replaced."""

    @answered_by("nvmlDeviceGetRemappedRows")
    def remapped_rows(self, handle: Handle, /) -> RemappedRows:
        """nvmlDeviceGetRemappedRows. NOT_SUPPORTED before Ampere, and on a GPU that is partitioned into MIG instances."""

    @answered_by("nvmlDeviceGetUnrepairableMemoryFlag_v1")
    def unrepairable_memory(self, handle: Handle, /) -> bool | None:
        """nvmlDeviceGetUnrepairableMemoryFlag_v1: memory that cannot be repaired."""

    @answered_by("nvmlDeviceGetCurrentClocksEventReasons")
    def clocks_event_reasons(self, handle: Handle, /) -> int:
        """nvmlDeviceGetCurrentClocksEventReasons: a mask of why the clocks are lower than they could be, 1 where idle."""

    @answered_by("nvmlDeviceGetNvLinkState")
    def nvlink_states(self, handle: Handle, /) -> tuple[bool, ...]:
        """nvmlDeviceGetNvLinkState of each link there is, whether it is active. NOT_SUPPORTED: no NVLink at all."""

    @answered_by("nvmlDeviceGetNvLinkRemoteDeviceType")
    def nvlink_to_switch(self, handle: Handle, link: int) -> bool:
        """nvmlDeviceGetNvLinkRemoteDeviceType: whether an active link leads to an NVSwitch (2) rather than to a GPU (0)."""

    @answered_by("nvmlDeviceGetGpuFabricInfoV")
    def fabric(self, handle: Handle, /) -> Fabric:
        """nvmlDeviceGetGpuFabricInfo_v4, else nvmlDeviceGetGpuFabricInfoV, in the newest version that the driver knows."""

    @answered_by("nvmlDeviceGetCurrPcieLinkWidth")
    def pcie_link(self, handle: Handle, /) -> PcieLink:
        """nvmlDeviceGetCurrPcieLinkWidth and nvmlDeviceGetMaxPcieLinkWidth."""

    @answered_by("nvmlDeviceGetFieldValues")
    def field_values(self, handle: Handle, fields: tuple[Field, ...]) -> tuple[int | NvmlError, ...]:
        """nvmlDeviceGetFieldValues: one integer a field, in order, or how that field was refused, which is not raised."""

    @answered_by("nvmlDeviceGetNvLinkRemotePciInfo_v2")
    def nvlink_remote_bus_id(self, handle: Handle, link: int) -> str | None:
        """The PCI bus id at the far end of an active link (nvmlDeviceGetNvLinkState, ...GetNvLinkRemotePciInfo_v2).

        None for a link that is there and down; empty where the driver does not tell what is at the far end of one that is up.
        NOT_SUPPORTED: no NVLink at all; INVALID_ARGUMENT: no such link.
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
        """nvmlDeviceRegisterEvents. NOT_SUPPORTED on parts too old for events."""

    @answered_by("nvmlEventSetWait_v2")
    def wait(self, events: EventSet, timeout_ms: int) -> Event:
        """nvmlEventSetWait_v2. Raises TIMEOUT when nothing came within `timeout_ms` milliseconds."""


NVML_FUNCTIONS = {
    name: _FUNCTIONS[call] for name, call in vars(Driver).items() if callable(call) and call in _FUNCTIONS
}
"""The port's calls in the order of `Driver`, and the NVML function that an error of each names."""
