"""A GPU's PCIe link: its lanes and its errors."""

from dataclasses import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.hysteresis import level
from gpu_plugin.health.latch import Latch, Proof, Verdict
from gpu_plugin.health.observation import Observation, Sample
from gpu_plugin.health.proof import RECOVERIES, after_recovery
from gpu_plugin.health.totals import grown, nothing_new, tally, unread

LOOKS = 4
"""Looks in a row at too few lanes that are DEGRADED, and at all of them that end it."""

REPLAYS, WITHIN, QUIET = 50, 60.0, 600.0
"""More replays than this within so many seconds are too many; so many seconds without close what was."""


def pcie_width(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Opens on four looks at fewer lanes than the link could have; closes on four at all of them.

    The link's speed says nothing: it drops whenever the GPU is idle.
    """
    if not isinstance(seen, Sample):
        return latch
    width, most = seen.pcie_width, seen.pcie_max_width
    return level(
        latch,
        ctx,
        bad=None if width is None or most is None else width < most,
        verdict=Verdict.DEGRADED,
        detail=f"its PCIe link has {width} of {most} lanes",
        enter=LOOKS,
        leave=LOOKS,
    )


def pcie_errors(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """FATAL on a fatal error until the GPU was reset; DEGRADED on too many replays until ten minutes passed without.

    `readings` are fatal errors and replays in total, `times` the last replays.
    """
    if not isinstance(seen, Sample):
        return latch
    now = (seen.pcie_fatal_errors, seen.pcie_replays)
    if latch is not None and nothing_new(latch, now):
        return latch
    known = latch or Latch()
    (fatal, replays), readings = grown(known.readings, now)
    times = tally(known.times, replays, ctx.now, WITHIN, REPLAYS)
    known = replace(known, readings=readings, times=times)
    judged: Latch | None
    if fatal:
        words = "fatal errors on its PCIe link"
        since = known.since if known.verdict is not Verdict.OK else ctx.now
        marks = ctx.marks.after(
            seen, ctx.now
        )  # a reset that this very look shows came before the error, and proves nothing after it
        judged = known.again(verdict=Verdict.FATAL, detail=words, since=since, proof=Proof.RESET, marks=marks)
    elif known.proof in RECOVERIES:
        judged = after_recovery(known, seen, ctx)
    else:
        bad = replays > 0 and len(times) > REPLAYS
        judged = level(
            known,
            ctx,
            bad=bad or (None if unread(readings, now) else False),
            verdict=Verdict.DEGRADED,
            detail=f"more than {REPLAYS} replays on its PCIe link within a minute",
            leave_seconds=QUIET,
        )
    fresh = replace(judged or Latch(), readings=readings, times=times)
    return None if fresh == Latch(readings=(None, None)) else latch if fresh == latch else fresh
