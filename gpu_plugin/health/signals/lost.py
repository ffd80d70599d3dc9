"""The driver says that the GPU is lost, or that it must be reset."""

from gpu_plugin.health.context import Context
from gpu_plugin.health.hysteresis import level
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, Proof, Verdict
from gpu_plugin.health.observation import Fault, Observation, Sample
from gpu_plugin.health.proof import after_recovery


def lost(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Opens on NVML_ERROR_GPU_IS_LOST; closes when it was enumerated or reset anew and answers again.

    NVML gives a lost GPU up until it is enumerated anew. So one that answers although neither its energy nor its binding was
    known when it was lost has proven that by answering.
    """
    if not isinstance(seen, Sample):
        return latch
    if seen.fault is not Fault.LOST:
        return latch and after_recovery(latch, seen, ctx)
    if latch is None:
        marks = ctx.marks.completed(seen, ctx.now)
        unmarked = marks.energy is None and marks.binding is None
        return Latch(Verdict.FATAL, seen.detail, ctx.now, Proof.RESET, marks=marks, reset=unmarked)
    # The marks stay as they were: a binding that is another already, when an old handle still says lost, is news to come.
    again = latch.again(reset=latch.marks.energy is None and latch.marks.binding is None)
    return latch if again == latch else again


def reset_required(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Opens on NVML_ERROR_RESET_REQUIRED; closes on three looks in a row without it: the driver itself says that it is over."""
    if not isinstance(seen, Sample):
        return latch
    bad = True if seen.fault is Fault.RESET_REQUIRED else None if seen.fault else False
    return level(latch, ctx, bad=bad, verdict=Verdict.FATAL, detail=seen.detail, leave=CLEAN_SAMPLES)
