"""One event set of the driver: asking for GPUs' events in it, the thread that waits for them, and when another takes its place.

What an event means, and whose it is, is decided elsewhere. nvml.h on nvmlDeviceRegisterEvents: after UNKNOWN the event set is
in an undefined state and is to be freed; after NOT_SUPPORTED it can still be used, and none of the types that were asked for is
registered.
"""

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import Any

import anyio
import msgspec

from gpu_plugin.devices.nvml_h import EventType, Return
from gpu_plugin.nvml.port import Driver, Event, EventSet, Handle, NvmlError
from gpu_plugin.nvml.session import DriverCalls
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.threads import Job, settled

log = logging.getLogger(__name__)

WAIT_MS = 1000  # longest stay in the driver, milliseconds: the thread looks up this often to see whether it should end

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
"""Seconds until a wait that failed is repeated: the first time, and at most."""

REPEAT_LOG = 60.0  # seconds between two lines of the log about that
MAX_FAILED_WAITS = 3  # waits in a row that fail before nothing is expected of the event set any more

BURST = 40
"""Events that are handed over one by one, each at once. Beyond that they are in a storm, and handed over several at a time."""

REFILL = 40.0  # events a second by which that number is filled up again

BATCH_SECONDS = 0.05
"""Seconds for which events of a storm are gathered: waking the event loop for each would cost more than judging them."""

MAX_DRAINED = 1024  # events that are still taken from an event set when the wait for it ends
DRAIN_SECONDS = 0.25  # seconds that this may take


class EventBatch(msgspec.Struct):
    """Events of a storm on their way to the event loop. Times are in seconds of any steady clock. Does no I/O."""

    events: list[Event] = msgspec.field(default_factory=list)
    due: float = 0.0  # when those are handed over
    credit: float = BURST
    _at: float = 0.0

    def take(self, event: Event, now: float) -> None:
        """Takes in an event."""
        self.credit, self._at = min(BURST, self.credit + (now - self._at) * REFILL), now
        if not self.events:
            self.due = now if self.credit >= 1 else now + BATCH_SECONDS
        self.credit = max(0.0, self.credit - 1)
        self.events.append(event)

    def handed_over(self) -> list[Event]:
        """What there is, which is gathered no longer."""
        events, self.events = self.events, []
        return events


class WaitFailures(msgspec.Struct):
    """How waits failed lately, in seconds of the steady clock. Handed from one waiter to the next; only one of them waits on."""

    backoff: Backoff = msgspec.field(default_factory=lambda: Backoff(FIRST_PAUSE, LONGEST_PAUSE))
    said: float | None = None  # when that was said last


class EventWaiter:
    """Waits in NVML on a daemon thread and hands each event to the event loop.

    A wait that keeps failing is repeated ever more slowly, at most four times a second, and said once a minute, however
    many waiters that takes.
    """

    def __init__(
        self,
        driver: Driver,
        events: EventSet,
        deliver: Callable[[Event], None],
        upset: Callable[[Exception], None],
        report_trouble: Callable[[str], None],
        wait_failures: WaitFailures,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes the callbacks for an event, for a failed wait, and for whether waits keep failing: why, or empty.

        `over` is called once the thread is out of the driver for good. All run on the event loop's thread.
        """
        self._driver = driver
        self._events = events
        self._deliver = deliver
        self._upset = upset
        self._report_trouble = report_trouble
        self._wait_failures = wait_failures
        self._over = over
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()  # in which anyio knows its event loop, unlike in the thread's own
        self._stop = threading.Event()
        self._left = asyncio.Event()
        self.ended = False
        """Whether the thread is out of the driver for good."""
        self._since: float | None = None
        self._thread = threading.Thread(target=self._run, name="nvml-events", daemon=True)

    def start(self) -> None:
        """Begins to wait."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more threads; whoever listens tries again
            self.ended = True
            self._left.set()
            self._report_trouble(f"no thread can wait for them: {error}")

    def stop(self) -> None:
        """Asks the thread to end, which it does within a second; nobody waits for it."""
        self._stop.set()

    async def left(self, seconds: float) -> bool:
        """Waits until the thread is out of the driver for good, at most so long. Returns whether it is."""
        if not self.ended:
            with anyio.move_on_after(seconds):
                await self._left.wait()
        return self.ended

    def stuck(self, seconds: float) -> bool:
        """Whether a wait has been in the driver for so long, and not for as long as it was asked to."""
        since = self._since
        return since is not None and time.monotonic() - since > seconds + WAIT_MS / 1000

    def _run(self) -> None:
        batch = EventBatch()
        try:
            self._wait_on(batch)
            self._drain(batch)
        finally:
            self._hand_over(partial(self._deliver_all, batch.handed_over()))
            self.ended = True
            self._hand_over(self._leave)

    def _leave(self) -> None:
        self._left.set()
        self._over()

    def _wait_on(self, batch: EventBatch) -> None:
        wait_failures = self._wait_failures
        well = False  # an earlier waiter may have reported trouble: the first good wait says that it is over
        while not self._stop.is_set():
            self._since = began = time.monotonic()
            event: Event | None = None
            trouble: Exception | None = None
            try:
                left = (batch.due - began) * 1000 if batch.events else WAIT_MS
                event = self._driver.wait(self._events, max(1, min(WAIT_MS, int(left))))
            except Exception as error:  # noqa: BLE001 - whatever it is, a thread that ended would hear nothing ever after
                if not isinstance(error, NvmlError) or error.code != Return.TIMEOUT:
                    trouble = error
            self._since = None
            if event is not None:
                batch.take(event, time.monotonic())
            if batch.events and (trouble or time.monotonic() >= batch.due):
                self._hand_over(partial(self._deliver_all, batch.handed_over()))
            if trouble is None:
                wait_failures.backoff.succeeded()
                if not well:
                    well = True
                    self._hand_over(lambda: self._report_trouble(""))
                # A driver that does not wait must not be asked in a loop
                if event is None and not batch.events and time.monotonic() - began < min(left, WAIT_MS) / 2000:
                    self._stop.wait(min(FIRST_PAUSE, WAIT_MS / 1000))
                continue
            if self._stop.is_set():
                break  # whatever it is, nobody wants to know any more
            words = str(trouble) if isinstance(trouble, NvmlError) else repr(trouble)
            # One that fails as a GPU is lost is soon mended by another event set.
            mended = isinstance(trouble, NvmlError) and trouble.code == Return.GPU_IS_LOST
            mended = mended and wait_failures.backoff.failures + 1 < MAX_FAILED_WAITS
            if not mended and (wait_failures.said is None or time.monotonic() - wait_failures.said >= REPEAT_LOG):
                wait_failures.said = time.monotonic()
                log.warning("waiting for driver events fails, health relies on polling until it works again: %s", words)
            pause = wait_failures.backoff.failed(time.monotonic())
            if wait_failures.backoff.failures % MAX_FAILED_WAITS == 0:  # of the next event set too
                well = False
                self._hand_over(lambda words=words: self._report_trouble(words))  # type: ignore[misc]
            self._hand_over(lambda trouble=trouble: self._upset(trouble))  # type: ignore[misc]
            self._stop.wait(pause)

    def _drain(self, batch: EventBatch) -> None:
        """Takes what is ready: the set may be freed next, and what is in it then is gone, that of healthy GPUs too (nvml.h)."""
        until = time.monotonic() + DRAIN_SECONDS
        for _ in range(MAX_DRAINED):
            self._since = time.monotonic()
            try:
                batch.events.append(self._driver.wait(self._events, 1))
            except Exception as error:  # noqa: BLE001 - nothing is ready, or nothing more is to be had
                log.debug("no further event: %s", error)
                return
            finally:
                self._since = None
            if time.monotonic() >= until:
                return

    def _deliver_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self._deliver(event)

    def _hand_over(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has closed: the process is leaving
            self._loop.call_soon_threadsafe(callback, context=self._context)


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
