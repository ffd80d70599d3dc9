"""Presence of the GPU and of its driver."""

from msgspec.structs import replace

from gpu_plugin.health.hysteresis import LEVEL, Level, level
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, Verdict
from gpu_plugin.health.observation import Fault, Sample
from gpu_plugin.health.signal import Context, OperatorInfluence, SignalKind, signal


@signal(
    "vanished",
    SignalKind.READING,
    "look at the kernel's log and at lspci; bind the driver to the GPU again, or have the GPU reseated",
    memory=LEVEL,
    influence=OperatorInfluence.NONE,
    clears="three checks in a row find it",
)
def vanished(latch: Latch[Level] | None, seen: Sample, ctx: Context) -> Latch[Level] | None:
    """Opens if the driver or the bus does not list the GPU at two looks in a row; closes after three looks that reach it."""
    return _absent(latch, seen, ctx, Fault.VANISHED, "the driver does not find the GPU any more", 2)


@signal(
    "driver",
    SignalKind.READING,
    "load the driver, or bring it and its library to the same version",
    memory=LEVEL,
    influence=OperatorInfluence.NONE,
    clears="the driver answers three checks in a row",
)
def driver(latch: Latch[Level] | None, seen: Sample, ctx: Context) -> Latch[Level] | None:
    """Opens if the driver is not loaded, or has another version than its library; closes after three good looks."""
    return _absent(latch, seen, ctx, Fault.DRIVER, "the NVIDIA driver does not answer", 1)


def _absent(
    latch: Latch[Level] | None, seen: Sample, ctx: Context, fault: Fault, words: str, enter: int
) -> Latch[Level] | None:
    after = level(
        latch,
        ctx,
        LEVEL,
        bad=True if seen.fault is fault else False if seen.core_answered else None,
        verdict=Verdict.FATAL,
        detail=seen.detail or words,
        enter=enter,
        leave=CLEAN_SAMPLES,
    )
    if after is None or after.verdict is Verdict.OK or seen.fault is not fault or not seen.detail:
        return after
    return replace(after, detail=seen.detail)
