"""The driver does not answer for the GPU: a call hangs, or fails for no reason of its own."""

from dataclasses import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.hysteresis import level, unproven
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, Verdict
from gpu_plugin.health.observation import Fault, Observation, Sample

FAILURES, AMONG, WITHIN, FATAL_AFTER, GOOD = 3, 5, 120.0, 10, 5
"""Failed looks, among how many, within how many seconds, that are DEGRADED; how many are FATAL; how many good ones end it."""


def hung(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Opens when a call has not come back in time; closes on three good looks in a row."""
    if not isinstance(seen, Sample):
        return latch
    bad = True if seen.fault is Fault.HUNG else None if seen.fault else False
    return level(latch, ctx, bad=bad, verdict=Verdict.FATAL, detail=seen.detail, leave=CLEAN_SAMPLES)


def unanswered(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """DEGRADED once three of five looks within two minutes failed, FATAL at the tenth that did; closes on five good in a row.

    Other faults have a signal of their own: such looks count neither way, and end a row of good ones. `times` are those of
    failures, as long as they are among the last five looks, or since it opened. `value` is what came of the last looks, a
    bit each, the last one lowest: 1 for a failure. `streak` is how many the last look was in a row with those like it, 0
    where it failed and there is nothing worse to come.
    """
    if not isinstance(seen, Sample):
        return latch
    if seen.fault and seen.fault is not Fault.ERROR:
        return latch and unproven(latch)
    if latch is None and not seen.fault:
        return None
    known = latch or Latch()
    looks = int(known.value or 0)
    alike = bool(looks & 1) is bool(seen.fault)
    streak = known.streak + 1 if alike else 1
    looks = (looks << 1 | bool(seen.fault)) & (1 << AMONG) - 1
    if not seen.fault:
        if streak >= GOOD:
            return None
        return replace(known, streak=streak, value=looks, times=_recent(known, looks))
    times = (*_recent(known, looks >> 1), ctx.now)
    verdict = _verdict(known.verdict, times, ctx.now)
    if verdict is Verdict.FATAL:
        streak = 0
    if verdict is known.verdict:
        return replace(known, streak=streak, value=looks, times=times[-FATAL_AFTER:])
    since = ctx.now if known.verdict is Verdict.OK else known.since
    return replace(
        known.again(verdict=verdict, detail=seen.detail),
        since=since,
        streak=streak,
        value=looks,
        times=times[-FATAL_AFTER:],
    )


def _recent(known: Latch, looks: int) -> tuple[float, ...]:
    """Its failures; of a latch that is not open only those among these looks."""
    if known.verdict is not Verdict.OK:
        return known.times
    kept = looks.bit_count()
    return known.times[-kept:] if kept else ()


def _verdict(known: Verdict, times: tuple[float, ...], now: float) -> Verdict:
    if known is Verdict.OK:
        together = len(times) >= FAILURES and 0 <= now - times[-FAILURES] <= WITHIN
        return Verdict.DEGRADED if together else Verdict.OK
    return Verdict.FATAL if len(times) >= FATAL_AFTER else known
