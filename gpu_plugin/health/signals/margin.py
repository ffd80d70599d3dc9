"""Heat, by how far the GPU is from its T.Limit: the measure of parts whose limits are not plain temperatures."""

from typing import ClassVar, Self

from msgspec.structs import replace

from gpu_plugin.health.hysteresis import Measure, Measured, level, measured
from gpu_plugin.health.latch import Latch, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import COOL, Case, Context, SignalKind, signal

NEAR_DEGREES = 2  # °C from shutdown that are too near
SAMPLES_NEAR = 2  # too near in a row that are FATAL
SAMPLES_SLOW = 4  # at slowdown in a row that are DEGRADED
ABOVE = 5  # °C above slowdown that are cool
COOL_SECONDS = 120.0  # for which it must be cool to close


class MarginMemory(Measured, frozen=True):
    """Of a sensor that has shown something above 0 once. `near`: a look was too near to shutdown, and all since at slowdown."""

    near: bool = False

    lasting: ClassVar[bool] = True  # that the sensor works is worth keeping

    @property
    def counted(self) -> object:
        """How bad it was, and whether the next look may make it worse."""
        return self.near, super().counted

    def stored_open(self) -> Self:
        """How bad it was, and whether the next look may make it worse."""
        return replace(super().stored_open(), row=int(self.near))


def cooled(case: Case) -> str:
    """Words for people on what closes the latch."""
    cool = (_relative(case.facts.margins.slowdown) or 0) + ABOVE
    seconds = case.policy.temperature_recovery
    unfit = f" ({seconds:g} s where it was FATAL)" if seconds != COOL_SECONDS else ""
    return f"{cool} °C or more to its T.Limit, at every look for {COOL_SECONDS:g} s{unfit}"


@signal("margin", SignalKind.READING, COOL, memory=MarginMemory(), asks=("margin",), clears=cooled)
def margin(latch: Latch[MarginMemory] | None, seen: Sample, ctx: Context) -> Latch[MarginMemory] | None:
    """FATAL 2 °C from shutdown in two samples, DEGRADED at slowdown in four; closes after a time 5 °C above slowdown.

    The time is two minutes, or `--temperature-recovery` where it was FATAL. The limits are NVML's fields 193 (shutdown) and
    194 (slowdown), negative numbers beyond T.Limit. Its own 0 stands in for a slowdown that the part does not say; where it
    says no shutdown, nothing is FATAL. A sensor that has never shown anything above 0 is broken, as some H100s' are, and
    ignored: a latch is kept of one that has.
    """
    left = seen.margin
    if latch is None:
        return Latch(MarginMemory()) if left is not None and left > 0 else None
    shutdown, slowdown = _relative(ctx.facts.margins.shutdown), _relative(ctx.facts.margins.slowdown)
    now_near, slow = _near(left, shutdown), 0 if slowdown is None else slowdown
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


def _near(left: int | None, shutdown: int | None) -> bool:
    return left is not None and shutdown is not None and left <= shutdown + NEAR_DEGREES


def _relative(limit: int | None) -> int | None:
    """A limit beyond T.Limit. None lies before it: a part at full load comes as close as that, and means it no harm."""
    return limit if limit is not None and limit < 0 else None
