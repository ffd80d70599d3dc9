"""The driver does not answer for the GPU: a call hangs, or fails for no reason of its own."""

from typing import Self

from msgspec.structs import replace

from gpu_plugin.health.hysteresis import LEVEL, Level, level
from gpu_plugin.health.latch import CLEAN_SAMPLES, REBOOT, Latch, Memory, Moment, Verdict, merged
from gpu_plugin.health.observation import Fault, Sample
from gpu_plugin.health.signal import KERNEL_LOG, Context, OperatorInfluence, SignalKind, signal

FAILURES = 3  # failed looks that are DEGRADED
AMONG = 5  # looks that they are among
WITHIN = 120.0  # seconds in which they happen
FATAL_AFTER = 10  # failed looks that are FATAL
GOOD = 5  # good looks in a row that end it


class Answers(Memory, frozen=True):
    """Outcomes of the last looks: `looks` has a bit each, the last one lowest, 1 for a failure.

    `failures` are when (Unix seconds) they failed, as long as they are among the last five looks, or since it opened. `row` is
    how many the last look was in a row with those like it, 0 where it failed and there is nothing worse to come.
    """

    looks: int = 0
    failures: tuple[Moment, ...] = ()
    row: int = 0

    @property
    def gathering(self) -> bool:
        """Whether another look would tell."""
        return self.row > 0

    @property
    def lasting(self) -> bool:
        """Whether looks failed, which are not enough yet: the next process goes on from them."""
        return bool(self.failures)

    @property
    def news(self) -> object:
        """Which of the last looks failed."""
        return self.looks

    @property
    def counted(self) -> object:
        """How many failed."""
        return len(self.failures)

    def stored(self) -> Self:
        """The failures, and no good looks in a row."""
        return replace(self, row=0)

    def stored_open(self) -> Self:
        """The failures, and no good looks in a row."""
        return replace(self, row=0, looks=self.looks | 1)

    def joined(self, other: Self) -> Self:
        """The memory with those failures too."""
        return replace(self, failures=merged(self.failures, other.failures, FATAL_AFTER))


@signal("hung", SignalKind.READING, REBOOT, memory=LEVEL, say=OperatorInfluence.NOBODY, clears="three answers in a row")
def hung(latch: Latch[Level] | None, seen: Sample, ctx: Context) -> Latch[Level] | None:
    """Opens when a call has not come back in time; closes on three good looks in a row."""
    bad = True if seen.fault is Fault.HUNG else False if seen.core_answered else None
    return level(latch, ctx, LEVEL, bad=bad, verdict=Verdict.FATAL, detail=seen.detail, leave=CLEAN_SAMPLES)


@signal("unanswered", SignalKind.READING, KERNEL_LOG, memory=Answers(), clears="five answers in a row")
def unanswered(latch: Latch[Answers] | None, seen: Sample, ctx: Context) -> Latch[Answers] | None:
    """DEGRADED once three of five looks within two minutes failed, FATAL at the tenth that did; closes on five good in a row.

    A look fails if the driver cannot read the GPU, or refuses a core reading that the part supports. If a temperature or an
    energy was read nevertheless, the look counts for DEGRADED alone. Other faults have a signal of their own: such looks count
    neither way, and end a row of good ones.
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
    return known.renewed(after, verdict=verdict, detail=seen.detail or _words(seen), since=since)


def _words(seen: Sample) -> str:
    return f"the driver refuses to read {', '.join(sorted(seen.refused)).replace('_', ' ')}"


def _recent(known: Latch[Answers], looks: int) -> tuple[float, ...]:
    """Its failures; of a latch that is not open only those among these looks."""
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
