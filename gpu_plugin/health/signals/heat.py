"""Heat at which the hardware slows itself down."""

from msgspec.structs import replace

from gpu_plugin.health.hysteresis import Measure, Measured, level, measured
from gpu_plugin.health.latch import Latch, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import COOL, Context, SignalKind, signal

SAMPLES = 4  # hot ones in a row that open
BELOW = 5  # °C below the limit that are cool
COOL_SECONDS = 120.0  # for which all must be cool to close

_GPU = 1  # bits of `HeatMemory.sensors`
_MEMORY = 2


class HeatMemory(Measured, frozen=True):
    """`sensors` is a mask of those that were hot."""

    sensors: int = 0


@signal(
    "slowdown-temperature",
    SignalKind.READING,
    COOL,
    memory=HeatMemory(),
    asks=("temperature", "memory_temperature"),
    clears="GPU and memory 5 °C below their limits for two minutes",
)
def slowdown_temperature(latch: Latch[HeatMemory] | None, seen: Sample, ctx: Context) -> Latch[HeatMemory] | None:
    """Opens at the GPU's slowdown threshold, or its memory's highest temperature, in four samples; closes on coolness.

    Closes once both are 5 °C below for two minutes. A sensor that was hot and can not be read proves nothing, while one
    that the part has not got is not waited for.
    """
    limits = ctx.facts.thresholds
    hot = warm = unread = 0
    measures = []
    for sensor, name, celsius, limit in (
        (_GPU, "temperature", seen.temperature, limits.slowdown),
        (_MEMORY, "memory_temperature", seen.memory_temperature, limits.memory_max),
    ):
        if celsius is None or limit is None:
            unread |= sensor
        elif celsius >= limit:
            hot |= sensor
        elif celsius > limit - BELOW:
            warm |= sensor
        measures.append(Measure(name, "slowdown", limit, celsius, bool(hot & sensor)))
    were = latch.memory.sensors if latch is not None else 0
    cool = None if warm or were & unread or unread == _GPU | _MEMORY else False
    known = level(
        latch,
        ctx,
        HeatMemory(),
        bad=True if hot else cool,
        verdict=Verdict.DEGRADED,
        detail="",
        enter=SAMPLES,
        leave_seconds=COOL_SECONDS,
    )
    known = measured(known, latch, seen, measures)
    if not hot or known is None or known.verdict is Verdict.OK or known.memory.sensors == were | hot:
        return known
    return replace(known, memory=replace(known.memory, sensors=were | hot))
