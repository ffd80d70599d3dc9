"""Parse the text of a flag, an environment variable or a file into a value.

Every `Reading` is called with the written value and returns the parsed value, or raises ValueError with the reason. The caller
adds the place. In a file, YAML may already have parsed a bool, a number or a list, so a `Reading` accepts these too. Its JSON
Schema describes the accepted values of a file.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from gpu_plugin.config.names import label_key_fault

T = TypeVar("T")
Value_co = TypeVar("Value_co", covariant=True)


class Reading(msgspec.Struct, Generic[Value_co], frozen=True, eq=False):
    """A function that parses a written value, and the JSON Schema of its accepted values in a file, without null."""

    read: Callable[[object], Value_co]
    schema: Mapping[str, Any]

    def __call__(self, written: object) -> Value_co:
        """Return the parsed value. Raises ValueError with the reason, or ItemError if an item of a list is invalid."""
        return self.read(written)


class ItemError(ValueError):
    """An item of a list is invalid; `index` counts from 0."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


def reading(schema: Mapping[str, Any]) -> Callable[[Callable[[object], T]], Reading[T]]:
    """Return a decorator that makes a `Reading` of a function and this JSON Schema."""
    return lambda read: Reading(read, schema)


def read_items(read: Callable[[object], T], items: Sequence[object]) -> tuple[T, ...]:
    """Return the parsed items. Raises ItemError if an item is invalid."""
    found = []
    for index, item in enumerate(items):
        try:
            found.append(read(item))
        except ValueError as error:
            raise ItemError(index, str(error)) from None
    return tuple(found)


def matching(pattern: str, expected: str) -> Reading[str]:
    """Return a `Reading` of text that matches a pattern. `expected` completes the error message: 'x' is not ..."""
    form = re.compile(pattern)

    @reading({"type": "string", "pattern": f"^{pattern}$"})
    def parse(written: object) -> str:
        if isinstance(written, str) and form.fullmatch(written):
            return written
        raise ValueError(f"{written!r} is not {expected}")

    return parse


# Go's strconv.ParseBool, which NVIDIA's plugin reads its flags with
_TRUTH: Mapping[str, bool] = {
    **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
    **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
}

AUTO: Final = "auto"  # the value of an option that depends on the node
Auto = Literal["auto"]

_INTEGER = re.compile(r"[-+]?\d{1,18}", re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m|h)", re.ASCII)
_MEMORY = re.compile(r"(\d{1,9})([MG]i)", re.ASCII)
_MIB = {"Mi": 1, "Gi": 1024}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

# An IPv4 address or a host name (RFC 1123, 2.1, with the underscore of some names)
_HOST = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*\.?",
    re.ASCII,
)

text = matching(r"[^\n\u0000]*", "text in one line")
path = matching(r"/[^\n\u0000]*", "an absolute path")
optional_path = matching(r"(/[^\n\u0000]*)?", "an absolute path")
TEXTS = {"anyOf": [text.schema, {"type": "array", "items": text.schema}]}


@reading(optional_path.schema)
def root(written: object) -> str:
    """Read an absolute path, without double slashes and single dots. An empty text is the root directory."""
    return re.sub(r"/(?:\.?/)+|/\.$", "/", path(written)) if written != "" else "/"


@reading(optional_path.schema)
def optional_root(written: object) -> str:
    """Read a path as `root` does, or an empty text. The paths of CDI specifications are made with it."""
    return root(written) if written != "" else ""


@reading(text.schema)
def label_key(written: object) -> str:
    """Read the key of a node label."""
    value = text(written)
    if fault := label_key_fault(value):
        raise ValueError(fault)
    return value


@reading({"enum": [True, False, *_TRUTH]})
def boolean(written: object) -> bool:
    """Read true or false, in the spellings of Go's ParseBool."""
    if isinstance(written, bool):
        return written
    if isinstance(written, str) and written in _TRUTH:
        return _TRUTH[written]
    raise ValueError(f"{written!r} is neither true nor false")


@reading({"enum": [True, False, *_TRUTH, AUTO]})
def boolean_or_auto(written: object) -> bool | Auto:
    """Read true or false as `boolean` does, or AUTO."""
    if written == AUTO:
        return AUTO
    try:
        return boolean(written)
    except ValueError:
        raise ValueError(f"{written!r} is neither true nor false nor {AUTO}") from None


def choice(*allowed: str) -> Reading[str]:
    """Return a `Reading` that accepts a word of `allowed`."""

    @reading({"enum": list(allowed)})
    def parse(written: object) -> str:
        if isinstance(written, str) and written in allowed:
            return written
        raise ValueError(f"{written!r} is not one of {', '.join(allowed)}")

    return parse


def choices(*allowed: str, exclusive: str = "") -> Reading[tuple[str, ...]]:
    """Return a `Reading` of some of `allowed`, or `exclusive` alone: text split at commas, or a list; in order, each once."""
    words = (*allowed, exclusive) if exclusive else allowed
    schema = {"anyOf": [part for group in (allowed, (exclusive,)) if all(group) for part in _lists_of(group)]}

    @reading(schema)
    def parse(written: object) -> tuple[str, ...]:
        items = tuple(dict.fromkeys(texts(written)))
        for item in items:
            if item not in words:
                raise ValueError(f"{item!r} is not one of {', '.join(words)}")
        if not items:
            raise ValueError(f"needs at least one of {', '.join(words)}")
        if exclusive in items and len(items) > 1:
            others = ", ".join(item for item in items if item != exclusive)
            raise ValueError(f"{exclusive!r} excludes the others: leave it out, or leave out {others}")
        return items

    return parse


def _lists_of(words: Sequence[str]) -> list[Mapping[str, object]]:
    """Return JSON Schemas of text with some of these words, split at commas, and of a list of these words."""
    one = "|".join(re.escape(word) for word in words)
    return [
        {"type": "string", "pattern": f"^[ ,]*({one})( *,[ ,]*({one}))*[ ,]*$"},
        {"type": "array", "items": {"enum": [*words]}, "minItems": 1},
        {"type": "array", "items": {"type": "string", "pattern": rf"^\s*({one})?\s*$"}, "minItems": 1},
    ]


@reading(TEXTS)
def texts(written: object) -> tuple[str, ...]:
    """Read text split at commas, or a list of texts, without blanks around items and without empty items."""
    items = written if isinstance(written, list | tuple) else text(written).split(",")
    return tuple(stripped for item in items if (stripped := text(item).strip()))


@reading(TEXTS)
def host_names(written: object) -> tuple[str, ...]:
    """Read host names as `texts` does, in lower case. A name with the prefix `*.` matches any name below it."""
    names = []
    for item in texts(written):
        name = item.lower().removesuffix(".")
        if not _HOST.fullmatch(name.removeprefix("*.")):
            raise ValueError(f"{item!r} is not the name of a host, such as gpus.example.com or *.example.com")
        names.append(name)
    return tuple(dict.fromkeys(names))


@reading({"anyOf": [{"enum": ["", "0", 0, AUTO]}, {"type": "array", "items": {"enum": [0, "0"]}, "maxItems": 1}]})
def imex_channels(written: object) -> tuple[int, ...] | Auto:
    """Read no IMEX channel, channel 0, or AUTO. NVIDIA's plugin knows only channel 0."""
    if written == AUTO:
        return AUTO
    items = (
        written if isinstance(written, list | tuple) else texts(str(written) if isinstance(written, int) else written)
    )
    for item in items:
        if not _INTEGER.fullmatch(str(item).strip()):
            raise ValueError(f"{item!r} is not a whole number")
    numbers = [int(str(item)) for item in items]
    if numbers not in ([], [0]):
        raise ValueError(f"channel IDs must be [] or [0], not {numbers}")
    return tuple(numbers)


@reading({"type": "string", "pattern": r"^([^\n\u0000]*:\d{1,5})?$"})
def listen_address(written: object) -> str:
    """Read a HOST:PORT to listen on that `host_and_port` can split, or an empty text."""
    value = text(written)
    if value:
        host_and_port(value)
    return value


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT, split at the last colon. Brackets around an IPv6 address are optional.

    An empty host means all addresses of the machine. Raises ValueError with the reason if the text is not HOST:PORT.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not re.fullmatch(r"\d{1,5}", port, re.ASCII):
        raise ValueError(
            f"{address!r} is not HOST:PORT, such as 10.0.0.7:9480, [fd00::7]:9480, or :9480 for all addresses"
        )
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"{address!r}: the port must be between 1 and 65535")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare or bare != host:
        from ipaddress import IPv6Address  # noqa: PLC0415 - 3 ms, rarely needed

        try:
            IPv6Address(bare)
        except ValueError:
            raise ValueError(f"{address!r}: {host} is not an IPv6 address") from None
    elif bare and not _HOST.fullmatch(bare):
        raise ValueError(f"{address!r}: {host!r} is neither an address nor the name of a host")
    return bare, int(port)


@reading({"type": "number", "minimum": 1, "maximum": 100})
def percentage(written: object) -> float:
    """Read a percentage from 1 to 100."""
    if not isinstance(written, int | float) or isinstance(written, bool) or not 1 <= written <= 100:
        raise ValueError(f"{written!r} is not a percentage from 1 to 100")
    return float(written)


@reading({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^0*[1-9]\d{0,8}[MG]i$"}]})
def memory_mib(written: object) -> int:
    """Read an amount of memory in MiB, from text such as 8Gi or 8192Mi, or a number of MiB."""
    size = written if isinstance(written, int) and not isinstance(written, bool) else 0
    form = _MEMORY.fullmatch(written) if isinstance(written, str) else None
    if form:
        size = int(form[1]) * _MIB[form[2]]
    if size < 1:
        raise ValueError(f"{written!r} is not an amount of memory such as 8Gi, 8192Mi or 8192 (MiB)")
    return size


def duration(low: float, high: float) -> Reading[float]:
    """Return a `Reading` of text such as 200ms, 5m or 1h30m, which returns seconds between `low` and `high`."""

    @reading({"type": "string", "pattern": r"^((\d+(\.\d+)?|\.\d+)(ms|s|m|h))+$"})
    def parse(written: object) -> float:
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
    """Return seconds as a text that `duration` reads back without rounding."""
    for unit in ("h", "m", "s"):
        if seconds >= _SECONDS[unit] and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    shorter = f"{seconds * 1000:g}ms"
    if seconds < 1 and "e" not in shorter and _seconds(shorter) == seconds:
        return shorter
    # repr would write an exponent, which a duration must not have: write more digits than a float has.
    return f"{seconds:.30f}s" if "e" in repr(seconds) else f"{seconds!r}s"
