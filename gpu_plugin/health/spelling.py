"""Times as people read them."""

from datetime import UTC, datetime


def clock(at: float) -> str:
    """A moment, in Unix seconds, as date and time of day."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(seconds: float) -> str:
    """A time in its two greatest units: `5 s`, `12 min`, `3 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
