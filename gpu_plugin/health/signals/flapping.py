"""A guard over all other signals: a signal that keeps opening and closing holds its GPU back for a time."""

import re
from typing import ClassVar, Self

from msgspec.structs import replace

from gpu_plugin.config.times import duration, utc
from gpu_plugin.health.hysteresis import recent
from gpu_plugin.health.latch import Latch, Memory, Moment, Span, Verdict, merged
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import Case, Context, OperatorInfluence, SignalKind, signal

NAME = "flapping"

TIMES = 3  # changes to FATAL that are flapping
WITHIN = 3600.0  # seconds in which changes are counted
LONGEST = 86400.0  # longest hold in seconds
CALM = 86400.0  # seconds without a change after which the history is dropped


class HealthDrops(Memory, frozen=True):
    """The Unix times in seconds at which a signal recently became FATAL, and the last hold in seconds, 0 before the first."""

    times: tuple[Moment, ...] = ()
    hold: Span = 0.0

    lasting: ClassVar[bool] = True  # a restart of the plugin must not end the history

    @property
    def counted_closed(self) -> object:
        """The last hold. The signal that became FATAL stores the drop itself."""
        return self.hold

    def joined(self, other: Self) -> Self:
        """Return the memory with the other's drops added."""
        return replace(self, times=merged(self.times, other.times), hold=max(self.hold, other.hold))


def clears(case: Case) -> str:
    """Return words for people about the end of a hold."""
    end = until(case.latch)
    if case.now >= end or not case.policy.flap_hold:
        return "a check succeeds"
    return f"its hold ends at {utc(end)}, {duration(end - case.now)} from now"


@signal(
    NAME,
    SignalKind.GUARD,
    "find out what keeps failing before the GPU is used again",
    memory=HealthDrops(),
    clears=clears,
    parts=re.compile(".{1,200}"),
    influence=OperatorInfluence.ENABLED,
)
def flapping(latch: Latch[HealthDrops] | None, seen: Sample, ctx: Context) -> Latch[HealthDrops] | None:
    """Closes on a good look once the hold, which starts at `since`, is over. Its history is kept for a day of calm.

    `after_drop` opens it. Each signal has its own latch, with the signal's name as `key.part`. A new boot ends the hold early,
    and so does an operator who turns the guard off.
    """
    if latch is None:
        return None
    memory = latch.memory
    if latch.since > ctx.now or (memory.times and memory.times[-1] > ctx.now):
        # The clock was set back while no process ran: the hold starts again now, or it would last too long
        times = tuple(min(at, ctx.now) for at in memory.times)
        return replace(latch, since=min(latch.since, ctx.now), memory=replace(memory, times=times))
    over = ctx.now >= until(latch) or not ctx.policy.flap_hold or latch.recovery.rebound
    if latch.verdict is not Verdict.OK:
        return latch if not seen.core_answered or not over else Latch(HealthDrops(hold=memory.hold), since=latch.since)
    calm = CALM if memory.hold else WITHIN
    last = max((until(latch), *memory.times[-1:]))
    return latch if ctx.now - last < calm else None


def until(latch: Latch[HealthDrops]) -> float:
    """Return the Unix time in seconds at which the hold ends or ended."""
    return latch.since + latch.memory.hold


def after_drop(latch: Latch[HealthDrops] | None, signal: str, now: float, hold: float) -> Latch[HealthDrops]:
    """Return the guard's latch after a signal became FATAL. The third time in an hour holds the GPU for `hold` seconds.

    Each further time doubles the hold. Before the third time, `verdict` is OK and the times are counted.
    """
    known = latch or Latch(HealthDrops())
    times = recent((*known.memory.times, now), now, WITHIN)
    if known.verdict is Verdict.OK and len(times) < TIMES:
        return Latch(replace(known.memory, times=times), since=known.since)
    seconds = min(LONGEST, 2 * known.memory.hold or hold)
    words = f"{signal} made it unfit {max(len(times), TIMES)} times; it is held back for {duration(seconds)}"
    return Latch(HealthDrops(times, seconds), Verdict.FATAL, words, now)
