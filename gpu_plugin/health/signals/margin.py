"""Heat, measured as the distance of the GPU from its T.Limit, for parts whose limits are not plain temperatures."""

from typing import ClassVar, Self

from msgspec.structs import replace

from gpu_plugin.health.hysteresis import Measure, Measured, level, measured
from gpu_plugin.health.latch import Latch, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import COOL, Case, Context, SignalKind, signal

NEAR_DEGREES = 2  # °C from shutdown that are too near
SAMPLES_NEAR = 2  # samples in a row too near to shutdown that are FATAL
SAMPLES_SLOW = 4  # samples in a row at slowdown that are DEGRADED
ABOVE = 5  # °C above slowdown that are cool
COOL_SECONDS = 120.0  # for which the GPU must be cool to close the latch


class MarginMemory(Measured, frozen=True):
    """The memory of a working sensor, which has reported a value above 0.

    `near` is True if a look was too near to shutdown, and all looks since were at slowdown.
    """

    near: bool = False

    lasting: ClassVar[bool] = True  # a latch records that the sensor works

    @property
    def counted(self) -> object:
        """The worst readings, and `near`, with which the next look may open the latch as FATAL."""
        return self.near, super().counted

    def stored_open(self) -> Self:
        """Return the memory with the worst readings and `near`."""
        return replace(super().stored_open(), row=int(self.near))


def cooled(case: Case) -> str:
    """Return words for people about the readings that close the latch."""
    cool = (_relative(case.facts.margins.slowdown) or 0) + ABOVE
    seconds = case.policy.temperature_recovery
    unfit = f" ({seconds:g} s if it was FATAL)" if seconds != COOL_SECONDS else ""
    return f"it stays {cool} °C or more below its T.Limit for {COOL_SECONDS:g} s{unfit}"


@signal("margin", SignalKind.READING, COOL, memory=MarginMemory(), asks=("margin",), clears=cooled)
def margin(latch: Latch[MarginMemory] | None, seen: Sample, ctx: Context) -> Latch[MarginMemory] | None:
    """FATAL 2 °C from shutdown in two samples, DEGRADED at slowdown in four; closes after a time 5 °C above slowdown.

    The time is two minutes, or `--temperature-recovery` if the latch was FATAL. The limits are NVML's fields 193 (shutdown) and
    194 (slowdown), negative numbers beyond T.Limit. The slowdown limit is 0 if the part does not report one. If the part
    reports no shutdown limit, the verdict is never FATAL. A sensor without any value above 0 is broken, as on some H100s, and is
    ignored: only a working sensor has a latch, which stays.
    """
    left = seen.margin
    if latch is None:
        return Latch(MarginMemory()) if left is not None and left > 0 else None
    shutdown, slowdown = _relative(ctx.facts.margins.shutdown), _relative(ctx.facts.margins.slowdown)
    now_near = left is not None and shutdown is not None and left <= shutdown + NEAR_DEGREES
    slow = 0 if slowdown is None else slowdown
    unfit = now_near and latch.memory.near
    near = now_near or (latch.memory.near and left is not None and left <= slow)
    bad: bool | None = None
    if left is not None and (now_near or left <= slow):
        bad = True
    elif left is not None and left >= slow + ABOVE:
        bad = False
    known = level(
        latch,
        ctx,
        MarginMemory(),
        bad=bad,
        verdict=Verdict.FATAL if unfit else Verdict.DEGRADED,
        detail="",
        enter=SAMPLES_NEAR if unfit else SAMPLES_SLOW,
        leave_seconds=ctx.policy.temperature_recovery if latch.verdict is Verdict.FATAL else COOL_SECONDS,
    )
    if known is None:
        return latch if latch == _COOL else _COOL
    row = 1 if near and known.verdict is Verdict.DEGRADED else known.memory.row
    memory = replace(known.memory, near=near, row=row)
    known = known if memory == known.memory else replace(known, memory=memory)
    fatal = known.verdict is Verdict.FATAL
    at = Measure("margin", "shutdown" if fatal else "slowdown", shutdown if fatal else slow, left, bool(bad))
    return measured(known, latch, seen, [at])


_COOL = Latch(MarginMemory())


def _relative(limit: int | None) -> int | None:
    """Return a limit that is beyond T.Limit, else None: a part at full load reaches its T.Limit without a fault."""
    return limit if limit is not None and limit < 0 else None
