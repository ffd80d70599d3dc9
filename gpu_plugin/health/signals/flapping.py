"""A guard over all other signals: what keeps coming and going holds its GPU back for a time."""

from dataclasses import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.hysteresis import lately
from gpu_plugin.health.latch import Latch, Verdict
from gpu_plugin.health.observation import Observation, Sample

TIMES, WITHIN, LONGEST, CALM = 3, 3600.0, 86400.0, 86400.0
"""So many times FATAL within so many seconds is flapping; it is held so long at most, and forgiven after so much calm."""


def flapping(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Closes on a good look once its time, `value` seconds from `since`, is over, and is remembered for a day of calm.

    It opens by `fell`, whichever signal it was; there is one latch for each, of which `key.part` is the name. A new boot,
    and an operator who wants no guard, end it early.
    """
    if latch is None or not isinstance(seen, Sample):
        return latch
    if latch.since > ctx.now or (latch.times and latch.times[-1] > ctx.now):
        # The clock was set back while nobody looked: what would then last for too long begins anew
        times = tuple(min(at, ctx.now) for at in latch.times)
        return replace(latch, since=min(latch.since, ctx.now), times=times)
    over = ctx.now >= until(latch) or not ctx.policy.flap_hold or latch.rebound
    if latch.verdict is not Verdict.OK:
        return latch if seen.fault or not over else Latch(since=latch.since, value=latch.value)
    calm = CALM if latch.value else WITHIN
    last = max((until(latch), *latch.times[-1:]))
    return latch if ctx.now - last < calm else None


def until(latch: Latch) -> float:
    """When the time that a GPU is held back for is over, or was: Unix time in seconds."""
    return latch.since + (latch.value or 0.0)


def fell(latch: Latch | None, signal: str, now: float, hold: float) -> Latch:
    """The guard's latch after a signal became FATAL: `hold` seconds for the third time in an hour, double for the next.

    Where it is no flapping yet, `verdict` is OK and `times` count.
    """
    known = latch or Latch()
    times = lately((*known.times, now), now, WITHIN)
    if known.verdict is Verdict.OK and len(times) < TIMES:
        return Latch(times=times, since=known.since, value=known.value)
    seconds = min(LONGEST, 2 * known.value if known.value else hold)
    words = f"{signal} made it unfit {max(len(times), TIMES)} times; it is held back for {_spelt(seconds)}"
    return Latch(Verdict.FATAL, words, now, value=seconds, times=times)


def _spelt(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"
