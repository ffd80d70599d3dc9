"""A GPU's PCIe link: its lanes and its errors."""

from msgspec.structs import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.hysteresis import LEVEL, Level, level
from gpu_plugin.health.latch import Latch, Proof, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.proof import RECOVERIES, after_recovery
from gpu_plugin.health.signal import EndsBy, SignalKind, signal
from gpu_plugin.health.totals import Counted, read, unread
from gpu_plugin.health.xid_advice import RESET

LOOKS = 4  # in a row at too few lanes that are DEGRADED, and at all of them that end it
REPLAYS = 50  # more than this are too many
WITHIN = 60.0  # seconds in which replays are counted
QUIET = 600.0  # seconds without too many that close

COUNTERS = ("pcie_fatal_errors", "pcie_replays")
"""Fields of a Sample, in the order of the totals."""


@signal(
    "pcie-width",
    SignalKind.READING,
    "have the GPU, its riser or its slot inspected",
    memory=LEVEL,
    asks=("pcie_width", "pcie_max_width"),
    clears="four looks in a row at all its lanes",
)
def pcie_width(latch: Latch[Level] | None, seen: Sample, ctx: Context) -> Latch[Level] | None:
    """Opens on four looks at fewer lanes than the link could have; closes on four at all of them.

    The link's speed says nothing: it drops whenever the GPU is idle.
    """
    width, most = seen.pcie_width, seen.pcie_max_width
    return level(
        latch,
        ctx,
        LEVEL,
        bad=None if width is None or most is None else width < most,
        verdict=Verdict.DEGRADED,
        detail=f"its PCIe link has {width} of {most} lanes",
        enter=LOOKS,
        leave=LOOKS,
    )


@signal(
    "pcie-errors",
    SignalKind.EVENT,
    f"have the GPU, its riser or its slot inspected; {RESET}",
    memory=Counted(),
    asks=COUNTERS,
    clears="ten minutes without many replays",
    ends=EndsBy.RECOVERY,
)
def pcie_errors(latch: Latch[Counted] | None, seen: Sample, ctx: Context) -> Latch[Counted] | None:
    """FATAL on a fatal error until the GPU was reset; DEGRADED on too many replays until ten minutes passed without.

    The totals are fatal errors and replays, the times those of the last replays.
    """
    now = read(None if latch is None else latch.memory, seen, *COUNTERS)
    if latch is not None and latch.verdict is Verdict.OK and now == latch.memory.totals and not latch.memory.times:
        return latch
    known = latch or Latch(Counted())
    (fatal, replays), memory = known.memory.after(now, ctx.now, WITHIN, REPLAYS)
    fresh = replace(memory, row=0, quiet_since=None)
    known = replace(known, memory=memory)
    judged: Latch[Counted] | None
    if fatal:
        words = "fatal errors on its PCIe link"
        since = known.since if known.verdict is not Verdict.OK else ctx.now
        marks = ctx.marks.after(seen, ctx.now)  # a reset that this very look shows came before the error
        judged = known.renewed(fresh, marks, verdict=Verdict.FATAL, detail=words, since=since, proof=Proof.RESET)
    elif known.proof in RECOVERIES:
        judged = after_recovery(known, seen, ctx)
    else:
        bad = replays > 0 and len(memory.times) > REPLAYS
        judged = level(
            known,
            ctx,
            fresh,
            bad=bad or (None if unread(memory.totals, now) else False),
            verdict=Verdict.DEGRADED,
            detail=f"more than {REPLAYS} replays on its PCIe link within a minute",
            leave_seconds=QUIET,
        )
    if judged is None:
        judged = None if memory.totals == (None, None) else Latch(fresh)
    return latch if judged == latch else judged
