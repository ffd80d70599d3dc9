"""The driver says that the GPU is lost, or that it must be reset."""

from msgspec.structs import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.hysteresis import LEVEL, Level, level
from gpu_plugin.health.latch import CLEAN_SAMPLES, NOTHING, Latch, Memory, Proof, Recovery, Verdict
from gpu_plugin.health.observation import Fault, Observation, Sample
from gpu_plugin.health.proof import after_recovery

RECOVERY = (
    "a reset of the GPU ({reset}), a reboot of the node, or the driver bound to the GPU anew "
    "(unbind and bind it in /sys/bus/pci/drivers/nvidia while it is released)"
)
"""What brings a lost GPU back, for people."""


def lost(latch: Latch[Memory] | None, seen: Observation, ctx: Context) -> Latch[Memory] | None:
    """Opens on NVML_ERROR_GPU_IS_LOST; closes when it was enumerated or reset anew and answers again.

    NVML gives a lost GPU up until it is enumerated anew. So one that answers although neither its energy nor its binding was
    known when it was lost has proven that by answering.
    """
    if not isinstance(seen, Sample):
        return latch
    if seen.fault is not Fault.LOST:
        return latch and after_recovery(latch, seen, ctx)
    marks = ctx.marks.completed(seen, ctx.now) if latch is None else latch.recovery.marks
    # The marks stay as they were: a binding that is another already, when an old handle still says lost, is news to come.
    recovery = Recovery(marks, reset=marks.energy is None and marks.binding is None)
    if latch is None:
        return Latch(NOTHING, Verdict.FATAL, seen.detail, ctx.now, Proof.RESET, recovery)
    again = replace(latch, recovery=recovery, overridden=False)
    return latch if again == latch else again


def reset_required(latch: Latch[Level] | None, seen: Observation, ctx: Context) -> Latch[Level] | None:
    """Opens on NVML_ERROR_RESET_REQUIRED; closes on three looks in a row without it: the driver itself says that it is over."""
    if not isinstance(seen, Sample):
        return latch
    bad = True if seen.fault is Fault.RESET_REQUIRED else None if seen.fault else False
    return level(latch, ctx, LEVEL, bad=bad, verdict=Verdict.FATAL, detail=seen.detail, leave=CLEAN_SAMPLES)


def answering(latch: Latch[Memory]) -> bool:
    """Whether good looks alone are missing: its reset was seen, or nothing was known of it that a reset would change."""
    recovery = latch.recovery
    unmarked = recovery.marks.energy is None and recovery.marks.binding is None
    return recovery.rebound or (recovery.reset and (unmarked or recovery.clean > 0))
