"""The NVLink fabric that a GPU is to join before CUDA works on it, as nvmlDeviceGetGpuFabricInfoV tells of it."""

from gpu_plugin.health.context import Context
from gpu_plugin.health.grades import graded
from gpu_plugin.health.latch import Latch, Verdict
from gpu_plugin.health.observation import Fabric, Observation, Sample

NOT_SUPPORTED, COMPLETED = 0, 3
"""NVML_GPU_FABRIC_STATE_NOT_SUPPORTED: the GPU has no fabric to join; _COMPLETED: it has joined, or failed to."""

_STATES = {1: "has not begun to join its NVLink fabric", 2: "is still joining its NVLink fabric"}
"""NVML_GPU_FABRIC_STATE_NOT_STARTED, _IN_PROGRESS."""

UNHEALTHY, HEALTHY, LIMITED_CAPACITY = 2, 1, 3
"""NVML_GPU_FABRIC_HEALTH_SUMMARY_*."""

DEGRADED_BANDWIDTH = (0, 0x3, 1)
"""Shift, width and the bad value of NVML_GPU_FABRIC_HEALTH_MASK_*_DEGRADED_BW."""
ROUTE_UNHEALTHY = (4, 0x3, 1)
"""Likewise of ..._ROUTE_UNHEALTHY."""
ACCESS_TIMEOUT_RECOVERY = (6, 0x3, 1)
"""Likewise of ..._ACCESS_TIMEOUT_RECOVERY."""
PARTITION_UNASSIGNED = (12, 0x3, 2)
"""Likewise of ..._PARTITION_ASSIGNED."""

_CONFIGURATION = (8, 0xF)
"""NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION and its width; 0 is not supported, 1 none."""
_CONFIGURATIONS = {
    2: "a wrong system GUID",
    3: "a wrong chassis serial number",
    4: "no partition",
    5: "too few NVLinks",
    6: "incompatible GPU firmware",
    7: "an invalid location",
    8: "an invalid state of the GPU",
}
"""NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_*."""


def fabric(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Opens on two looks at a fabric that is not ready or not sound; closes on three at one that is both.

    One that is not ready at the first look of all opens at once: CUDA fails with error 802 (system not yet initialized)
    until it is. A GPU without NVLinks, such as one that was passed through alone, has no fabric to wait for, and neither
    has one in MIG mode, whose slices do not reach over NVLink.
    """
    if not isinstance(seen, Sample):
        return latch
    if ctx.facts.mig:
        return None
    found = seen.fabric
    if found is None or seen.nvlinks is None:
        return graded(latch, ctx, grade=None, detail="")
    grade, words = judge(found)
    starting = ctx.before is None and found.state not in (NOT_SUPPORTED, COMPLETED)
    return graded(latch, ctx, grade=grade, detail=words, enter=1 if starting else 2)


def judge(found: Fabric) -> tuple[Verdict, str]:
    """What a fabric in this condition means for its GPU, and why."""
    if found.state == NOT_SUPPORTED:
        return Verdict.OK, ""
    if found.state != COMPLETED:
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
    shift, width = _CONFIGURATION
    wrong = found.health_mask >> shift & width
    faults = []
    if _says(found, ROUTE_UNHEALTHY):
        faults.append("its route is unhealthy")
    if _says(found, ACCESS_TIMEOUT_RECOVERY):
        faults.append("it is recovering from access timeouts")
    if wrong > 1:
        faults.append(f"its configuration has {_CONFIGURATIONS.get(wrong, f'error {wrong}')}")
    if found.summary == UNHEALTHY and not faults:
        faults.append("the driver calls it unhealthy")
    return faults


def _limits(found: Fabric) -> list[str]:
    limits = []
    if _says(found, DEGRADED_BANDWIDTH):
        limits.append("its bandwidth is degraded")
    if _says(found, PARTITION_UNASSIGNED) and found.summary != HEALTHY:
        limits.append("no partition is assigned")
    if found.summary == LIMITED_CAPACITY and not limits:
        limits.append("the driver speaks of limited capacity")
    return limits


def _says(found: Fabric, what: tuple[int, int, int]) -> bool:
    shift, width, value = what
    return found.health_mask >> shift & width == value
