"""Memory pages that the driver retired, on parts before Ampere. Later parts remap rows instead."""

from gpu_plugin.health.hysteresis import LEVEL, Level, level
from gpu_plugin.health.latch import RESET, Latch, Proof, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import REPLACE, Context, SignalKind, signal
from gpu_plugin.health.signals.unrepairable import condemned

# Retired pages at which NVIDIA replaces a part; the driver can retire 64 (NVIDIA, Dynamic Page Retirement)
REPLACED_AT = 60


@signal(
    "retired-pages",
    SignalKind.READING,
    f"{RESET}; at {REPLACED_AT} pages {REPLACE}",
    memory=LEVEL,
    asks=("retired_pending", "retired_pages"),
    clears="no retirement waits for a reset",
)
def retired_pages(latch: Latch[Level] | None, seen: Sample, ctx: Context) -> Latch[Level] | None:
    """DEGRADED while a retirement waits for a reset, FATAL from `REPLACED_AT` pages on."""
    pages = seen.retired_pages
    if pages is not None and pages >= REPLACED_AT:
        return condemned(latch, seen, ctx, bad=True, detail=f"{pages} memory pages retired, {REPLACED_AT} are too many")
    if latch is not None and latch.proof is Proof.RMA:
        return condemned(latch, seen, ctx, bad=None if pages is None else False, detail="")
    words = "the retirement of a memory page waits for a reset of the GPU"
    return level(latch, ctx, LEVEL, bad=seen.retired_pending, verdict=Verdict.DEGRADED, detail=words)
