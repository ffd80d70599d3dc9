"""Clocks that the hardware holds down because of heat or power."""

from typing import ClassVar

from msgspec.structs import replace

from gpu_plugin.devices.nvml_h import CLOCKS_HW_POWER_BRAKE_SLOWDOWN as POWER_BRAKE
from gpu_plugin.devices.nvml_h import CLOCKS_HW_THERMAL_SLOWDOWN as THERMAL
from gpu_plugin.health.hysteresis import MINUTE, Level, level
from gpu_plugin.health.latch import Latch, Moment, Span, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import Context, SignalKind, signal

WINDOW = 600.0  # seconds of the past that count
SHARE = 0.6  # of the window with slow clocks opens the latch


class SlowMinutes(Level, frozen=True):
    """Recent time with slow clocks, by the minute: the start of each minute (Unix seconds) and its slow seconds.

    `watched` is the time of the first look. `last` is the time of the last look, None if there was no slow time.
    """

    watched: Moment | None = None
    last: Moment | None = None
    minutes: tuple[tuple[Moment, Span], ...] = ()

    gathering: ClassVar[bool] = False  # an early look decides nothing

    lasting: ClassVar[bool] = True  # so that the next process need not wait for ten minutes


@signal(
    "hw-slowdown",
    SignalKind.READING,
    "check the node's cooling and power supply",
    memory=SlowMinutes(),
    asks=("clocks_event_reasons",),
    clears="neither heat nor the power brake holds the clocks down for ten minutes",
)
def hw_slowdown(latch: Latch[SlowMinutes] | None, seen: Sample, ctx: Context) -> Latch[SlowMinutes] | None:
    """Opens if heat or power held the clocks down in 60 % of ten minutes; closes after ten minutes without.

    A sample counts for the time since the sample before, but at most for a minute, because a longer time was not observed.
    """
    reasons = seen.clocks_event_reasons
    slow = reasons is not None and bool(reasons & (THERMAL | POWER_BRAKE))
    if latch is not None and latch.verdict is not Verdict.OK:
        bad = None if reasons is None else slow
        after = level(latch, ctx, latch.memory, bad=bad, verdict=Verdict.DEGRADED, detail="", leave_seconds=WINDOW)
        return after or Latch(SlowMinutes(watched=ctx.now - WINDOW))
    if reasons is None:
        unread = latch is None or latch.memory.last is None
        return latch if unread or latch is None else replace(latch, memory=replace(latch.memory, last=None))
    if latch is None:
        latch = Latch(SlowMinutes(watched=ctx.now))
    if not slow and not latch.memory.minutes:
        return latch
    watched = ctx.now if latch.memory.watched is None else latch.memory.watched
    minutes = _minutes(latch.memory, watched, ctx.now, slow=slow)
    seconds = sum(slow_for * min(1.0, (start + MINUTE - (ctx.now - WINDOW)) / MINUTE) for start, slow_for in minutes)
    whole = ctx.now - watched >= WINDOW
    if whole and seconds >= SHARE * WINDOW - 1e-3:  # sums of seconds are not exact
        fresh = SlowMinutes(watched=watched)
        return level(None, ctx, fresh, bad=True, verdict=Verdict.DEGRADED, detail=_words(reasons, seconds))
    return replace(latch, memory=SlowMinutes(watched=watched, minutes=minutes, last=ctx.now if minutes else None))


def _minutes(known: SlowMinutes, watched: float, now: float, *, slow: bool) -> tuple[tuple[float, float], ...]:
    """Return the slow time by the minute at `now`, without the minutes before the window."""
    kept = [entry for entry in known.minutes if entry[0] + MINUTE > now - WINDOW]
    if slow:
        minute = watched + MINUTE * ((now - watched) // MINUTE)
        seconds = 0.0 if known.last is None else min(max(now - known.last, 0.0), MINUTE)
        if kept and kept[-1][0] == minute:
            kept[-1] = (minute, kept[-1][1] + seconds)
        else:
            kept.append((minute, seconds))
    return tuple(kept)


def _words(reasons: int, seconds: float) -> str:
    causes = [name for bit, name in ((THERMAL, "heat"), (POWER_BRAKE, "the power brake")) if reasons & bit]
    why = f" for {' and '.join(causes)}" if causes else ""
    return f"clocks held down by the hardware{why} during {seconds / WINDOW:.0%} of ten minutes"
