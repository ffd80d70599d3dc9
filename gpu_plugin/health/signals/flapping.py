"""A guard over all other signals: what keeps coming and going holds its GPU back for a time."""

import re
from typing import ClassVar, Self

from msgspec.structs import replace

from gpu_plugin.config.times import duration, utc
from gpu_plugin.health.hysteresis import lately
from gpu_plugin.health.latch import Latch, Memory, Moment, Span, Verdict, merged
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import Case, Context, OperatorInfluence, SignalKind, signal

NAME = "flapping"

TIMES = 3  # FATAL so often is flapping
WITHIN = 3600.0  # seconds in which it is counted
LONGEST = 86400.0  # seconds that a GPU is held back at most
CALM = 86400.0  # seconds of calm after which it is forgotten


class HealthDrops(Memory, frozen=True):
    """When (Unix seconds) a signal became FATAL lately, and for how many seconds the GPU was held back last; 0: never."""

    times: tuple[Moment, ...] = ()
    hold: Span = 0.0

    lasting: ClassVar[bool] = True  # a restart of the plugin is no calm

    @property
    def news(self) -> object:
        """For how long it was held back: another drop is news by the signal that dropped."""
        return self.hold

    def joined(self, other: Self) -> Self:
        """The memory with those drops too."""
        return replace(self, times=merged(self.times, other.times), hold=max(self.hold, other.hold))


def clears(case: Case) -> str:
    """Words for people on what ends a hold."""
    end = until(case.latch)
    if case.now >= end or not case.policy.flap_hold:
        return "the next good look at it"
    return f"time: it is held back until {utc(end)}, {duration(end - case.now)} from now"


@signal(
    NAME,
    SignalKind.GUARD,
    "find out what keeps failing before the GPU is used again",
    memory=HealthDrops(),
    clears=clears,
    parts=re.compile(".{1,200}"),
    say=OperatorInfluence.ENABLED,
)
def flapping(latch: Latch[HealthDrops] | None, seen: Sample, ctx: Context) -> Latch[HealthDrops] | None:
    """Closes on a good look once its time, from `since` on, is over, and is remembered for a day of calm.

    It opens by `after_drop`, whichever signal it was; there is one latch for each, of which `key.part` is the name. A new boot,
    and an operator who wants no guard, end it early.
    """
    if latch is None:
        return None
    memory = latch.memory
    if latch.since > ctx.now or (memory.times and memory.times[-1] > ctx.now):
        # The clock was set back while nobody looked: what would then last for too long begins again
        times = tuple(min(at, ctx.now) for at in memory.times)
        return replace(latch, since=min(latch.since, ctx.now), memory=replace(memory, times=times))
    over = ctx.now >= until(latch) or not ctx.policy.flap_hold or latch.recovery.rebound
    if latch.verdict is not Verdict.OK:
        return latch if not seen.core_answered or not over else Latch(HealthDrops(hold=memory.hold), since=latch.since)
    calm = CALM if memory.hold else WITHIN
    last = max((until(latch), *memory.times[-1:]))
    return latch if ctx.now - last < calm else None


def until(latch: Latch[HealthDrops]) -> float:
    """When the time that a GPU is held back for is over, or was: Unix time in seconds."""
    return latch.since + latch.memory.hold


def after_drop(latch: Latch[HealthDrops] | None, signal: str, now: float, hold: float) -> Latch[HealthDrops]:
    """The guard's latch after a signal became FATAL: `hold` seconds for the third time in an hour, double for the next.

    Where it is no flapping yet, `verdict` is OK and the times count.
    """
    known = latch or Latch(HealthDrops())
    times = lately((*known.memory.times, now), now, WITHIN)
    if known.verdict is Verdict.OK and len(times) < TIMES:
        return Latch(replace(known.memory, times=times), since=known.since)
    seconds = min(LONGEST, 2 * known.memory.hold or hold)
    words = f"{signal} made it unfit {max(len(times), TIMES)} times; it is held back for {duration(seconds)}"
    return Latch(HealthDrops(times, seconds), Verdict.FATAL, words, now)
