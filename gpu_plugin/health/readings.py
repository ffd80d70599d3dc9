"""The numbers behind a signal that goes by a measure: the worst that was read, what was read last, and its limit."""

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple, Self, TypeVar

import msgspec
from msgspec.structs import replace

from gpu_plugin.health.hysteresis import Level
from gpu_plugin.health.latch import Latch, Verdict
from gpu_plugin.health.observation import Sample

Celsius = Annotated[int, msgspec.Meta(ge=-1000, le=1000)]
"""°C, within what any sensor can say."""


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The readings of one measure, in °C.

    `name` is its field of `Sample`: temperature, memory_temperature or margin. `threshold` is what the hardware does something
    at, and `limit` what that is: shutdown or slowdown. `worst` is the highest temperature, or the lowest margin, since it came
    near that. `now` is what the last look read; None: it could not, or there was none since the start of this process.
    """

    name: str
    limit: str
    threshold: Celsius
    worst: Celsius
    now: Celsius | None = None


class Measured(Level, frozen=True):
    """`readings` has those measures that came near their limit."""

    readings: tuple[Reading, ...] = ()

    @property
    def counted(self) -> object:
        """How bad it was."""
        return tuple((each.name, each.limit, each.worst) for each in self.readings)

    def stored_open(self) -> Self:
        """The memory without the last readings: the next process looks for itself."""
        return replace(super().stored_open(), readings=tuple(replace(each, now=None) for each in self.readings))


class Measure(NamedTuple):
    """One measure at one look: `celsius` is None where it was not read; `near`: so near its limit that it counts."""

    name: str
    limit: str
    threshold: int | None
    celsius: int | None
    near: bool


M = TypeVar("M", bound=Measured)


def measured(
    latch: Latch[M] | None, before: Latch[M] | None, seen: Sample, measures: Iterable[Measure]
) -> Latch[M] | None:
    """The latch with what this look read, and its words; `before` is what it was. The very same one where nothing changes."""
    if latch is None:
        return None
    known = {each.name: each for each in before.memory.readings} if before is not None else {}
    # What was never near its limit says nothing.
    found = tuple(reading for each in measures if (reading := _read(known.get(each.name), seen, each)) is not None)
    detail = spelled(found, now=False) if latch.verdict is not Verdict.OK and found else latch.detail
    if found == latch.memory.readings and detail == latch.detail:
        return latch
    return replace(latch, memory=replace(latch.memory, readings=found), detail=detail)


def spelled(readings: Sequence[Reading], *, now: bool = True) -> str:
    """For people: `97 °C at its peak, 88 °C now, shutdown threshold 92 °C`. Without `now` it stays true until it is worse."""
    return "; ".join(_spelled(each, now=now) for each in readings)


def _read(known: Reading | None, seen: Sample, at: Measure) -> Reading | None:
    if at.celsius is None:
        return replace(known, now=None) if known is not None and seen.asked_for(at.name) else known
    threshold = at.threshold if at.threshold is not None else known.threshold if known is not None else None
    if threshold is None or (known is None and not at.near):
        return None
    worse = min if at.name == "margin" else max
    worst = at.celsius if known is None else worse(at.celsius, known.worst)
    return Reading(at.name, at.limit, threshold, worst, at.celsius)


def _spelled(reading: Reading, *, now: bool) -> str:
    worst = "°C to its T.Limit at worst" if reading.name == "margin" else "°C at its peak"
    of = "memory " if reading.name == "memory_temperature" else ""
    last = "" if not now else ", not read now" if reading.now is None else f", {reading.now} °C now"
    return f"{of}{reading.worst} {worst}{last}, {reading.limit} threshold {reading.threshold} °C"
