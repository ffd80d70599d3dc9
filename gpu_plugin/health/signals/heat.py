"""Heat at which the hardware slows itself down."""

from msgspec.structs import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.hysteresis import Level, level
from gpu_plugin.health.latch import Latch, Verdict
from gpu_plugin.health.observation import Observation, Sample

SAMPLES, BELOW, COOL_SECONDS = 4, 5, 120.0
"""Hot samples in a row that open; how far below its limit, °C, and for how long everything must be to close."""

_GPU, _MEMORY = 1, 2


class Hot(Level, frozen=True):
    """`sensors` is a mask of those that were hot."""

    sensors: int = 0


def slowdown_temperature(latch: Latch[Hot] | None, seen: Observation, ctx: Context) -> Latch[Hot] | None:
    """Opens at the GPU's slowdown threshold, or its memory's highest temperature, in four samples; closes on coolness.

    Closes once both are 5 °C below for two minutes. A sensor that was hot and can not be read proves nothing, while one
    that the part has not got is not waited for.
    """
    if not isinstance(seen, Sample):
        return latch
    limits = ctx.facts.thresholds
    hot = warm = unread = 0
    words = ""
    for sensor, name, celsius, limit in (
        (_GPU, "GPU", seen.temperature, limits.slowdown),
        (_MEMORY, "memory", seen.memory_temperature, limits.memory_max),
    ):
        if celsius is None or limit is None:
            unread |= sensor
        elif celsius >= limit:
            hot |= sensor
            words = f"{words} and " if words else ""
            words += f"{name} at {celsius} °C, it slows down at {limit} °C"
        elif celsius > limit - BELOW:
            warm |= sensor
    were = latch.memory.sensors if latch is not None else 0
    cool = None if warm or were & unread or unread == _GPU | _MEMORY else False
    known = level(
        latch,
        ctx,
        Hot(),
        bad=True if hot else cool,
        verdict=Verdict.DEGRADED,
        detail=words,
        enter=SAMPLES,
        leave_seconds=COOL_SECONDS,
    )
    if not hot or known is None or known.verdict is Verdict.OK or known.memory.sensors == were | hot:
        return known
    return replace(known, memory=replace(known.memory, sensors=were | hot))
