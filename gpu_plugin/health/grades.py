"""The rule of signals whose readings are graded: each look says OK, DEGRADED or FATAL, and the verdict follows what lasts."""

from typing import Self, TypeVar

from msgspec.structs import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, Memory, Recovery, Verdict


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
