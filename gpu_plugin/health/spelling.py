"""Times as people read them."""

import math
from datetime import UTC, datetime


def clock(at: float) -> str:
    """A moment, in Unix seconds, as date and time of day; one that no calendar has, in seconds."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{at:g} s after 1970-01-01 UTC"


def duration(seconds: float) -> str:
    """A time in its two greatest units: `5 s`, `12 min`, `3 h 5 min`."""
    if not math.isfinite(seconds):
        return f"{seconds:g} s"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
