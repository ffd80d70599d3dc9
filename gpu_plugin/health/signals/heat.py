"""Heat at which the hardware slows itself down."""

from msgspec.structs import replace

from gpu_plugin.health.hysteresis import Measure, Measured, level, measured
from gpu_plugin.health.latch import Latch, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import COOL, Context, SignalKind, signal

SAMPLES = 4  # hot samples in a row that open the latch
BELOW = 5  # °C below the limit that are cool
COOL_SECONDS = 120.0  # for which all sensors must be cool to close it
_GPU = 1  # bits of `HeatMemory.sensors`
_MEMORY = 2


class HeatMemory(Measured, frozen=True):
    """`sensors` is a mask of the sensors that were hot."""

    sensors: int = 0


@signal(
    "slowdown-temperature",
    SignalKind.READING,
    COOL,
    memory=HeatMemory(),
    asks=("temperature", "memory_temperature"),
    clears="GPU and memory are 5 °C below their limits for two minutes",
)
def slowdown_temperature(latch: Latch[HeatMemory] | None, seen: Sample, ctx: Context) -> Latch[HeatMemory] | None:
    """Opens if four samples reach the GPU's slowdown threshold, or the highest temperature of its memory.

    Closes once both are 5 °C below for two minutes. The latch stays open while a sensor that was hot cannot be read. A sensor
    that the part does not have is ignored.
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
