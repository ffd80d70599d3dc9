"""Events of the driver, other than Xids, that report a failing GPU, and the delivery of all events."""

import re
from collections.abc import Mapping
from typing import ClassVar

from msgspec.structs import replace

from gpu_plugin.devices.nvml_h import EventType
from gpu_plugin.health.latch import NOTHING, RESET, Latch, Memory, Proof, Recovery, Verdict
from gpu_plugin.health.observation import DriverEvent, EventDelivery, Sample, XidEvent
from gpu_plugin.health.proof import after_recovery
from gpu_plugin.health.signal import Context, SignalKind, signal

QUIET_SECONDS = 86400.0  # Seconds without another event of the kind that close a latch that needs no reset

FATAL: Mapping[int, str] = {
    EventType.DRAM_RETIREMENT_FAILURE: "DRAM retirement failure",
    EventType.FATAL_POISON: "fatal poison error",
    EventType.GPU_UNAVAILABLE: "GPU unavailable",
}

DEGRADED: Mapping[int, str] = {
    EventType.DOUBLE_BIT_ECC: "double-bit ECC error",
    EventType.SINGLE_BIT_ECC_STORM: "storm of single-bit ECC errors",
    EventType.DRAM_RETIREMENT: "DRAM retirement",
    EventType.NON_FATAL_POISON: "non-fatal poison error",
}


class EventMemory(Memory, frozen=True):
    """The Unix time in seconds since which there was no event of the kind; None before the first good look of the process."""

    quiet_since: float | None = None

    unstored: ClassVar[tuple[str, ...]] = ("quiet_since",)  # events are lost while no process runs


def until(latch: Latch[EventMemory]) -> float | None:
    """Return the Unix time in seconds at which the latch closes without another event, None before the first good look."""
    since = latch.memory.quiet_since
    return None if since is None else since + QUIET_SECONDS


@signal(
    "driver-event",
    SignalKind.EVENT,
    RESET,
    memory=EventMemory(),
    sees=(Sample, DriverEvent),
    until=until,
    parts=re.compile("0x[0-9a-f]{1,16}"),
    recovers=True,
)
def driver_event(
    latch: Latch[EventMemory] | None, seen: Sample | DriverEvent, ctx: Context
) -> Latch[EventMemory] | None:
    """Opens on an event of a bad kind; closes when the GPU was reset, if DEGRADED also after a day without another event.

    Each kind has its own latch, with the kind in hexadecimal as `key.part`. The day begins with the first good look after the
    event, and again after a restart, because events are lost while no process runs.
    """
    if isinstance(seen, DriverEvent):
        fatal = seen.kind in FATAL
        name = FATAL.get(seen.kind) or DEGRADED.get(seen.kind)
        if name is None:
            return latch
        if latch is not None:
            return latch.renewed(EventMemory())
        verdict, proof = (Verdict.FATAL, Proof.RESET) if fatal else (Verdict.DEGRADED, Proof.QUIET)
        words = f"driver event {seen.kind:#x} ({name})"
        return Latch(EventMemory(), verdict, words, ctx.now, proof, Recovery(ctx.marks))
    if latch is None:
        return None
    after = after_recovery(latch, seen, ctx)
    if after is None or after.proof is not Proof.QUIET or not seen.core_answered:
        return after
    if after.memory.quiet_since is None:
        return replace(after, memory=EventMemory(ctx.now))
    return None if ctx.now - after.memory.quiet_since >= QUIET_SECONDS else after


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
