"""Observations of one GPU, the only input of the health decisions, and the GPU's own limits and traits. Immutable."""

import re
from enum import StrEnum

import msgspec

from gpu_plugin.devices.node import Gpu, Thresholds
from gpu_plugin.devices.nvml_h import FI_GET_GPU_RECOVERY_ACTION, Architecture


class Fabric(msgspec.Struct, frozen=True):
    """nvmlGpuFabricInfoV_t: how far a GPU has come in joining its NVLink fabric.

    `state` is nvmlGpuFabricState_t: 0 not supported, 1 not started, 2 in progress, 3 completed; `status` an nvmlReturn_t once
    completed; `health_mask` NVML_GPU_FABRIC_HEALTH_MASK_* and `summary` NVML_GPU_FABRIC_HEALTH_SUMMARY_*: 0 not supported,
    1 healthy, 2 unhealthy, 3 limited capacity. Those two are 0 where the driver is too old to tell. `cluster` is the uuid of
    the cluster of NVLink domains, as 32 hexadecimal digits, empty where there is none (all zeros); `clique` is the number of
    the GPUs in it that reach each other.
    """

    state: int = 0
    status: int = 0
    health_mask: int = 0
    summary: int = 0
    cluster: str = ""
    clique: int = 0


class Fault(StrEnum):
    """Why a look brought no readings; empty where it did."""

    NONE = ""
    LOST = "lost"
    """NVML_ERROR_GPU_IS_LOST."""
    RESET_REQUIRED = "reset-required"
    """NVML_ERROR_RESET_REQUIRED."""
    VANISHED = "vanished"
    """The driver or the bus has no such GPU any more."""
    DRIVER = "driver"
    """The driver is not loaded, not open, or of another version than its library."""
    HUNG = "hung"
    """No answer within the time allowed."""
    ERROR = "error"
    """Anything else."""


CORE = frozenset({"temperature", "energy", "memory_used", "utilization"})
"""Fields of a Sample that show whether a GPU works: every look asks for those that the part supports."""


class Sample(msgspec.Struct, frozen=True):
    """One look at a GPU. None: the part does not say, or did not this time.

    `fault` is why there are no readings, with the driver's words in `detail`. `asked` are the names of the fields that this look
    asked for, None for all: a signal is shown only what was asked, while what is at fault is shown to all.

    Temperatures are in °C: `margin` is what is left to the GPU's T.Limit, negative beyond it. `energy` is in mJ since the
    driver was last loaded. `recovery_action` is nvmlDeviceGpuRecoveryAction_t (field 230). `ecc_uncorrected` counts
    uncorrected errors since the driver was last loaded or the GPU reset. `clocks_event_reasons` is a mask of
    nvmlClocksEventReason*. `nvlinks` is whether each NVLink is active, by link number; the nvlink and pcie counters are
    totals of the GPU that only a reset sets back. `binding` changes whenever the driver is bound to the GPU again.

    Those after `counting` are shown and judged by no signal: `power` and `power_limit` are in mW, `utilization` in percent,
    `memory_used` in bytes; `ecc_corrected` counts as `ecc_uncorrected` does, remapped rows those of the part's life;
    `vgpu_licensed` is whether a vGPU has its license, None of other GPUs.

    `counting` tells which counters can be compared: those of two samples with the same number. It is 0 while the driver keeps
    the GPU initialised with nobody using it (persistence mode), and another number for each time that the driver was opened
    otherwise: the last process to close the driver then sets the counters back, which is no reset. None: not known.
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
    opening: int | None = None
    """The opening of the driver that the look used, another number each time; None: not known."""
    refused: frozenset[str] = frozenset()
    """Core readings that the driver refused in this look for a reason other than lack of support."""
    unknown: frozenset[str] = frozenset()
    """Fields whose value cannot be true in this look, and the recovery action if the driver refused it for the moment."""

    @property
    def core_implausible(self) -> bool:
        """True if the driver reported a temperature or an energy that cannot be true, and neither that can."""
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
        """Whether this look asked for that field."""
        return self.asked is None or field in self.asked


class XidEvent(msgspec.Struct, frozen=True):
    """The driver reported an Xid on this GPU: on one GPU instance of it, or one compute instance, where it says so."""

    xid: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


class DriverEvent(msgspec.Struct, frozen=True):
    """The driver reported an event of another `kind` than an Xid: one bit of nvmlEventType."""

    kind: int


class ApplicationError(msgspec.Struct, frozen=True):
    """An Xid that the policy lays at an application's door, once it is known which pods held the GPU then.

    `pods` are their names as namespace/name, None where nobody could say.
    """

    xid: int
    pods: frozenset[str] | None = None


class EventDelivery(msgspec.Struct, frozen=True):
    """Whether the driver's events about this GPU reach us: `trouble` is why they do not, empty where they do."""

    trouble: str = ""


class Order(msgspec.Struct, frozen=True):
    """An operator's order: `cordon`, `uncordon`, `release` or `resume`; of a cordon also why, where that was said.

    `annotate` and `unannotate` are a cordon by the Node's annotation, and its end.
    """

    verb: str
    reason: str = ""


Observation = Sample | XidEvent | DriverEvent | ApplicationError | EventDelivery | Order


_CONTAINING = re.compile(r"\b(A30X?|A100X?|A800|B[123]00|GB[123]00)\b")
"""Models of Ampere and Blackwell with high-bandwidth memory, as NVML names them.

NVIDIA's GPU memory error management (supported GPUs) lists error containment for GA100 and GH100, and not for the other
Ampere and the Ada parts, although they remap rows too. It names Blackwell as a whole; its parts without such memory are
taken not to.
"""


class Facts(msgspec.Struct, frozen=True):
    """One GPU's own limits and traits. None or False: the part does not say, and the signal that needs it is silent.

    `thresholds` are in °C; `margins` are the T.Limit counterparts (fields 193 to 196), °C relative to T.Limit, negative
    beyond it. `contains_errors` is whether an uncorrected memory error costs only the process that met it; `nvswitch`
    whether its NVLinks lead to switches; `says_action` whether the driver tells its recovery action (field 230);
    `mig` whether it is in MIG mode, `model` its product name. `driver_branch` is the driver's: 580 for version 580.159.04.
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
    """The facts of a GPU as it was probed, under a driver of this version; empty: unknown."""
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
