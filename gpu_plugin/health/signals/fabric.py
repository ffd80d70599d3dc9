"""The NVLink fabric that a GPU must join before CUDA works on it, as nvmlDeviceGetGpuFabricInfoV reports it."""

from collections.abc import Mapping

from gpu_plugin.devices.nvml_h import (
    FABRIC_CONDITION_MASK,
    FABRIC_CONFIGURATION_MASK,
    FABRIC_CONFIGURATION_SHIFT,
    FABRIC_FALSE,
    FABRIC_TRUE,
    FabricCondition,
    FabricConfiguration,
    FabricState,
    FabricSummary,
)
from gpu_plugin.health.hysteresis import GRADED, Graded, graded
from gpu_plugin.health.latch import Latch, Verdict
from gpu_plugin.health.observation import Fabric, Sample
from gpu_plugin.health.signal import Case, Context, SignalKind, signal

SILENT = "the GPU reports no NVLink fabric, and others of the node have joined theirs"

_STATES: Mapping[int, str] = {
    FabricState.NOT_STARTED: "has not begun to join its NVLink fabric",
    FabricState.IN_PROGRESS: "is still joining its NVLink fabric",
}

_CONFIGURATIONS: Mapping[int, str] = {
    FabricConfiguration.INCORRECT_SYSGUID: "a wrong system GUID",
    FabricConfiguration.INCORRECT_CHASSIS_SN: "a wrong chassis serial number",
    FabricConfiguration.NO_PARTITION: "no partition",
    FabricConfiguration.INSUFFICIENT_NVLINKS: "too few NVLinks",
    FabricConfiguration.INCOMPATIBLE_GPU_FW: "incompatible GPU firmware",
    FabricConfiguration.INVALID_LOCATION: "an invalid location",
    FabricConfiguration.GPU_STATE_INVALID: "an invalid state of the GPU",
}


MANAGER = "look at the fabric manager (nvidia-fabricmanager, or IMEX and the subnet manager) and at its log"

# A GPU that was passed through alone waits for a fabric that it never joins
GUEST = "in a virtual machine without the GPU's NVSwitches load the nvidia module with NVreg_NvLinkDisable=1"


def advice(case: Case) -> str:
    """Return advice to the operator. A GPU without a link to an NVSwitch may be in a virtual machine without NVSwitches."""
    return MANAGER if case.facts.nvswitch else f"{GUEST}; elsewhere {MANAGER}"


@signal(
    "fabric",
    SignalKind.READING,
    advice,
    memory=GRADED,
    asks=("fabric",),
    clears="three checks in a row find its fabric joined and sound",
)
def fabric(latch: Latch[Graded] | None, seen: Sample, ctx: Context) -> Latch[Graded] | None:
    """Opens on two looks at a fabric that is not ready or not sound; closes on three looks at a ready and sound fabric.

    DEGRADED if the GPU reports no fabric while another GPU of the node, of the same model, has joined one.

    A fabric that is not ready at the first look of all opens the latch at once: until it is ready, CUDA fails with error 802
    (system not yet initialized). A GPU without NVLinks, such as a GPU that was passed through alone, has no fabric to wait for.
    The same holds for a GPU in MIG mode, whose MIG devices do not use NVLink.
    """
    if ctx.facts.mig:
        return None
    found = seen.fabric
    if ctx.peers_joined and found is not None and found.state == FabricState.NOT_SUPPORTED:
        return graded(latch, ctx, GRADED, grade=Verdict.DEGRADED, detail=SILENT, enter=2)
    if not seen.fault and not seen.asked_for("nvlinks"):  # a GPU without NVLinks also reports a fabric state
        return latch
    if found is None or seen.nvlinks is None:
        return graded(latch, ctx, GRADED, grade=None, detail="")
    grade, words = judge(found)
    starting = ctx.first and found.state not in (FabricState.NOT_SUPPORTED, FabricState.COMPLETED)
    return graded(latch, ctx, GRADED, grade=grade, detail=words, enter=1 if starting else 2)


def judge(found: Fabric) -> tuple[Verdict, str]:
    """Return the verdict on a GPU whose fabric is in this condition, and the reason."""
    if found.state == FabricState.NOT_SUPPORTED:
        return Verdict.OK, ""
    if found.state != FabricState.COMPLETED:
        doing = _STATES.get(found.state, f"is in state {found.state} of joining its NVLink fabric")
        return Verdict.FATAL, f"the GPU {doing}, CUDA would fail with error 802"
    if found.status:
        return Verdict.FATAL, f"the GPU could not join its NVLink fabric: NVML error {found.status}"
    if faults := _faults(found):
        return Verdict.FATAL, f"the GPU's NVLink fabric is not sound: {', '.join(faults)}"
    if limits := _limits(found):
        return Verdict.DEGRADED, f"the GPU's NVLink fabric is limited: {', '.join(limits)}"
    return Verdict.OK, ""


def _faults(found: Fabric) -> list[str]:
    wrong = found.health_mask >> FABRIC_CONFIGURATION_SHIFT & FABRIC_CONFIGURATION_MASK
    faults = []
    if _has(found, FabricCondition.ROUTE_UNHEALTHY):
        faults.append("its route is unhealthy")
    if _has(found, FabricCondition.ACCESS_TIMEOUT_RECOVERY):
        faults.append("it is recovering from access timeouts")
    if wrong > FabricConfiguration.NONE:
        faults.append(f"its configuration has {_CONFIGURATIONS.get(wrong, f'error {wrong}')}")
    if found.summary == FabricSummary.UNHEALTHY and not faults:
        faults.append(_recovering(found) or "the driver calls it unhealthy")
    return faults


def _limits(found: Fabric) -> list[str]:
    limits = []
    if _has(found, FabricCondition.DEGRADED_BW):
        limits.append("its bandwidth is degraded")
    if _has(found, FabricCondition.PARTITION_ASSIGNED, FABRIC_FALSE) and found.summary != FabricSummary.HEALTHY:
        limits.append("no partition is assigned")
    if found.summary == FabricSummary.LIMITED_CAPACITY and not limits:
        limits.append(_recovering(found) or "the driver speaks of limited capacity")
    return limits


def _recovering(found: Fabric) -> str:
    """Return the reason of the driver's summary if no other condition explains it. A recovery of routes alone is no fault."""
    return "its route is being recovered" if _has(found, FabricCondition.ROUTE_RECOVERY) else ""


def _has(found: Fabric, condition: FabricCondition, value: int = FABRIC_TRUE) -> bool:
    return found.health_mask >> condition & FABRIC_CONDITION_MASK == value
