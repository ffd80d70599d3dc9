"""What operators ask for: a GPU cordoned, or released for maintenance."""

from gpu_plugin.health.context import Context
from gpu_plugin.health.latch import Latch, Proof, Verdict
from gpu_plugin.health.observation import Observation, Order, Sample

RELEASED = "maintenance"
RESUMED = "resumed; no good look at it yet"


def cordon(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Opens and closes by the operator's word alone."""
    if not isinstance(seen, Order):
        return latch
    if seen.verb == "cordon":
        return latch or Latch(Verdict.FATAL, "cordoned", ctx.now, Proof.OPERATOR)
    return None if seen.verb == "uncordon" else latch


def maintenance(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Opens on release; closes on the first good look after resume. `value` is 1 once resume was asked for."""
    if isinstance(seen, Order) and seen.verb == "release":
        if latch is not None and not latch.value:
            return latch
        return Latch(Verdict.FATAL, RELEASED, latch.since if latch else ctx.now, Proof.OPERATOR)
    if latch is None:
        return None
    if isinstance(seen, Order):
        resumed = seen.verb == "resume" and not latch.value
        return Latch(Verdict.FATAL, RESUMED, latch.since, Proof.READING, value=1) if resumed else latch
    return None if latch.value and isinstance(seen, Sample) and not seen.fault else latch
