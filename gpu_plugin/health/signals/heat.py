"""Heat: temperatures and margins that come near the limits at which the hardware slows down or shuts down.

A latch also has the numbers of its measures: the worst reading, the latest reading and the limit.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, Self, TypeVar

import msgspec
from msgspec.structs import replace

from gpu_plugin.health.hysteresis import Level, level
from gpu_plugin.health.latch import Celsius, Count, Latch, Verdict
from gpu_plugin.health.observation import Facts, Sample
from gpu_plugin.health.signal import COOL, Case, Context, SignalKind, signal

NEAR_DEGREES = 2  # °C from shutdown that are too near
BELOW = 5  # °C from slowdown that are cool
COOL_SECONDS = 120.0  # for which a GPU that slowed down must be cool

_GPU = 1  # bits of `HeatMemory.sensors`
_MEMORY = 2


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The readings of one measure, in °C.

    `name` is its field of `Sample`: temperature, memory_temperature or margin. `threshold` is the value at which the hardware
    acts, and `limit` its action: shutdown or slowdown. `worst` is the highest temperature, or the lowest margin, since the
    measure came near the threshold. `now` is the reading of the last look; None if it failed, or if this process has not
    looked yet.
    """

    name: str
    limit: str
    threshold: Celsius
    worst: Celsius
    now: Celsius | None = None


class Measured(Level, frozen=True):
    """`readings` has the measures that came near their limit."""

    readings: tuple[Reading, ...] = ()

    @property
    def counted(self) -> object:
        """The worst reading of each measure."""
        return tuple((each.name, each.limit, each.worst) for each in self.readings)

    def stored_open(self) -> Self:
        """Return the memory without the last readings: the next process reads its own."""
        return replace(super().stored_open(), readings=tuple(replace(each, now=None) for each in self.readings))


class Measure(NamedTuple):
    """One measure at one look: `celsius` is None if it was not read; `near` is True if it is near its limit."""

    name: str
    limit: str
    threshold: int | None
    celsius: int | None
    near: bool


R = TypeVar("R", bound=Measured)


def measured(
    latch: Latch[R] | None, before: Latch[R] | None, seen: Sample, measures: Iterable[Measure]
) -> Latch[R] | None:
    """Return the latch with this look's readings and words; the same object if nothing changed.

    `before` is the latch before this look.
    """
    if latch is None:
        return None
    known = {each.name: each for each in before.memory.readings} if before is not None else {}
    # Leave out measures that never came near their limit
    found = tuple(reading for each in measures if (reading := _read(known.get(each.name), seen, each)) is not None)
    detail = spelled(found, now=False) if latch.verdict is not Verdict.OK and found else latch.detail
    if found == latch.memory.readings and detail == latch.detail:
        return latch
    return replace(latch, memory=replace(latch.memory, readings=found), detail=detail)


def spelled(readings: Sequence[Reading], *, now: bool = True) -> str:
    """Return words for people: `too hot: 97 °C at its peak, 88 °C now (it shuts down at 92 °C)`.

    Without `now` the words stay true until there is a worse reading.
    """
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
    acts = "shuts down" if reading.limit == "shutdown" else "slows down"
    of = "memory " if reading.name == "memory_temperature" else ""
    if reading.name == "margin":
        over = reading.threshold - reading.worst
        side = "above" if over > 0 else "below"
        return f"too hot: {abs(over)} °C {side} the temperature at which it {acts}"
    last = "" if not now else ", not read now" if reading.now is None else f", {reading.now} °C now"
    return f"too hot: {of}{reading.worst} °C at its peak{last} (it {acts} at {reading.threshold} °C)"


def _cooled(case: Case) -> str:
    """Return words for people about the readings that close the latch."""
    cool, seconds = _coolness(case.facts), case.policy.temperature_recovery
    below = f"below {cool} °C" if cool is not None else "low"
    return f"its temperature stays {below} for {seconds:g} s" if seconds else f"its temperature is {below}"


@signal("temperature", SignalKind.READING, COOL, memory=Measured(), asks=("temperature",), clears=_cooled)
def temperature(latch: Latch[Measured] | None, seen: Sample, ctx: Context) -> Latch[Measured] | None:
    """Opens after two samples at 2 °C under the shutdown threshold; closes after a time 5 °C under the slowdown threshold.

    A sample between the slowdown threshold and 2 °C under shutdown does not end a row of hot samples. Otherwise a GPU that
    alternates between the two would never open the latch.
    """
    shutdown, celsius = ctx.facts.thresholds.shutdown, seen.temperature
    cool = _coolness(ctx.facts)
    bad = None
    if shutdown is not None and cool is not None and celsius is not None:
        bad = (
            True if celsius >= shutdown - NEAR_DEGREES else False if celsius < cool else None
        )  # a temperature in between proves nothing
    slowdown = None if cool is None else cool + BELOW
    warned = latch is not None and latch.verdict is Verdict.OK and latch.memory.row > 0  # the next sample decides
    if bad is None and celsius is not None and slowdown is not None and celsius >= slowdown and warned:
        return latch
    known = level(
        latch,
        ctx,
        Measured(),
        bad=bad,
        verdict=Verdict.FATAL,
        detail="",
        enter=2,
        leave_seconds=ctx.policy.temperature_recovery,
    )
    return measured(known, latch, seen, [Measure("temperature", "shutdown", shutdown, celsius, bool(bad))])


def _coolness(facts: Facts) -> int | None:
    """Return the °C below which a GPU that was too hot is cool; None for a part that names no shutdown threshold."""
    shutdown, slowdown = facts.thresholds.shutdown, facts.thresholds.slowdown
    if shutdown is None:
        return None
    return (shutdown - BELOW if slowdown is None else min(slowdown, shutdown)) - BELOW


class HeatMemory(Measured, frozen=True):
    """`sensors` is a mask of the sensors that were hot."""

    sensors: Count = 0


@signal(
    "slowdown-temperature",
    SignalKind.READING,
    COOL,
    memory=HeatMemory(),
    asks=("temperature", "memory_temperature"),
    clears="GPU and memory are 5 °C below their limits for two minutes",
)
def slowdown_temperature(latch: Latch[HeatMemory] | None, seen: Sample, ctx: Context) -> Latch[HeatMemory] | None:
    """Opens if four samples reach the GPU's slowdown threshold, or the highest temperature of its memory.

    Closes once both are 5 °C below for two minutes. The latch stays open while a formerly hot sensor cannot be read. A sensor
    that the part does not have is ignored.
    """
    limits = ctx.facts.thresholds
    hot = warm = unread = 0
    measures = []
    for sensor, name, celsius, limit in (
        (_GPU, "temperature", seen.temperature, limits.slowdown),
        (_MEMORY, "memory_temperature", seen.memory_temperature, limits.memory_max),
    ):
        if celsius is None or limit is None:
            unread |= sensor
        elif celsius >= limit:
            hot |= sensor
        elif celsius > limit - BELOW:
            warm |= sensor
        measures.append(Measure(name, "slowdown", limit, celsius, bool(hot & sensor)))
    were = latch.memory.sensors if latch is not None else 0
    cool = None if warm or were & unread or unread == _GPU | _MEMORY else False
    known = level(
        latch,
        ctx,
        HeatMemory(),
        bad=True if hot else cool,
        verdict=Verdict.DEGRADED,
        detail="",
        enter=4,
        leave_seconds=COOL_SECONDS,
    )
    known = measured(known, latch, seen, measures)
    if not hot or known is None or known.verdict is Verdict.OK or known.memory.sensors == were | hot:
        return known
    return replace(known, memory=replace(known.memory, sensors=were | hot))


class MarginMemory(Measured, frozen=True):
    """The memory of a working sensor, which has reported a value above 0.

    `near` is True if a look was too near to shutdown, and all looks since were at slowdown.
    """

    near: bool = False

    lasting: ClassVar[bool] = True  # a latch records that the sensor works

    @property
    def counted(self) -> object:
        """The worst readings, and `near`, with which the next look may open the latch as FATAL."""
        return self.near, super().counted

    def stored_open(self) -> Self:
        """Return the memory with the worst readings and `near`."""
        return replace(super().stored_open(), row=int(self.near))


def _margin_cooled(case: Case) -> str:
    """Return words for people about the readings that close the latch."""
    cool = (_relative(case.facts.margins.slowdown) or 0) + BELOW
    seconds = case.policy.temperature_recovery
    unfit = f" ({seconds:g} s if it was FATAL)" if seconds != COOL_SECONDS else ""
    return f"it stays {cool} °C or more below its T.Limit for {COOL_SECONDS:g} s{unfit}"


@signal("margin", SignalKind.READING, COOL, memory=MarginMemory(), asks=("margin",), clears=_margin_cooled)
def margin(latch: Latch[MarginMemory] | None, seen: Sample, ctx: Context) -> Latch[MarginMemory] | None:
    """FATAL 2 °C from shutdown in two samples, DEGRADED at slowdown in four; closes after a time 5 °C above slowdown.

    The time is two minutes, or `--temperature-recovery` if the latch was FATAL. The limits are NVML's fields 193 (shutdown) and
    194 (slowdown), negative numbers beyond T.Limit. The slowdown limit is 0 if the part does not report one. If the part
    reports no shutdown limit, the verdict is never FATAL. A sensor without any value above 0 is broken, as on some H100s, and is
    ignored: only a working sensor has a latch, which stays.
    """
    left = seen.margin
    if latch is None:
        return Latch(MarginMemory()) if left is not None and left > 0 else None
    shutdown, slowdown = _relative(ctx.facts.margins.shutdown), _relative(ctx.facts.margins.slowdown)
    now_near = left is not None and shutdown is not None and left <= shutdown + NEAR_DEGREES
    slow = 0 if slowdown is None else slowdown
    unfit = now_near and latch.memory.near
    near = now_near or (latch.memory.near and left is not None and left <= slow)
    bad: bool | None = None
    if left is not None and (now_near or left <= slow):
        bad = True
    elif left is not None and left >= slow + BELOW:
        bad = False
    known = level(
        latch,
        ctx,
        MarginMemory(),
        bad=bad,
        verdict=Verdict.FATAL if unfit else Verdict.DEGRADED,
        detail="",
        enter=2 if unfit else 4,
        leave_seconds=ctx.policy.temperature_recovery if latch.verdict is Verdict.FATAL else COOL_SECONDS,
    )
    if known is None:
        return latch if latch == _COOL else _COOL
    row = 1 if near and known.verdict is Verdict.DEGRADED else known.memory.row
    memory = replace(known.memory, near=near, row=row)
    known = known if memory == known.memory else replace(known, memory=memory)
    fatal = known.verdict is Verdict.FATAL
    at = Measure("margin", "shutdown" if fatal else "slowdown", shutdown if fatal else slow, left, bool(bad))
    return measured(known, latch, seen, [at])


_COOL = Latch(MarginMemory())


def _relative(limit: int | None) -> int | None:
    """Return a limit beyond T.Limit, else None: a part at full load reaches its T.Limit without a fault."""
    return limit if limit is not None and limit < 0 else None
