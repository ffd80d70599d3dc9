"""Delivery of the driver's events to this process."""

from msgspec.structs import replace

from gpu_plugin.health.latch import NOTHING, Latch, Memory, Verdict
from gpu_plugin.health.observation import DriverEvent, EventDelivery, XidEvent
from gpu_plugin.health.signal import Context, SignalKind, signal


@signal(
    "events",
    SignalKind.READING,
    "look at the log of the plugin and of the kernel; reload the driver if this continues",
    sees=(EventDelivery, XidEvent, DriverEvent),
    clears="the driver delivers events again",
)
def events(
    latch: Latch[Memory] | None, seen: EventDelivery | XidEvent | DriverEvent, ctx: Context
) -> Latch[Memory] | None:
    """Opens when the wait for events keeps failing; closes when it works again, or an event came.

    It is never FATAL, because looks still show most faults, though not the number of an Xid.
    """
    if isinstance(seen, EventDelivery) and seen.trouble:
        words = f"the driver's events do not reach us, health relies on polling: {seen.trouble}"
        if latch is None:
            return Latch(NOTHING, Verdict.DEGRADED, words, ctx.now)
        return replace(latch, detail=words)
    return None
