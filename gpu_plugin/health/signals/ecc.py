"""Uncorrected memory errors, by the driver's own volatile count."""

from msgspec.structs import replace

from gpu_plugin.config.words import counted
from gpu_plugin.health.latch import CLEAN_SAMPLES, NOTHING, RESET, Latch, Marks, Memory, Proof, Recovery, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.proof import after_recovery
from gpu_plugin.health.signal import Context, SignalKind, signal
from gpu_plugin.health.signals.recovery_action import asks


@signal(
    "ecc-uncorrected",
    SignalKind.READING,
    RESET,
    asks=("ecc_uncorrected",),
    clears="a count of uncorrected errors that was set back to 0",
    recovers=True,
)
def ecc_uncorrected(latch: Latch[Memory] | None, seen: Sample, ctx: Context) -> Latch[Memory] | None:
    """Opens when nvmlDeviceGetTotalEccErrors counts more uncorrected errors than before; closes when it was set back.

    FATAL where the driver asks for a recovery, or cannot say so and the part does not contain errors; otherwise DEGRADED,
    as is a count above 0 at the first look, which may be of long ago. A count that is above 0 proves nothing, whatever else
    speaks for a reset; one that went back to another than 0 is of new errors. Those renew the latch, and end what an
    operator overrode.
    """
    count = seen.ecc_uncorrected
    if latch is None:
        known = ctx.marks.ecc
        if not count or count == known:
            return None
        verdict = _verdict(seen, ctx, now=known is not None)
        return Latch(NOTHING, verdict, _words(count), ctx.now, Proof.RESET, Recovery(ctx.marks.sure(seen, ctx.now)))
    marks = latch.recovery.marks
    if count and marks.ecc is not None and count != marks.ecc:
        stood = Verdict.DEGRADED if latch.overridden else latch.verdict
        verdict = max(stood, _verdict(seen, ctx, now=True))
        return latch.renewed(NOTHING, marks.sure(seen, ctx.now), verdict=verdict, detail=_words(count))
    if asks(seen.recovery_action, ctx) and not latch.recovery.reset and latch.verdict < Verdict.FATAL:
        # What the driver asks for after a reset is for something else, and has a signal of its own
        latch = latch.renewed(NOTHING, verdict=Verdict.FATAL)
    cleared = count == 0 and bool(marks.comparing(Marks.of(seen, ctx.now)).ecc)
    after = after_recovery(latch, seen, ctx)
    if after is None:
        settled = replace(latch.recovery, clean=CLEAN_SAMPLES)  # looks do not settle what the count still says
        return replace(latch, recovery=settled) if count else None
    if cleared and not after.recovery.reset:  # which proves that count over, and nothing else
        return replace(after, recovery=replace(after.recovery, reset=True, clean=min(after.recovery.clean, 1)))
    return after


def _verdict(seen: Sample, ctx: Context, *, now: bool) -> Verdict:
    """The verdict on errors that happened just `now`, or at a time unknown."""
    uncontained = now and not ctx.facts.says_action and not ctx.facts.contains_errors
    return Verdict.FATAL if asks(seen.recovery_action, ctx) or uncontained else Verdict.DEGRADED


def _words(count: int) -> str:
    return f"{counted(count, 'uncorrected memory error')} since the GPU was reset or the driver loaded"
