"""Counters that only grow until a reset sets them back: how much they grew, and how often that was lately."""

from typing import Self

from msgspec.structs import replace

from gpu_plugin.health.hysteresis import Level, lately
from gpu_plugin.health.observation import Sample

Totals = tuple[int | None, ...]
"""Counters as they were read, in an order of the signal's own; None where one was not to be had."""


class Counted(Level, frozen=True):
    """Counters as they were last read, and when (Unix seconds) the last of the events that are tallied happened.

    Counters are read anew after a restart: what happened meanwhile is not counted, nor what held nothing against the GPU yet.
    """

    totals: Totals = ()
    times: tuple[float, ...] = ()

    @property
    def gathering(self) -> bool:
        """Nothing is settled by another look soon."""
        return False

    def written(self) -> Self:
        """The events."""
        return replace(self, row=0, quiet_since=None, totals=())

    def shifted(self, by: float) -> Self:
        """With the events' times shifted."""
        return replace(self, times=tuple(at + by for at in self.times))


def read(known: Counted | None, seen: Sample, first: str, second: str) -> Totals:
    """Two counters as of this look, by the names of their fields; one that it did not ask for is as it was last read."""
    now = (getattr(seen, first), getattr(seen, second))
    if seen.asked is None:
        return now
    before = known.totals if known is not None and known.totals else (None, None)
    return (now[0] if seen.tells(first) else before[0], now[1] if seen.tells(second) else before[1])


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
