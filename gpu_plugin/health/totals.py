"""The rule of signals that go by two counters, which only grow until a reset sets them back.

Each growth of the first counts by itself; growth of the second counts where there was too much of it lately.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Self

from msgspec.structs import replace

from gpu_plugin.health.hysteresis import MINUTE, Level, lately, unproven
from gpu_plugin.health.latch import Latch, Moment, Verdict, merged
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import Context

Totals = tuple[int | None, ...]
"""Both counters as they were read; None where one was not to be had. Empty: neither was ever read."""


class Counters(NamedTuple):
    """The two counters, by their fields of `Sample`: more than `limit` of the second within so many seconds are too many."""

    first: str
    second: str
    limit: int
    within: float


class Counted(Level, frozen=True):
    """Counters as they were last read, and when (Unix seconds) the last of the events that are tallied happened.

    `noted` is when (Unix seconds) they were last worth writing down. What they grew by since then is counted again at the first
    look after a restart, as is what happened meanwhile. They are compared whoever opened the driver: what sets them back sets
    them to 0, so that more than before is always of errors since.
    """

    totals: Totals = ()
    times: tuple[Moment, ...] = ()
    noted: Moment | None = None

    gathering: ClassVar[bool] = False  # nothing is settled by another look soon

    @property
    def lasting(self) -> bool:
        """Whether there is something to compare with."""
        return any(total is not None for total in self.totals)

    @property
    def news(self) -> object:
        """When they were last worth it."""
        return self.noted

    counted = news

    def joined(self, other: Self) -> Self:
        """The memory with those events too."""
        return replace(self, times=merged(self.times, other.times))

    def read(self, seen: Sample, counters: Counters) -> Totals:
        """Both counters as of this look; one that it did not ask for is as it was last read."""
        before = self.totals or (None, None)
        names = (counters.first, counters.second)
        return tuple(
            getattr(seen, name) if seen.asked_for(name) else old for name, old in zip(names, before, strict=True)
        )

    def after(self, now: Totals, at: float, counters: Counters) -> tuple[tuple[int, ...], Self]:
        """By how much each counter grew, now that they read so at Unix time `at`, and what is to be remembered.

        The same object where nothing changed. One that is read for the first time, is not to be had, or was set back has not
        grown; one that is not to be had is remembered as it was. A counter that was never read before or was set back is worth
        writing down at once, as is growth of the first; that of the second is so once a minute.
        """
        pairs = list(zip(self.totals or (None, None), now, strict=True))
        growth = tuple(0 if new is None or old is None else max(0, new - old) for old, new in pairs)
        totals = tuple(old if new is None else new for old, new in pairs)
        most = counters.limit + 1
        times = lately((*self.times, *(at,) * min(growth[1], most)), at, counters.within, most)
        if (totals, times) == (self.totals, self.times):
            return growth, self
        due = totals != self.totals and (self.noted is None or not 0 <= at - self.noted < MINUTE)
        begun = any(new is not None and (old is None or new < old) for old, new in pairs)
        noted = at if due or growth[0] or begun else self.noted
        return growth, replace(self, totals=totals, times=times, noted=noted)


Judge = Callable[[Latch[Counted], Counted, int, bool | None], Latch[Counted] | None]
"""(latch, memory of a new one, growth of the first counter, whether the reading is bad as `level` has it) → latch."""


def counted(
    latch: Latch[Counted] | None, seen: Sample, ctx: Context, counters: Counters, judge: Judge
) -> Latch[Counted] | None:
    """The latch after a look at two counters, of which `judge` decides what their growth means."""
    known = latch or Latch(Counted())
    now = known.memory.read(seen, counters)
    if latch is not None and latch.verdict is Verdict.OK and now == latch.memory.totals and not latch.memory.times:
        return latch
    growth, memory = known.memory.after(now, ctx.now, counters)
    bad: bool | None = bool(growth[0]) or (growth[1] > 0 and len(memory.times) > counters.limit)
    lacking = any(new is None and old is not None for old, new in zip(memory.totals, now, strict=True))
    unread = memory.totals == (None, None)
    known = replace(known, memory=memory)
    fresh = unproven(known).memory
    after = judge(known, fresh, growth[0], bad or (None if lacking or unread else False))
    if after is None and not unread:
        after = Latch(fresh)
    return latch if after == latch else after
