"""The rule of signals that judge two counters, which only grow until a reset sets them back.

Any growth of the first counter counts. Growth of the second counts if it exceeds a limit within a time.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Self

from msgspec.structs import replace

from gpu_plugin.health.hysteresis import MINUTE, Level, recent, unproven
from gpu_plugin.health.latch import Latch, Moment, Verdict, merged
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import Context

# The readings of both counters, None for a missing reading. Empty if neither was ever read.
Totals = tuple[int | None, ...]


class Counters(NamedTuple):
    """The two counters, by their fields of `Sample`. More than `limit` of the second in `within` seconds are too many."""

    first: str
    second: str
    limit: int
    within: float


class Counted(Level, frozen=True):
    """The last readings of the counters, and the Unix times in seconds of the latest events of the second one.

    `noted` is the Unix time in seconds of the last change that had to be stored. Growth since then, and growth while no process
    runs, is counted at the first look after a restart. The counters are compared over openings of the driver, too: a counter
    that was set back starts at 0, so a greater value is always of new errors.
    """

    totals: Totals = ()
    times: tuple[Moment, ...] = ()
    noted: Moment | None = None

    gathering: ClassVar[bool] = False  # an early look decides nothing

    @property
    def lasting(self) -> bool:
        """True if a counter was read, so that the next look can be compared with it."""
        return any(total is not None for total in self.totals)

    @property
    def counted_closed(self) -> object:
        """The time of the last change that had to be stored."""
        return self.noted

    counted = counted_closed

    def joined(self, other: Self) -> Self:
        """Return the memory with the other's events added."""
        return replace(self, times=merged(self.times, other.times))

    def read(self, seen: Sample, counters: Counters) -> Totals:
        """Return both counters after this look. A counter that the look did not request keeps its last reading."""
        before = self.totals or (None, None)
        names = (counters.first, counters.second)
        return tuple(
            getattr(seen, name) if seen.asked_for(name) else old for name, old in zip(names, before, strict=True)
        )

    def after(self, now: Totals, at: float, counters: Counters) -> tuple[tuple[int, ...], Self]:
        """Return the growth of each counter at these readings of Unix time `at`, and the new memory.

        The memory is the same object if nothing changed. A counter that is read for the first time, is missing or was set back
        has not grown. A missing counter keeps its last reading. A first reading, a counter that was set back and growth of the
        first counter are stored at once, growth of the second counter once a minute.
        """
        pairs = list(zip(self.totals or (None, None), now, strict=True))
        growth = tuple(0 if new is None or old is None else max(0, new - old) for old, new in pairs)
        totals = tuple(old if new is None else new for old, new in pairs)
        most = counters.limit + 1
        times = recent((*self.times, *(at,) * min(growth[1], most)), at, counters.within, most)
        if (totals, times) == (self.totals, self.times):
            return growth, self
        due = totals != self.totals and (self.noted is None or not 0 <= at - self.noted < MINUTE)
        begun = any(new is not None and (old is None or new < old) for old, new in pairs)
        noted = at if due or growth[0] or begun else self.noted
        return growth, replace(self, totals=totals, times=times, noted=noted)


# (latch, memory of a new latch, growth of the first counter, `bad` of `level`) → latch
Judge = Callable[[Latch[Counted], Counted, int, bool | None], Latch[Counted] | None]


def counted(
    latch: Latch[Counted] | None, seen: Sample, ctx: Context, counters: Counters, judge: Judge
) -> Latch[Counted] | None:
    """Return the latch after a look at two counters, judged by `judge`."""
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
