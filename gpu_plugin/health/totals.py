"""Counters that only grow until a reset sets them back: how much they grew, and how often that was lately."""

from typing import ClassVar, Self

from msgspec.structs import replace

from gpu_plugin.health.hysteresis import MINUTE, Level, lately
from gpu_plugin.health.latch import Moment, merged
from gpu_plugin.health.observation import Sample

Totals = tuple[int | None, ...]
"""Counters as they were read, in an order of the signal's own; None where one was not to be had."""


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
        """With those events too."""
        return replace(self, times=merged(self.times, other.times))

    def after(self, now: Totals, at: float, within: float, limit: int) -> tuple[tuple[int, ...], Self]:
        """By how much each counter grew, now that they read so at Unix time `at`, and what is to be remembered.

        The second is the one whose events are tallied, by `within` and `limit` as in `tally`. The same object where nothing
        changed. A counter that was never read before or was set back is worth writing down at once, as is what grew by an
        error that counts by itself; a tally that grows is so once a minute.
        """
        growth, totals = grown(self.totals, now)
        times = tally(self.times, growth[1], at, within, limit)
        if (totals, times) == (self.totals, self.times):
            return growth, self
        due = self.noted is None or not 0 <= at - self.noted < MINUTE
        due = due and totals != self.totals
        if due or growth[0] or _begun(self.totals, totals):
            return growth, replace(self, totals=totals, times=times, noted=at)
        return growth, replace(self, totals=totals, times=times)


def read(known: Counted | None, seen: Sample, first: str, second: str) -> Totals:
    """Two counters as of this look, by the names of their fields; one that it did not ask for is as it was last read."""
    now = (getattr(seen, first), getattr(seen, second))
    if seen.asked is None:
        return now
    before = known.totals if known is not None and known.totals else (None, None)
    return (now[0] if seen.asked_for(first) else before[0], now[1] if seen.asked_for(second) else before[1])


def grown(last: Totals, now: Totals) -> tuple[tuple[int, ...], Totals]:
    """By how much each counter grew since it was last read, and what is to be remembered of them.

    One that is read for the first time, was not to be had, or was set back has not grown; the latter two differ in that what is
    remembered is the former reading, or the new one. An empty `last` means that none was ever read.
    """
    known = last or (None,) * len(now)
    growth = tuple(
        max(0, new - old) if new is not None and old is not None else 0 for old, new in zip(known, now, strict=True)
    )
    return growth, tuple(old if new is None else new for old, new in zip(known, now, strict=True))


def _begun(before: Totals, now: Totals) -> bool:
    """Whether a counter was read for the first time, or was set back."""
    known = before or (None,) * len(now)
    return any(new is not None and (old is None or new < old) for old, new in zip(known, now, strict=True))


def unread(remembered: Totals, now: Totals) -> bool:
    """Whether the counters say nothing of an end: one that was once read is not to be had now, or none ever was."""
    return any(new is None and old is not None for old, new in zip(remembered, now, strict=True)) or not any(
        old is not None for old in remembered
    )


def tally(times: tuple[float, ...], count: int, now: float, within: float, limit: int) -> tuple[float, ...]:
    """The times (Unix seconds) of the last events, `count` more having come now; longer than `limit` where there are too many.

    Too many are more than `limit` within so many seconds; more than that are not remembered.
    """
    return lately((*times, *(now,) * min(count, limit + 1)), now, within, limit + 1)
