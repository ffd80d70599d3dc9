"""One event set of the driver: asking for GPUs' events in it, the calls that are in it, and when another may take its place.

nvml.h on nvmlDeviceRegisterEvents: after UNKNOWN the event set is in an undefined state and is to be freed; after
NOT_SUPPORTED it can still be used, and none of the types that were asked for is registered.
"""

from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import anyio
import msgspec

from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.nvml.events import EventWaiter
from gpu_plugin.nvml.port import Driver, Event, EventSet, Handle, NvmlError
from gpu_plugin.nvml.session import DriverCalls
from gpu_plugin.runtime.threads import Job, settled

WANTED = (
    EventType.DOUBLE_BIT_ECC
    | EventType.XID_CRITICAL
    | EventType.MIG_CONFIG_CHANGE
    | EventType.SINGLE_BIT_ECC_STORM
    | EventType.DRAM_RETIREMENT
    | EventType.DRAM_RETIREMENT_FAILURE
    | EventType.NON_FATAL_POISON
    | EventType.FATAL_POISON
    | EventType.GPU_UNAVAILABLE
    | EventType.GPU_RECOVERY_ACTION
)

_UNDEFINED = frozenset({Return.UNKNOWN, Return.GPU_IS_LOST})
"""Refusals after which nothing is to be expected of the event set, of its other GPUs included."""


class Outcome(Enum):
    """What became of the request for a GPU's events."""

    HEARD = auto()  # they will come
    UNSUPPORTED = auto()  # none will ever come, for lack of support: nothing is wrong
    REFUSED = auto()  # it is worth asking again; the event set is as it was
    UNDEFINED = auto()  # it is worth asking again, for another event set: this one is to be freed


class Registered(msgspec.Struct, frozen=True):
    """The outcome, and `why` no events come. `event` is one that came while that was found out."""

    outcome: Outcome
    why: str = ""
    event: Event | None = None


def register(driver: Driver, handle: Handle, events: EventSet) -> Registered:
    """Asks for every health event that the GPU can report, or at least for Xids."""
    try:
        mask = int(WANTED) & driver.supported_event_types(handle)
    except NvmlError as error:
        return _refused(error, Outcome.REFUSED)  # which says nothing of the set: it was not touched
    if not mask:
        return Registered(Outcome.UNSUPPORTED, "it reports no events")
    answer = _ask(driver, handle, mask, events)
    if answer.outcome is Outcome.UNSUPPORTED and mask & EventType.XID_CRITICAL and mask != EventType.XID_CRITICAL:
        return _ask(driver, handle, int(EventType.XID_CRITICAL), events)
    return answer


def register_warily(driver: Driver, handle: Handle, events: EventSet) -> Registered:
    """Registers as `register` does, for a GPU that may have undone an event set: tried first in one without other GPUs."""
    try:
        own_set = driver.event_set()
    except NvmlError as error:
        return Registered(Outcome.REFUSED, _unasked(error))
    try:
        tried = register(driver, handle, own_set)
        if tried.outcome is not Outcome.HEARD:
            # What was undone is gone with the set that it was tried in.
            outcome = Outcome.REFUSED if tried.outcome is Outcome.UNDEFINED else tried.outcome
            return Registered(outcome, tried.why)
        event = _waited(driver, own_set)
    except NvmlError as error:
        return Registered(Outcome.REFUSED, _unasked(error))
    finally:
        with suppress(NvmlError):  # one that is gone with its GPU
            driver.free_event_set(own_set)
    found = register(driver, handle, events)
    return Registered(found.outcome, found.why, event)


def _waited(driver: Driver, events: EventSet) -> Event | None:
    try:
        return driver.wait(events, 0)
    except NvmlError as error:
        if error.code == Return.TIMEOUT:
            return None
        raise


def _ask(driver: Driver, handle: Handle, mask: int, events: EventSet) -> Registered:
    try:
        driver.register_events(handle, mask, events)
    except NvmlError as error:
        return _refused(error, Outcome.UNDEFINED if error.code in _UNDEFINED else Outcome.REFUSED)
    return Registered(Outcome.HEARD)


def _refused(error: NvmlError, otherwise: Outcome) -> Registered:
    if error.unsupported:
        return Registered(Outcome.UNSUPPORTED, "it is too old to report events")
    return Registered(otherwise, _unasked(error))


def _unasked(error: NvmlError) -> str:
    return f"it could not be asked for them: {error}"


STABLE_AFTER = 180.0  # seconds that an event set must have lived for its end to say nothing of the next one's
FREE_REBUILDS = 2  # event sets in a row that take another's place at once

FIRST_REBUILD_PAUSE = 8.0
LONGEST_REBUILD_PAUSE = 60.0
"""Seconds from the end of one event set after those to the next: the first time, and at most."""


class Member(msgspec.Struct):
    """A GPU that was asked for its events, by which handle, and the answer; None: not yet."""

    handle: Handle
    answer: Registered | None = None

    @property
    def settled(self) -> bool:
        """Whether it need not be asked again."""
        return self.answer is not None and self.answer.outcome in (Outcome.HEARD, Outcome.UNSUPPORTED)


class LiveSet(msgspec.Struct):
    """An event set that was made at time `born` of the event loop.

    `waiter` waits on it, or was the last to. `registrations` are the requests with it, whoever owns the GPUs by now.
    `members` are the GPUs by uuid. `undone` says why nothing more is to be expected of it; empty while that is not so.
    """

    events: EventSet
    born: float
    waiter: EventWaiter | None = None
    registrations: set[Job[Any]] = msgspec.field(default_factory=set)
    members: dict[str, Member] = msgspec.field(default_factory=dict)
    undone: str = ""
    _freeing: Job[None] | None = None

    @property
    def entered(self) -> bool:
        """Whether a call is in it: it must not be freed then."""
        waiting = self.waiter is not None and not self.waiter.ended
        return waiting or any(not job.done.done() for job in self.registrations)

    @property
    def gone(self) -> bool:
        """Whether it was freed, or the driver refused to free it."""
        return self._freeing is not None and self._freeing.done.done()

    def free(self, calls: DriverCalls, free: Callable[[EventSet], None]) -> None:
        """Hands its end over, once, unless a call is in it. Nothing may enter it afterwards."""
        if self._freeing is None and not self.entered:
            events = self.events
            self._freeing = calls.begin(lambda: free(events))

    async def left(self, seconds: float) -> None:
        """Waits until no call is in it, at most so long."""
        until = anyio.current_time() + seconds
        if self.waiter is not None:
            await self.waiter.left(seconds)
        for job in tuple(self.registrations):
            await settled(job, max(0.0, until - anyio.current_time()))

    async def freed(self, seconds: float) -> None:
        """Waits until it is freed, at most so long, if that was begun."""
        if self._freeing is not None:
            await settled(self._freeing, seconds)
