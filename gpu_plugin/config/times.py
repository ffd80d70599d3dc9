"""Moments and durations as people and programs read them. Pure. Moments are in seconds of Unix time."""

import math
from datetime import UTC, datetime


def utc(at: float) -> str:
    """A moment for people, 2026-11-21 09:26:49 UTC; one that no calendar has, in seconds."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{at:g} s after 1970-01-01 UTC"


def rfc3339(at: float) -> str:
    """A moment for programs, in whole seconds: 2026-11-21T09:26:49Z.

    Raises:
        OverflowError, OSError, ValueError: no calendar has it.
    """
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_milliseconds(at: float) -> str:
    """A moment for programs, to the nearest millisecond: 2026-11-22T02:40:13.123Z."""
    whole, milliseconds = divmod(round(at * 1000), 1000)
    return f"{rfc3339(whole)[:-1]}.{milliseconds:03d}Z"


def duration(seconds: float) -> str:
    """A time to two units at most: `5 s`, `1 min 30 s`, `3 h 5 min`. From ten minutes on without seconds: `12 min`."""
    if not math.isfinite(seconds):
        return f"{seconds:g} s"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    units = ((whole // 3600, "h"), (whole // 60 % 60, "min"), (whole % 60 if whole < 600 else 0, "s"))
    return " ".join(f"{count} {unit}" for count, unit in units if count)
