"""How the text of a flag, an environment variable or a file becomes a value.

Every function takes what was written and returns the value, or raises ValueError with the reason alone: the caller knows
where it stood. Files may hand over what YAML made of the text (a bool, a number, a list), so each takes those too.
"""

import math
import re
from collections.abc import Callable

Parse = Callable[[object], object]

# Go's strconv.ParseBool, which NVIDIA's plugin reads its flags with.
_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})

_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def text(written: object) -> str:
    """Any text."""
    if not isinstance(written, str):
        raise ValueError(f"{written!r} is not text")
    if "\0" in written or "\n" in written:
        raise ValueError(f"{written!r} holds a line break or a zero byte")
    return written


def path(written: object) -> str:
    """An absolute path."""
    value = text(written)
    if not value.startswith("/"):
        raise ValueError(f"{value!r} is not an absolute path")
    return value


def optional_path(written: object) -> str:
    """An absolute path, or nothing."""
    return path(written) if written != "" else ""


def boolean(written: object) -> bool:
    """True or false, in the spellings of Go's ParseBool."""
    if isinstance(written, bool):
        return written
    if isinstance(written, str) and written in _TRUE:
        return True
    if isinstance(written, str) and written in _FALSE:
        return False
    raise ValueError(f"{written!r} is neither true nor false")


def choice(*allowed: str) -> Parse:
    """One of `allowed`."""

    def parse(written: object) -> object:
        if written in allowed:
            return written
        raise ValueError(f"{written!r} is not one of {', '.join(allowed)}")

    return parse


def choices(*allowed: str) -> Parse:
    """Some of `allowed`: text split at commas, or a list; in order, each once."""

    def parse(written: object) -> object:
        items = texts(written)
        for item in items:
            if item not in allowed:
                raise ValueError(f"{item!r} is not one of {', '.join(allowed)}")
        if not items:
            raise ValueError(f"names none of {', '.join(allowed)}")
        return tuple(dict.fromkeys(items))

    return parse


def texts(written: object) -> tuple[str, ...]:
    """Text split at commas, or a list of texts; blanks around an item and empty items do not count."""
    items = written if isinstance(written, list | tuple) else text(written).split(",")
    return tuple(stripped for item in items if (stripped := text(item).strip()))


def integers(written: object) -> tuple[int, ...]:
    """Numbers split at commas, or a list of numbers."""
    items = (
        written if isinstance(written, list | tuple) else texts(str(written) if isinstance(written, int) else written)
    )
    numbers = []
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | str):
            raise ValueError(f"{item!r} is not a whole number")
        try:
            numbers.append(int(item))
        except ValueError:
            raise ValueError(f"{item!r} is not a whole number") from None
    return tuple(numbers)


def imex_channels(written: object) -> tuple[int, ...]:
    """No IMEX channel, or channel 0: the only ones NVIDIA's plugin knows."""
    numbers = integers(written)
    if numbers not in {(), (0,)}:
        raise ValueError(f"channel IDs must be [] or [0], not {list(numbers)}")
    return numbers


def duration(low: float, high: float) -> Parse:
    """Seconds from text such as 200ms, 5m or 1h30m, between `low` and `high` seconds."""

    def parse(written: object) -> object:
        seconds = _seconds(written)
        if not low <= seconds <= high:
            raise ValueError(f"{written!r} is not between {spell_duration(low)} and {spell_duration(high)}")
        return seconds

    return parse


def _seconds(written: object) -> float:
    value = str(written).strip()
    parts = _DURATION.findall(value)
    if isinstance(written, bool) or not parts or "".join(number + unit for number, unit in parts) != value:
        raise ValueError(f"{written!r} is not a duration such as 200ms, 15s or 5m")
    return math.fsum(float(number) * _SECONDS[unit] for number, unit in parts)


def spell_duration(seconds: float) -> str:
    """Seconds as `duration` would read them."""
    for unit in ("h", "m", "s"):
        size = _SECONDS[unit]
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds * 1000:g}ms" if seconds < 1 else f"{seconds:g}s"
