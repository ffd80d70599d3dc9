"""Readers of the values that `gpu-plugin fault` gives to a simulated node's faults."""

import re
from collections.abc import Callable, Collection
from typing import Any

from gpu_plugin.config.errors import ConfigError

# Converts the requested value of a fault. Raises ConfigError without the fault's name if the value is invalid.
Reader = Callable[[object], Any]


def whole(low: int, high: int, unit: str = "") -> Reader:
    """Return a reader of whole numbers from `low` to `high`."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{value!r} is not a whole number")
        if not low <= value <= high:
            raise ConfigError(f"{value}: from {low} to {high}{unit}")
        return value

    return read


def flag(value: object) -> None:
    """Read a value that must be true."""
    if value is not True:
        raise ConfigError(f"{value!r}: it is either asked for with true or left out")


def one_of(words: Collection[str]) -> Reader:
    """Return a reader that accepts only these words."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise ConfigError(f"{value!r}: one of {', '.join(words)}")
        return value

    return read


def unread(value: object) -> object:
    """Return the value, which the fault reads itself because the GPU limits it."""
    return value


def read_seconds(value: object) -> float:
    """Read a number of seconds up to a day; more is a typing error."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{value!r} is not a number of seconds")
    if not 0 < value <= 86400:  # false for NaN too
        raise ConfigError(f"{value}: from above 0 to 86400 seconds")
    return float(value)


def read_profiles(value: object) -> list[str] | None:
    """Read a list of MIG profiles, empty for "empty" or an empty text; None for "none", which is outside MIG mode."""
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is not a list of MIG profiles such as 3g.20gb,3g.20gb, nor empty nor none")
    if value.strip() == "none":
        return None
    return [part.strip() for part in value.split(",")] if value.strip() not in ("", "empty") else []


def read_instance(value: object) -> str:
    """Read a GPU instance such as 1, or a compute instance of it such as 1/0."""
    if not isinstance(value, str) or not re.fullmatch("[0-9]{1,2}(/[0-9]{1,2})?", value):
        raise ConfigError(f"{value!r}: a GPU instance such as 1, or a compute instance of it such as 1/0")
    return value
