"""The rules of signals that judge by their own readings.

With `level`, a number of bad readings in a row opens the latch, and a number or a time of good readings closes it. With `graded`,
each look has a grade (OK, DEGRADED or FATAL), and the verdict follows a grade that lasts.

"""

from typing import ClassVar, Self, TypeVar

from msgspec.structs import replace

from gpu_plugin.health.latch import CLEAN_SAMPLES, Count, Latch, Memory, Proof, Recovery, Verdict
from gpu_plugin.health.signal import Context

# Seconds to which the time of the last event is rounded when it is stored, so that a storm of events is stored seldom
MINUTE = 60.0


class Level(Memory, frozen=True):
    """`row` counts bad readings in a row before the latch opens, and good ones after; or they were good since `quiet_since`."""

    row: Count = 0
    quiet_since: float | None = None

    progress: ClassVar[tuple[str, ...]] = ("row", "quiet_since")

    @property
    def gathering(self) -> bool:
        """True if a row has begun."""
        return self.row > 0

    @property
    def lasting(self) -> bool:
        """True if there were bad readings, but too few to open: the next process continues to count."""
        return self.row > 0


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
    """Return the latch after a reading that is `bad`, good (False) or missing (None). `fresh` is the memory of a new latch.

    The latch opens after `enter` bad readings in a row, with the words of the last. It closes after `leave` good readings in a
    row or, with `leave_seconds`, after readings that were good for that time. A latch of Proof.RMA closes only if the GPU was
    enumerated again or an operator overrode it. A missing reading ends every row and proves nothing. A worse verdict applies
    at once, with its words and its proof. A better verdict never applies.
    """
    if latch is None or latch.verdict is Verdict.OK:
        if not bad:
            return None
        row = 1 + (latch.memory.row if latch else 0)
        if row < enter:
            return Latch(replace(latch.memory if latch else fresh, row=row))
        return Latch(fresh, verdict, detail, ctx.now, proof, Recovery(ctx.marks))
    if bad and verdict > latch.verdict:
        return latch.renewed(
            latch.memory.without(Level.progress), ctx.marks, verdict=verdict, detail=detail, proof=proof
        )
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
    """Return the latch without its progress towards closing; the same object if there was none."""
    memory = latch.memory.without(Level.progress)
    return latch if memory is latch.memory else replace(latch, memory=memory)


def recent(times: tuple[float, ...], now: float, within: float, most: int = 64) -> tuple[float, ...]:
    """Return the last `most` of these times (Unix seconds, oldest first) that are at most `within` seconds old."""
    return tuple(at for at in times if now - at <= within)[-most:]


class Graded(Memory, frozen=True):
    """The grades of the last looks, the newest last.

    `row` counts the latest looks in a row whose grade differs from the verdict, `worse` those whose grade is worse.
    """

    looks: tuple[Verdict, ...] = ()
    row: Count = 0
    worse: Count = 0

    @property
    def gathering(self) -> bool:
        """True if the last looks have another grade than the verdict."""
        return self.row > 0

    @property
    def lasting(self) -> bool:
        """True if there were looks with a bad grade, but too few to open: the next process continues to count."""
        return bool(self.looks)

    @property
    def counted(self) -> object:
        """The looks that are stored."""
        return self.stored_open()

    def stored_open(self) -> Self:
        """Return the memory with only the latest looks that were worse than the verdict."""
        return replace(self, looks=self.looks[-self.worse :] if self.worse else (), row=self.worse)

    def after_boot(self) -> Self:
        """Return the memory without its looks."""
        return self.without(("looks", "row", "worse"))


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
    """Return the latch after a look of this `grade`. None means a missing reading, which ends every row and proves nothing.

    The verdict rises to the best grade of the last `enter` looks, and falls to the worst grade of the last three. So FATAL can
    become DEGRADED as well as OK. `detail` are the words of this look, `fresh` is the memory of a new latch.
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
    """Return the memory after these looks, of a latch that now has this verdict."""
    same = max((at for at, look in enumerate(looks, 1) if look is verdict), default=0)
    better = max((at for at, look in enumerate(looks, 1) if look <= verdict), default=0)
    return replace(memory, looks=looks, row=len(looks) - same, worse=len(looks) - better)
