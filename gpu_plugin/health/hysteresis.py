"""The rules of signals that judge by their own readings.

One is that so many bad ones in a row open, and so much good closes. The other is of readings that are graded: each look says OK,
DEGRADED or FATAL, and the verdict follows what lasts. A signal that goes by a measure also tells its numbers: the worst that was
read, what was read last, and its limit.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple, Self, TypeVar

import msgspec
from msgspec.structs import replace

from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, Memory, Proof, Recovery, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import Context

MINUTE = 60.0
"""Seconds: how finely the time of the last of many events is written down."""


class Level(Memory, frozen=True):
    """How long readings were alike: bad ones in a row before it opens, good ones since (`row`, or from `quiet_since` on)."""

    row: int = 0
    quiet_since: float | None = None

    @property
    def gathering(self) -> bool:
        """Whether a row has begun."""
        return self.row > 0

    @property
    def lasting(self) -> bool:
        """Whether there were bad readings, which are not enough yet: the next process goes on from them."""
        return self.row > 0

    def stored_open(self) -> Self:
        """The memory without the good readings since."""
        return _restarted(self)


LEVEL = Level()

L = TypeVar("L", bound=Level)


def level(
    latch: Latch[L] | None,
    ctx: Context,
    fresh: L,
    *,
    bad: bool | None,
    verdict: Verdict,
    detail: str,
    enter: int = 1,
    leave: int = 1,
    leave_seconds: float = 0.0,
    proof: Proof = Proof.READING,
) -> Latch[L] | None:
    """The latch after a reading that was `bad`, good (False), or not to be had (None). `fresh` is the memory of a new one.

    Opens after `enter` bad readings in a row, with the words of the last. Closes after `leave` good ones in a row or, with
    `leave_seconds`, once they have been good for so long; a latch of Proof.RMA only once the GPU was enumerated again, or an
    operator overrides it. A reading that is not to be had ends every row and proves nothing. A worse verdict is taken over
    at once, with its words and its proof, a better one never.
    """
    if latch is None or latch.verdict is Verdict.OK:
        if not bad:
            return None
        row = 1 + (latch.memory.row if latch else 0)
        if row < enter:
            return Latch(replace(latch.memory if latch else fresh, row=row))
        return Latch(fresh, verdict, detail, ctx.now, proof, Recovery(ctx.marks))
    if bad and verdict > latch.verdict:
        return latch.renewed(_restarted(latch.memory), ctx.marks, verdict=verdict, detail=detail, proof=proof)
    if bad or bad is None:
        return unproven(latch)
    if latch.proof is Proof.RMA and not (latch.recovery.rebound or latch.overridden):
        return latch
    memory = latch.memory
    if not leave_seconds:
        return None if memory.row + 1 >= leave else replace(latch, memory=replace(memory, row=memory.row + 1))
    since = ctx.now if memory.quiet_since is None else memory.quiet_since
    if ctx.now - since >= leave_seconds:
        return None
    return latch if since == memory.quiet_since else replace(latch, memory=replace(memory, quiet_since=since))


def unproven(latch: Latch[L]) -> Latch[L]:
    """The latch with nothing gathered yet of what closes it; the very same one where nothing was."""
    memory = _restarted(latch.memory)
    return latch if memory is latch.memory else replace(latch, memory=memory)


def lately(times: tuple[float, ...], now: float, within: float, most: int = 64) -> tuple[float, ...]:
    """Of these times (Unix seconds, oldest first) the last `most` that are not older than `within` seconds."""
    return tuple(at for at in times if now - at <= within)[-most:]


def _restarted(memory: L) -> L:
    return replace(memory, row=0, quiet_since=None) if memory.row or memory.quiet_since is not None else memory


class Graded(Memory, frozen=True):
    """The grades of the last looks, the newest last.

    `row` is how many of them in a row were other than the verdict, `worse` how many in a row were worse.
    """

    looks: tuple[Verdict, ...] = ()
    row: int = 0
    worse: int = 0

    @property
    def gathering(self) -> bool:
        """Whether the last looks speak for another verdict."""
        return self.row > 0

    @property
    def lasting(self) -> bool:
        """Whether there were bad looks, which are not enough yet: the next process goes on from them."""
        return bool(self.looks)

    @property
    def counted(self) -> object:
        """The looks that are written down."""
        return self.stored_open()

    def stored_open(self) -> Self:
        """The memory without the looks that speak for a better verdict since."""
        return replace(self, looks=self.looks[-self.worse :] if self.worse else (), row=self.worse)

    def after_boot(self) -> Self:
        """The memory without its looks."""
        return replace(self, looks=(), row=0, worse=0)


GRADED = Graded()

G = TypeVar("G", bound=Graded)


def graded(
    latch: Latch[G] | None,
    ctx: Context,
    fresh: G,
    *,
    grade: Verdict | None,
    detail: str,
    enter: int = 1,
) -> Latch[G] | None:
    """The latch after a look of this `grade`; None: it was not to be had, which ends every row and proves nothing.

    The verdict rises to what the last `enter` looks all came to at least, and falls to what the last three came to at
    most: so FATAL becomes DEGRADED where that is what is left, and not only OK. `detail` is what this look says, `fresh` the
    memory of a new latch.
    """
    if latch is None and grade is Verdict.OK:
        return None
    is_open = latch is not None and latch.verdict is not Verdict.OK
    if grade is None:
        if latch is None or not is_open:
            return None
        memory = latch.memory
        return replace(latch, memory=memory.after_boot()) if memory.looks else latch
    known = latch or Latch(fresh)
    looks = (*known.memory.looks, grade)[-max(enter, CLEAN_SAMPLES) :]
    risen = min(looks[-enter:]) if len(looks) >= enter else Verdict.OK
    if risen > known.verdict:
        memory = _noted(known.memory, looks, risen)
        if is_open:
            return known.renewed(memory, verdict=risen, detail=detail)
        return Latch(memory, risen, detail, ctx.now, recovery=Recovery(ctx.marks))
    if (
        is_open
        and len(looks) >= CLEAN_SAMPLES
        and max(looks[-CLEAN_SAMPLES:]) < known.verdict
        and grade is max(looks[-CLEAN_SAMPLES:])
    ):
        if grade is Verdict.OK:
            return None
        return replace(known, verdict=grade, detail=detail, memory=_noted(known.memory, looks, grade))
    if not is_open and max(looks) is Verdict.OK:
        return None
    words = detail if is_open and grade is known.verdict else known.detail
    changed = replace(known, detail=words, memory=_noted(known.memory, looks, known.verdict))
    return latch if changed == latch else changed


def _noted(memory: G, looks: tuple[Verdict, ...], verdict: Verdict) -> G:
    """The memory after these looks, of a latch that has come to this verdict."""
    same = max((at for at, look in enumerate(looks, 1) if look is verdict), default=0)
    better = max((at for at, look in enumerate(looks, 1) if look <= verdict), default=0)
    return replace(memory, looks=looks, row=len(looks) - same, worse=len(looks) - better)


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


R = TypeVar("R", bound=Measured)


def measured(
    latch: Latch[R] | None, before: Latch[R] | None, seen: Sample, measures: Iterable[Measure]
) -> Latch[R] | None:
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
