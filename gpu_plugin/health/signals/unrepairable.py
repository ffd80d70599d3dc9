"""Faults after which the part must be replaced: memory that neither remapping nor a reset repairs."""

from msgspec.structs import replace

from gpu_plugin.health.hysteresis import LEVEL, Level, level, unproven
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, Proof, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import REPLACE, Context, SignalKind, signal


@signal("sram-threshold", SignalKind.READING, REPLACE, memory=LEVEL, asks=("sram_threshold",))
def sram_threshold(latch: Latch[Level] | None, seen: Sample, ctx: Context) -> Latch[Level] | None:
    """FATAL if the driver reports more SRAM errors than the threshold at which NVIDIA replaces the part."""
    return condemned(latch, seen, ctx, bad=seen.sram_threshold, detail="more SRAM errors than NVIDIA allows a part")


@signal("remap-failure", SignalKind.READING, REPLACE, memory=LEVEL, asks=("remap_failure",))
def remap_failure(latch: Latch[Level] | None, seen: Sample, ctx: Context) -> Latch[Level] | None:
    """FATAL if a memory row could not be remapped, because there is no spare row left."""
    return condemned(latch, seen, ctx, bad=seen.remap_failure, detail="a bad memory row could not be remapped")


@signal("unrepairable-memory", SignalKind.READING, REPLACE, memory=LEVEL, asks=("unrepairable_memory",))
def unrepairable_memory(latch: Latch[Level] | None, seen: Sample, ctx: Context) -> Latch[Level] | None:
    """FATAL if the driver reports that the memory is beyond repair."""
    return condemned(latch, seen, ctx, bad=seen.unrepairable_memory, detail="memory beyond repair")


def condemned(
    latch: Latch[Level] | None, seen: Sample, ctx: Context, *, bad: bool | None, detail: str
) -> Latch[Level] | None:
    """Return the latch of a part that must be replaced. Good readings only count if the GPU was enumerated again after the bad.

    `bad` and `detail` are as in `level`.
    """
    if latch is not None and not bad:
        known, binding = latch.recovery.marks.binding, seen.binding
        rebound = known is not None and binding is not None and known != binding
        latch = _noted(unproven(latch) if rebound else latch, seen, ctx, rebound=latch.recovery.rebound or rebound)
    after = level(
        latch, ctx, LEVEL, bad=bad, verdict=Verdict.FATAL, detail=detail, leave=CLEAN_SAMPLES, proof=Proof.RMA
    )
    return _noted(after, seen, ctx, rebound=False) if bad and after is not None else after


def _noted(latch: Latch[Level], seen: Sample, ctx: Context, *, rebound: bool) -> Latch[Level]:
    """Return the latch with this sample's binding and the proof that it gives."""
    known = latch.recovery
    if rebound is known.rebound and seen.binding in (None, known.marks.binding):
        return latch
    return replace(latch, recovery=replace(known, marks=known.marks.after(seen, ctx.now), rebound=rebound))
