"""Memory errors that a reset ends: the driver's volatile count of uncorrected errors, and rows that a reset will remap."""

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
    clears="the count of uncorrected errors is 0 again",
    recovers=True,
)
def ecc_uncorrected(latch: Latch[Memory] | None, seen: Sample, ctx: Context) -> Latch[Memory] | None:
    """Opens if nvmlDeviceGetTotalEccErrors counts more uncorrected errors than before; closes when the count is back at 0.

    FATAL if the driver requests a recovery, or if the driver reports no recovery action and the part does not contain errors.
    Otherwise DEGRADED, as is a count above 0 at the first look, whose errors may be old. As long as the count is above 0, no
    other sign proves a reset. A count that decreased to another value than 0 is of new errors. New errors renew the latch, and
    end an operator's override.
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
        before = Verdict.DEGRADED if latch.overridden else latch.verdict
        verdict = max(before, _verdict(seen, ctx, now=True))
        return latch.renewed(NOTHING, marks.sure(seen, ctx.now), verdict=verdict, detail=_words(count))
    if asks(seen.recovery_action, ctx) and not latch.recovery.reset and latch.verdict < Verdict.FATAL:
        # A request of the driver after a reset has another cause, and a signal of its own
        latch = latch.renewed(NOTHING, verdict=Verdict.FATAL)
    cleared = count == 0 and bool(marks.comparing(Marks.of(seen, ctx.now)).ecc)
    after = after_recovery(latch, seen, ctx)
    if after is None:
        settled = replace(latch.recovery, clean=CLEAN_SAMPLES)  # further looks prove nothing while the count is above 0
        return replace(latch, recovery=settled) if count else None
    if cleared and not after.recovery.reset:  # a cleared count proves that this count is over, but no reset
        return replace(after, recovery=replace(after.recovery, reset=True, clean=min(after.recovery.clean, 1)))
    return after


def _verdict(seen: Sample, ctx: Context, *, now: bool) -> Verdict:
    """Return the verdict on errors that happened just `now`, or at an unknown time."""
    uncontained = now and not ctx.facts.says_action and not ctx.facts.contains_errors
    return Verdict.FATAL if asks(seen.recovery_action, ctx) or uncontained else Verdict.DEGRADED


def _words(count: int) -> str:
    return f"{counted(count, 'uncorrected memory error')} since the GPU was reset or the driver loaded"


@signal(
    "remap-pending",
    SignalKind.READING,
    RESET,
    asks=("remap_pending",),
    clears="no remapping waits for a reset",
    recovers=True,
)
def remap_pending(latch: Latch[Memory] | None, seen: Sample, ctx: Context) -> Latch[Memory] | None:
    """DEGRADED while a remapping waits for a reset; closes when no remapping waits.

    A GPU that was partitioned into MIG instances since then does not report it (nvmlDeviceGetRemappedRows). In that case the
    proof of a reset closes the latch.
    """
    if seen.remap_pending is None:
        return latch and after_recovery(latch, seen, ctx)
    if not seen.remap_pending:
        return None
    words = "the remapping of a memory row waits for a reset of the GPU; new work is not affected"
    if latch is None:
        recovery = Recovery(ctx.marks.sure(seen, ctx.now))
        return Latch(NOTHING, Verdict.DEGRADED, words, ctx.now, Proof.RESET, recovery)
    again = latch.renewed(NOTHING, latch.recovery.marks.sure(seen, ctx.now))
    return latch if again == latch else again
