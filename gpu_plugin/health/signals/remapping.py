"""Rows of memory that a reset will remap."""

from gpu_plugin.health.latch import NOTHING, RESET, Latch, Memory, Proof, Recovery, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.proof import after_recovery
from gpu_plugin.health.signal import Context, SignalKind, signal


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
