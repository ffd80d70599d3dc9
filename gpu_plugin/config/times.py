"""Times and durations as text for people and programs. Pure. Times are in seconds of Unix time."""

import math
from datetime import UTC, datetime

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def utc(at: float) -> str:
    """Return a time for people: 2026-11-21 09:26:49 UTC, or in seconds if `datetime` cannot represent it."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{at:g} s after 1970-01-01 UTC"


def rfc3339(at: float) -> str:
    """Return a time for programs, in whole seconds: 2026-11-21T09:26:49Z.

    Raises:
        OverflowError, OSError, ValueError: `datetime` cannot represent it.
    """
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_milliseconds(at: float) -> str:
    """Return a time for programs, to the nearest millisecond: 2026-11-22T02:40:13.123Z. Raises as `rfc3339` does."""
    whole, milliseconds = divmod(round(at * 1000), 1000)
    return f"{rfc3339(whole)[:-1]}.{milliseconds:03d}Z"


def duration(seconds: float, *, running: bool = False) -> str:
    """Return a duration in its two greatest units: `5 s`, `1 min 30 s`, `3 h 5 min`, `2 d 4 h`.

    A second unit of zero is left out, and so are seconds from ten minutes on. A `running` duration is rounded down to whole
    seconds, and its second unit is never left out: `12 min 0 s`.
    """
    if not math.isfinite(seconds):
        return f"{seconds:g} s"
    left = max(0, int(seconds) if running else round(seconds))
    parts: list[tuple[int, str]] = []
    for size, unit in _UNITS:
        count, left = divmod(left, size)
        if parts or count or size == 1:
            parts.append((count, unit))
    first, *rest = parts[:2]
    second = [(count, unit) for count, unit in rest if running or (count and (unit != "s" or first[0] < 10))]
    return " ".join(f"{count} {unit}" for count, unit in (first, *second))


def age(seconds: float) -> str:
    """Return the time since a moment in its greatest unit that counts at least two: `90s`, `3m`, `2h`, `5d`."""
    whole = max(0, int(seconds)) if math.isfinite(seconds) else 0
    size, unit = next(((size, unit) for size, unit in _UNITS if whole >= 2 * size), (1, "s"))
    return f"{whole // size}{unit[0]}"
