"""A GPU's PCIe link: its lanes and its errors."""

from gpu_plugin.health.hysteresis import LEVEL, Level, level
from gpu_plugin.health.latch import RESET, Latch, Proof, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.proof import RECOVERIES, after_recovery
from gpu_plugin.health.signal import Context, SignalKind, signal
from gpu_plugin.health.totals import Counted, Counters, counted

LOOKS = 4  # looks in a row at too few lanes that open the latch, and at all lanes that close it
REPLAYS = 50  # more than this are too many
WITHIN = 60.0  # seconds in which replays are counted
QUIET = 600.0  # seconds without too many replays that close the latch

COUNTERS = Counters("pcie_fatal_errors", "pcie_replays", REPLAYS, WITHIN)


@signal(
    "pcie-width",
    SignalKind.READING,
    "have the GPU, its riser or its slot inspected",
    memory=LEVEL,
    asks=("pcie_width", "pcie_max_width"),
    clears="four checks in a row find all its lanes",
)
def pcie_width(latch: Latch[Level] | None, seen: Sample, ctx: Context) -> Latch[Level] | None:
    """Opens after four looks at fewer lanes than the link could have; closes after four looks at all lanes.

    The link's speed is ignored, because it drops whenever the GPU is idle.
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
    asks=COUNTERS[:2],
    clears="ten minutes pass without many replays",
    recovers=True,
)
def pcie_errors(latch: Latch[Counted] | None, seen: Sample, ctx: Context) -> Latch[Counted] | None:
    """FATAL on a fatal error until the GPU was reset; DEGRADED on too many replays until ten minutes without too many.

    The PCI Express Base Specification (6.2.2.2.1, Fatal Errors) calls link and hardware unreliable after a single fatal error,
    until a reset. No recovery action follows such an error, so a driver that requests nothing proves nothing. An operator can
    set `health.signals: {pcie-errors: degraded}`.

    The totals count fatal errors and replays, and the times are of the last replays.
    """

    def judge(known: Latch[Counted], fresh: Counted, fatal: int, bad: bool | None) -> Latch[Counted] | None:  # noqa: FBT001
        if fatal:
            words = "fatal errors on its PCIe link"
            since = known.since if known.verdict is not Verdict.OK else ctx.now
            marks = ctx.marks.sure(seen, ctx.now)  # a reset that the same look shows came before the error
            return known.renewed(fresh, marks, verdict=Verdict.FATAL, detail=words, since=since, proof=Proof.RESET)
        if known.proof in RECOVERIES:
            return after_recovery(known, seen, ctx)
        words = f"more than {REPLAYS} replays on its PCIe link within a minute"
        return level(known, ctx, fresh, bad=bad, verdict=Verdict.DEGRADED, detail=words, leave_seconds=QUIET)

    return counted(latch, seen, ctx, COUNTERS, judge)
