"""What was seen of one GPU: the only input of the health decisions. Immutable."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fabric:
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


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a GPU. None: the part does not say, or did not this time.

    `fault` is empty where the driver answered; otherwise `lost` (NVML's GPU_IS_LOST), `reset-required` (RESET_REQUIRED),
    `vanished` (the driver or the bus has no such GPU any more), `driver` (the driver is not loaded, or another version than
    its library), `hung` (no answer within the time allowed), `unseen` (the first look of all was no good one) or `error`
    (anything else), with the driver's words in `detail`.

    Temperatures are in °C: `margin` is what is left to the GPU's T.Limit, negative beyond it. `energy` is in mJ since the
    driver was last loaded. `recovery_action` is nvmlDeviceGpuRecoveryAction_t (field 230). `ecc_uncorrected` counts
    uncorrected errors since the driver was last loaded or the GPU reset. `clocks_event_reasons` is a mask of
    nvmlClocksEventReason*. `nvlinks` is whether each NVLink is active, by link number; the nvlink and pcie counters are
    totals of the GPU that only a reset sets back. `binding` changes whenever the driver is bound to the GPU anew.
    """

    temperature: int | None = None
    energy: int | None = None
    fault: str = ""
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
    nvlink_replays: int | None = None
    nvlink_recoveries: int | None = None
    nvlink_failed_recoveries: int | None = None
    fabric: Fabric | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_replays: int | None = None
    pcie_fatal_errors: int | None = None
    binding: int | None = None


@dataclass(frozen=True, slots=True)
class XidEvent:
    """The driver reported an Xid on this GPU: on one GPU instance of it, or one compute instance, where it says so."""

    xid: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True)
class DriverEvent:
    """The driver reported an event of another `kind` than an Xid: one bit of nvmlEventType."""

    kind: int


@dataclass(frozen=True, slots=True)
class ApplicationError:
    """An Xid that the policy lays at an application's door, once it is known which pods held the GPU then.

    `pods` are their names as namespace/name, None where nobody could say.
    """

    xid: int
    pods: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Deaf:
    """Whether the wait for the driver's events keeps failing: `why` it does, empty once it works again."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """What an operator asked for: `cordon`, `uncordon`, `release` or `resume`."""

    verb: str


Observation = Sample | XidEvent | DriverEvent | ApplicationError | Deaf | Order
