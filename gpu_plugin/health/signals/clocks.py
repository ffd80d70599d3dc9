"""Clocks that the hardware itself holds down."""

from dataclasses import replace

from gpu_plugin.devices.nvml_h import CLOCKS_HW_POWER_BRAKE_SLOWDOWN as POWER_BRAKE
from gpu_plugin.devices.nvml_h import CLOCKS_HW_THERMAL_SLOWDOWN as THERMAL
from gpu_plugin.health.context import Context
from gpu_plugin.health.hysteresis import level
from gpu_plugin.health.latch import Latch, Verdict
from gpu_plugin.health.observation import Observation, Sample

WINDOW, SHARE = 600.0, 0.6
"""Seconds that are looked back on, and the share of them that opens."""

_MINUTE = 60.0


def hw_slowdown(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Opens when the clocks were held down for heat or power in 60 % of ten minutes; closes after ten without.

    A sample speaks for the time since the one before, whatever the interval. Until it opens, `since` is the first reading,
    `value` when the last was, and `times` holds the slow time a minute: its start and how many seconds of it, in turns. The
    last two are kept only while there is slow time to remember.
    """
    if not isinstance(seen, Sample):
        return latch
    reasons = seen.clocks_event_reasons
    slow = reasons is not None and bool(reasons & (THERMAL | POWER_BRAKE))
    if latch is not None and latch.verdict is not Verdict.OK:
        bad = None if reasons is None else slow
        held = level(latch, ctx, bad=bad, verdict=Verdict.DEGRADED, detail="", leave_seconds=WINDOW)
        return held or Latch(since=ctx.now - WINDOW)
    if reasons is None:
        return latch if latch is None or latch.value is None else replace(latch, value=None)
    if latch is None:
        latch = Latch(since=ctx.now)
    if not slow and not latch.times:
        return latch
    minutes = _minutes(latch, ctx.now, slow=slow)
    seconds = sum(
        held * min(1.0, (start + _MINUTE - (ctx.now - WINDOW)) / _MINUTE)
        for start, held in zip(minutes[::2], minutes[1::2], strict=True)
    )
    if ctx.now - latch.since >= WINDOW and seconds >= SHARE * WINDOW - 1e-3:  # sums of seconds are not exact
        return level(None, ctx, bad=True, verdict=Verdict.DEGRADED, detail=_words(reasons, seconds))
    return replace(latch, times=minutes, value=ctx.now if minutes else None)


def _minutes(latch: Latch, now: float, *, slow: bool) -> tuple[float, ...]:
    """Slow time by the minute, as in `Latch.times`, as of now: minutes out of the window are dropped."""
    kept = [
        number
        for start, seconds in zip(latch.times[::2], latch.times[1::2], strict=True)
        if start + _MINUTE > now - WINDOW
        for number in (start, seconds)
    ]
    if slow:
        minute = latch.since + _MINUTE * ((now - latch.since) // _MINUTE)
        seconds = 0.0 if latch.value is None else min(max(now - latch.value, 0.0), WINDOW)
        if kept and kept[-2] == minute:
            kept[-1] += seconds
        else:
            kept += (minute, seconds)
    return tuple(kept)


def _words(reasons: int, seconds: float) -> str:
    causes = [name for bit, name in ((THERMAL, "heat"), (POWER_BRAKE, "the power brake")) if reasons & bit]
    why = f" for {' and '.join(causes)}" if causes else ""
    return f"clocks held down by the hardware{why} during {seconds / WINDOW:.0%} of ten minutes"
