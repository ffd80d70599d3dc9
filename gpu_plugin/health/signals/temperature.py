"""Heat at which the hardware is about to shut down, by the GPU's own thresholds."""

from gpu_plugin.health.hysteresis import Measure, Measured, level, measured
from gpu_plugin.health.latch import Latch, Verdict
from gpu_plugin.health.observation import Facts, Sample
from gpu_plugin.health.signal import COOL, Case, Context, SignalKind, signal

NEAR_DEGREES = 2  # °C under shutdown that are too near
SAMPLES = 2  # samples in a row that are too near
BELOW = 5  # °C under slowdown that are cool


def cooled(case: Case) -> str:
    """Return words for people about the readings that close the latch."""
    cool, seconds = coolness(case.facts), case.policy.temperature_recovery
    below = f"below {cool} °C" if cool is not None else "low"
    return f"its temperature stays {below} for {seconds:g} s" if seconds else f"its temperature is {below}"


@signal("temperature", SignalKind.READING, COOL, memory=Measured(), asks=("temperature",), clears=cooled)
def temperature(latch: Latch[Measured] | None, seen: Sample, ctx: Context) -> Latch[Measured] | None:
    """Opens after two samples at 2 °C under the shutdown threshold; closes after a time 5 °C under the slowdown threshold.

    A sample between the slowdown threshold and 2 °C under shutdown does not end a row of hot samples. Otherwise a GPU that
    alternates between the two would never open the latch.
    """
    shutdown, celsius = ctx.facts.thresholds.shutdown, seen.temperature
    cool = coolness(ctx.facts)
    bad = None
    if shutdown is not None and cool is not None and celsius is not None:
        bad = (
            True if celsius >= shutdown - NEAR_DEGREES else False if celsius < cool else None
        )  # a temperature in between proves nothing
    slowdown = None if cool is None else cool + BELOW
    warned = latch is not None and latch.verdict is Verdict.OK and latch.memory.row > 0  # the next sample decides
    if bad is None and celsius is not None and slowdown is not None and celsius >= slowdown and warned:
        return latch
    known = level(
        latch,
        ctx,
        Measured(),
        bad=bad,
        verdict=Verdict.FATAL,
        detail="",
        enter=SAMPLES,
        leave_seconds=ctx.policy.temperature_recovery,
    )
    return measured(known, latch, seen, [Measure("temperature", "shutdown", shutdown, celsius, bool(bad))])


def coolness(facts: Facts) -> int | None:
    """Return the °C below which a GPU that was too hot is cool; None for a part that names no shutdown threshold."""
    shutdown, slowdown = facts.thresholds.shutdown, facts.thresholds.slowdown
    if shutdown is None:
        return None
    return (shutdown - BELOW if slowdown is None else min(slowdown, shutdown)) - BELOW
