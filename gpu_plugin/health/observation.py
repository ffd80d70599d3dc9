"""Observations of one GPU, the only input of the health decisions, and the GPU's own limits and traits. Immutable."""

import re
from enum import StrEnum

import msgspec

from gpu_plugin.devices.node import Gpu, Thresholds
from gpu_plugin.devices.nvml_h import FI_GET_GPU_RECOVERY_ACTION, Architecture


class Fabric(msgspec.Struct, frozen=True):
    """nvmlGpuFabricInfoV_t: the progress of a GPU in joining its NVLink fabric.

    `state` is nvmlGpuFabricState_t: 0 not supported, 1 not started, 2 in progress, 3 completed. `status` is an nvmlReturn_t,
    valid once completed. `health_mask` is NVML_GPU_FABRIC_HEALTH_MASK_*, `summary` is NVML_GPU_FABRIC_HEALTH_SUMMARY_*: 0 not
    supported, 1 healthy, 2 unhealthy, 3 limited capacity. Both are 0 if the driver is too old to report them. `cluster` is the
    uuid of the cluster of NVLink domains, as 32 hexadecimal digits, empty if the driver reports only zeros. `clique` is the
    number of the group of GPUs in it that reach each other.
    """

    state: int = 0
    status: int = 0
    health_mask: int = 0
    summary: int = 0
    cluster: str = ""
    clique: int = 0


class Fault(StrEnum):
    """The reason why a look has no readings; empty if it has them."""

    NONE = ""
    LOST = "lost"  # NVML_ERROR_GPU_IS_LOST
    RESET_REQUIRED = "reset-required"  # NVML_ERROR_RESET_REQUIRED
    VANISHED = "vanished"  # The driver or the bus no longer lists the GPU
    DRIVER = "driver"  # The driver is not loaded, not open, or of another version than its library
    HUNG = "hung"  # No answer within the time allowed
    ERROR = "error"  # Any other error


# Fields of a Sample that show if a GPU works. Every look requests the ones supported by the part.
CORE = frozenset({"temperature", "energy", "memory_used", "utilization"})


class Sample(msgspec.Struct, frozen=True):
    """One look at a GPU. A reading is None if the part does not report it, or did not in this look.

    `fault` is the reason why there are no readings, with the driver's words in `detail`. `asked` has the names of the fields
    that this look requested, None for all. A signal gets only looks that requested its fields, but every signal gets a look
    with a fault.

    Temperatures are in °C. `margin` is the distance to the GPU's T.Limit, negative beyond it. `energy` is in mJ since the
    driver was last loaded. `recovery_action` is nvmlDeviceGpuRecoveryAction_t (field 230). `ecc_uncorrected` counts
    uncorrected errors since the driver was last loaded or the GPU reset. `clocks_event_reasons` is a mask of
    nvmlClocksEventReason*. `nvlinks` is True for each active NVLink, by link number. The nvlink and pcie counters are totals
    of the GPU that only a reset sets back. `binding` changes whenever the driver is bound to the GPU again.

    No signal judges the fields after `counting` that are displayed: `power` and `power_limit` are in mW, `utilization` in
    percent, `memory_used` in bytes. `ecc_corrected` counts since the same time as `ecc_uncorrected`, remapped rows count over
    the part's life. `vgpu_licensed` is whether a vGPU has its license, None for other GPUs.

    The counters of two samples are comparable if `counting` is the same number. It is 0 while the driver keeps the GPU
    initialised without a user (persistence mode). Otherwise it is another number for each opening of the driver, because the
    last process that closes the driver sets the counters back, which is no reset. None: not known.
    """

    temperature: int | None = None
    energy: int | None = None
    fault: Fault = Fault.NONE
    detail: str = ""
    memory_temperature: int | None = None
    margin: int | None = None
    recovery_action: int | None = None
    ecc_uncorrected: int | None = None
    sram_threshold: bool | None = None
    remap_pending: bool | None = None
    remap_failure: bool | None = None
    retired_pending: bool | None = None
    retired_pages: int | None = None
    unrepairable_memory: bool | None = None
    clocks_event_reasons: int | None = None
    nvlinks: tuple[bool, ...] | None = None
    nvlink_crc_errors: int | None = None
    nvlink_failed_recoveries: int | None = None
    fabric: Fabric | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_replays: int | None = None
    pcie_fatal_errors: int | None = None
    pcie_generation: int | None = None
    pcie_max_generation: int | None = None
    binding: int | None = None
    counting: int | None = None
    power: int | None = None
    power_limit: int | None = None
    utilization: int | None = None
    memory_used: int | None = None
    ecc_corrected: int | None = None
    remapped_correctable: int | None = None
    remapped_uncorrectable: int | None = None
    vgpu_licensed: bool | None = None
    asked: frozenset[str] | None = None
    # The opening of the driver that the look used, another number each time; None: not known.
    opening: int | None = None
    # Core readings that the driver refused in this look for a reason other than lack of support.
    refused: frozenset[str] = frozenset()
    # Fields whose value cannot be true in this look, and the recovery action if the driver refused it for the moment.
    unknown: frozenset[str] = frozenset()

    @property
    def core_implausible(self) -> bool:
        """True if the driver reported a temperature or an energy that cannot be true, and no valid value of either."""
        return (
            self.temperature is None and self.energy is None and not self.unknown.isdisjoint(("temperature", "energy"))
        )

    @property
    def core_answered(self) -> bool:
        """True if the look has no fault and the driver refused none of the core readings that the part supports."""
        return not self.fault and not self.refused

    @property
    def failed(self) -> bool:
        """True if the look has a fault, or read neither temperature nor energy because the driver refused them."""
        unread = self.temperature is None and self.energy is None
        return bool(self.fault) or (unread and not self.refused.isdisjoint(("temperature", "energy")))

    def asked_for(self, field: str) -> bool:
        """Return True if this look requested the field."""
        return self.asked is None or field in self.asked


class XidEvent(msgspec.Struct, frozen=True):
    """The driver reported an Xid on this GPU, or on a GPU instance or compute instance of it if it names one."""

    xid: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


class DriverEvent(msgspec.Struct, frozen=True):
    """The driver reported an event of another `kind` than an Xid: one bit of nvmlEventType."""

    kind: int


class ApplicationError(msgspec.Struct, frozen=True):
    """An Xid that the policy attributes to an application, with the pods that held the GPU when it came.

    `pods` are their names as namespace/name, None if they could not be determined.
    """

    xid: int
    pods: frozenset[str] | None = None


class EventDelivery(msgspec.Struct, frozen=True):
    """The state of the driver's events about this GPU: `trouble` is the reason why none arrive, empty if they arrive."""

    trouble: str = ""


class Order(msgspec.Struct, frozen=True):
    """An operator's order: `cordon`, `uncordon`, `release` or `resume`. A cordon may have a reason.

    `annotate` and `unannotate` start and end a cordon by the Node's annotation.
    """

    verb: str
    reason: str = ""


Observation = Sample | XidEvent | DriverEvent | ApplicationError | EventDelivery | Order


# Models of Ampere and Blackwell with high-bandwidth memory, as NVML names them.
# NVIDIA's GPU memory error management (supported GPUs) lists error containment for GA100 and GH100, and not for the
# other Ampere and the Ada parts, although they remap rows too. It names Blackwell as a whole. This pattern leaves out
# Blackwell parts without such memory.
_CONTAINING = re.compile(r"\b(A30X?|A100X?|A800|B[123]00|GB[123]00)\b")


class Facts(msgspec.Struct, frozen=True):
    """One GPU's own limits and traits. None or False: the part does not report it, and the signal that needs it is silent.

    `thresholds` are in °C. `margins` are the T.Limit counterparts (fields 193 to 196), °C relative to T.Limit, negative
    beyond it. `contains_errors` is whether an uncorrected memory error affects only the process that met it, `nvswitch`
    whether the NVLinks lead to switches, `says_action` whether the driver reports the recovery action (field 230), and `mig`
    whether the GPU is in MIG mode. `model` is its product name. `driver_branch` is 580 for driver version 580.159.04.
    """

    thresholds: Thresholds = Thresholds()
    margins: Thresholds = Thresholds()
    contains_errors: bool = False
    nvswitch: bool = False
    says_action: bool = False
    mig: bool = False
    model: str = ""
    driver_branch: int | None = None


def facts(gpu: Gpu, driver_version: str = "") -> Facts:
    """Return the facts of a probed GPU under a driver of this version; an empty version is unknown."""
    branch = driver_version.partition(".")[0]
    return Facts(
        gpu.thresholds,
        gpu.margins,
        gpu.architecture == Architecture.HOPPER or _CONTAINING.search(gpu.model) is not None,
        gpu.nvswitch,
        FI_GET_GPU_RECOVERY_ACTION in gpu.fields,
        gpu.mig_enabled,
        gpu.model or "",
        int(branch) if branch.isascii() and branch.isdigit() else None,
    )
