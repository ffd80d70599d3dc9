"""The driver does not answer for the GPU: calls fail with an error that no other signal covers."""

from typing import ClassVar, Self

from msgspec.structs import replace

from gpu_plugin.health.latch import Count, Latch, Memory, Moment, Verdict, merged
from gpu_plugin.health.observation import Fault, Sample
from gpu_plugin.health.signal import KERNEL_LOG, Context, SignalKind, signal

FAILURES = 3  # failed looks that are DEGRADED
AMONG = 5  # the failed looks must be among this number of looks
WITHIN = 120.0  # seconds in which they happen
FATAL_AFTER = 10  # failed looks that are FATAL
GOOD = 5  # good looks in a row that close the latch


class Answers(Memory, frozen=True):
    """Outcomes of the last looks: `looks` has a bit for each, the last look lowest, 1 for a failure.

    `failures` has the Unix times in seconds of the failures among the last five looks, or since the latch opened. `row` is the
    number of latest looks in a row with the same outcome, 0 after a failure of a latch that is FATAL.
    """

    looks: Count = 0
    failures: tuple[Moment, ...] = ()
    row: Count = 0

    unstored: ClassVar[tuple[str, ...]] = ("row",)

    @property
    def gathering(self) -> bool:
        """True if the next look may change the verdict."""
        return self.row > 0

    @property
    def lasting(self) -> bool:
        """True if looks failed, but too few to open: the next process continues to count."""
        return bool(self.failures)

    @property
    def counted_closed(self) -> object:
        """The outcomes of the last looks, and the times of the failures: looks that all fail, but seldom, have one outcome."""
        return self.looks, self.failures

    @property
    def counted(self) -> object:
        """The number of failures."""
        return len(self.failures)

    def stored_open(self) -> Self:
        """Return the memory without the row of equal outcomes."""
        return replace(self, row=0, looks=self.looks | 1)

    def joined(self, other: Self) -> Self:
        """Return the memory with the other's failures added."""
        return replace(self, failures=merged(self.failures, other.failures, FATAL_AFTER))


@signal("unanswered", SignalKind.READING, KERNEL_LOG, memory=Answers(), clears="it answers five times in a row")
def unanswered(latch: Latch[Answers] | None, seen: Sample, ctx: Context) -> Latch[Answers] | None:
    """DEGRADED if three of five looks within two minutes failed, FATAL at the tenth failure; closes after five good in a row.

    A look fails if the driver cannot read the GPU, or refuses a core reading that the part supports. If a temperature or an
    energy was read nevertheless, the look only counts for DEGRADED. Other faults have signals of their own: such looks neither
    fail nor succeed, and end a row of good looks.
    """
    if seen.fault and seen.fault is not Fault.ERROR:
        unproven = latch is not None and latch.memory.row
        return replace(latch, memory=replace(latch.memory, row=0)) if latch is not None and unproven else latch
    if latch is None and seen.core_answered:
        return None
    known = latch or Latch(Answers())
    memory = known.memory
    bad = not seen.core_answered
    alike = bool(memory.looks & 1) is bad
    row = memory.row + 1 if alike else 1
    looks = (memory.looks << 1 | bad) & (1 << AMONG) - 1
    if not bad:
        if row >= GOOD:
            return None
        return replace(known, memory=Answers(looks, _recent(known, looks), row))
    times = _recent(known, looks >> 1)
    if seen.failed or known.verdict is Verdict.OK:
        times = (*times, ctx.now)
    verdict = _verdict(known.verdict, times, ctx.now)
    after = Answers(looks, times[-FATAL_AFTER:], 0 if verdict is Verdict.FATAL else row)
    if verdict is known.verdict:
        return replace(known, memory=after)
    since = ctx.now if known.verdict is Verdict.OK else known.since
    refused = f"the driver refuses to read {', '.join(sorted(seen.refused)).replace('_', ' ')}"
    return known.renewed(after, verdict=verdict, detail=seen.detail or refused, since=since)


def _recent(known: Latch[Answers], looks: int) -> tuple[float, ...]:
    """Return the failures of an open latch, or the failures of a closed latch that are among these looks."""
    failures = known.memory.failures
    if known.verdict is not Verdict.OK:
        return failures
    kept = looks.bit_count()
    return failures[-kept:] if kept else ()


def _verdict(known: Verdict, times: tuple[float, ...], now: float) -> Verdict:
    if known is Verdict.OK:
        together = len(times) >= FAILURES and 0 <= now - times[-FAILURES] <= WITHIN
        return Verdict.DEGRADED if together else Verdict.OK
    return Verdict.FATAL if len(times) >= FATAL_AFTER else known
