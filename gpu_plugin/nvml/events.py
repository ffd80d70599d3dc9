"""One NVML event set: registering GPUs, the thread that waits for events, and the limits for making a new event set.

Other modules find the GPU of an event and judge it. nvml.h says about nvmlDeviceRegisterEvents: after UNKNOWN the
event set is in an undefined state and should be freed; after NOT_SUPPORTED it can still be used, but the requested event types
are not registered.
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
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.port import Driver, Event, EventSet, Handle, NvmlError
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.threads import Job

log = logging.getLogger(__name__)

WAIT_MS = 1000  # longest wait in the driver, milliseconds; between waits the thread checks whether it should end

FIRST_PAUSE = 0.25  # seconds before a failed wait is repeated: after the first failure
LONGEST_PAUSE = 30.0  # and after many
REPEAT_LOG = 60.0  # seconds between two log lines about failed waits
MAX_FAILED_WAITS = 3  # failed waits in a row after which the event set counts as unusable

# Number of events that are delivered immediately, one by one. Further events count as a storm and are delivered in
# batches.
BURST = 40

REFILL = 40.0  # that number grows again by this many events per second, up to BURST

# Seconds for which events of a storm are collected: waking the event loop for each event costs more than processing it
BATCH_SECONDS = 0.05

MAX_DRAINED = 1024  # events that are read from an event set after the last wait
DRAIN_SECONDS = 0.25  # longest time for reading them


class EventBatch(msgspec.Struct):
    """Collects events before delivery to the event loop. Times are in seconds of any steady clock. Does no I/O."""

    events: list[Event] = msgspec.field(default_factory=list)
    due: float = 0.0  # time of delivery of these events
    credit: float = BURST
    _at: float = 0.0

    def add(self, event: Event, now: float) -> None:
        """Add an event."""
        self.credit, self._at = min(BURST, self.credit + (now - self._at) * REFILL), now
        if not self.events:
            self.due = now if self.credit >= 1 else now + BATCH_SECONDS
        self.credit = max(0.0, self.credit - 1)
        self.events.append(event)

    def take_all(self) -> list[Event]:
        """Remove and return the collected events."""
        events, self.events = self.events, []
        return events


class WaitFailures(msgspec.Struct):
    """The recent failures of waits, in seconds of the steady clock. Each waiter passes it to the next."""

    backoff: Backoff = msgspec.field(default_factory=lambda: Backoff(FIRST_PAUSE, LONGEST_PAUSE))
    logged_at: float | None = None  # time of the last log line about failures


class EventWaiter:
    """Waits for events in NVML on a daemon thread and passes each to the event loop.

    After a failed wait it pauses longer each time, from 0.25 s up to 30 s. It logs failures once a minute, counted over all
    waiters.
    """

    def __init__(
        self,
        driver: Driver,
        events: EventSet,
        deliver: Callable[[Event], None],
        on_failure: Callable[[Exception], None],
        report_trouble: Callable[[str], None],
        wait_failures: WaitFailures,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """Store the callbacks: for an event, for a failed wait, and for trouble with waiting (its reason; empty once it works).

        `over` is called once the thread will not call the driver again. All callbacks run on the event loop's thread.
        """
        self._driver = driver
        self._events = events
        self._deliver = deliver
        self._on_failure = on_failure
        self._report_trouble = report_trouble
        self._wait_failures = wait_failures
        self._over = over
        self._loop = asyncio.get_running_loop()
        # The thread's own context does not have anyio's event loop.
        self._context = contextvars.copy_context()
        self._stop = threading.Event()
        self._left = asyncio.Event()
        self.ended = False
        """Whether the thread has made its last call to the driver."""
        self._since: float | None = None
        self._thread = threading.Thread(target=self._run, name="nvml-events", daemon=True)

    def start(self) -> None:
        """Start waiting."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may start no more threads; the subscription tries again
            self.ended = True
            self._left.set()
            self._report_trouble(f"no thread for them can be started: {error}")

    def stop(self) -> None:
        """Request the end of the thread, which ends within a second. Does not wait for it."""
        self._stop.set()

    async def left(self, seconds: float) -> bool:
        """Wait up to this many seconds until the thread has made its last call to the driver. Return whether it has."""
        if not self.ended:
            with anyio.move_on_after(seconds):
                await self._left.wait()
        return self.ended

    def stuck(self, seconds: float) -> bool:
        """Return whether a wait has lasted this many seconds longer than its timeout."""
        since = self._since
        return since is not None and time.monotonic() - since > seconds + WAIT_MS / 1000

    def _run(self) -> None:
        batch = EventBatch()
        try:
            self._wait_on(batch)
            self._drain(batch)
        finally:
            self._hand_over(partial(self._deliver_all, batch.take_all()))
            self.ended = True
            self._hand_over(self._leave)

    def _leave(self) -> None:
        self._left.set()
        self._over()

    def _wait_on(self, batch: EventBatch) -> None:
        wait_failures = self._wait_failures
        reported_working = (
            False  # an earlier waiter may have reported trouble: the first wait that works reports that it is over
        )
        while not self._stop.is_set():
            self._since = began = time.monotonic()
            event: Event | None = None
            trouble: Exception | None = None
            try:
                left = (batch.due - began) * 1000 if batch.events else WAIT_MS
                event = self._driver.wait(self._events, max(1, min(WAIT_MS, int(left))))
            except Exception as error:  # noqa: BLE001 - the thread must survive any error, or events would stop
                if not isinstance(error, NvmlError) or error.code != Return.TIMEOUT:
                    trouble = error
            self._since = None
            if event is not None:
                batch.add(event, time.monotonic())
            if batch.events and (trouble or time.monotonic() >= batch.due):
                self._hand_over(partial(self._deliver_all, batch.take_all()))
            if trouble is None:
                wait_failures.backoff.succeeded()
                if not reported_working:
                    reported_working = True
                    self._hand_over(lambda: self._report_trouble(""))
                # If the driver returns at once instead of waiting, do not call it in a busy loop.
                if event is None and not batch.events and time.monotonic() - began < min(left, WAIT_MS) / 2000:
                    self._stop.wait(min(FIRST_PAUSE, WAIT_MS / 1000))
                continue
            if self._stop.is_set():
                break  # nothing uses this event set any more
            words = str(trouble) if isinstance(trouble, NvmlError) else repr(trouble)
            # A wait that fails because a GPU is lost usually works again with a new event set.
            mended = isinstance(trouble, NvmlError) and trouble.code == Return.GPU_IS_LOST
            mended = mended and wait_failures.backoff.failures + 1 < MAX_FAILED_WAITS
            if not mended and (
                wait_failures.logged_at is None or time.monotonic() - wait_failures.logged_at >= REPEAT_LOG
            ):
                wait_failures.logged_at = time.monotonic()
                log.warning("waiting for driver events fails, health relies on polling until it works again: %s", words)
            pause = wait_failures.backoff.failed(time.monotonic())
            if wait_failures.backoff.failures % MAX_FAILED_WAITS == 0:  # the count continues with the next event set
                reported_working = False
                self._hand_over(lambda words=words: self._report_trouble(words))  # type: ignore[misc]
            self._hand_over(lambda trouble=trouble: self._on_failure(trouble))  # type: ignore[misc]
            self._stop.wait(pause)

    def _drain(self, batch: EventBatch) -> None:
        """Read the events that are ready: freeing the set drops its events, also those of healthy GPUs (nvml.h)."""
        until = time.monotonic() + DRAIN_SECONDS
        for _ in range(MAX_DRAINED):
            self._since = time.monotonic()
            try:
                batch.events.append(self._driver.wait(self._events, 1))
            except Exception as error:  # noqa: BLE001 - no event is ready, or the event set does not work any more
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
        with suppress(RuntimeError):  # the loop is closed: the process ends
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

# Codes after which the event set counts as unusable, also for its other GPUs
_UNDEFINED = frozenset({Return.UNKNOWN, Return.GPU_IS_LOST})


class Outcome(Enum):
    """The result of registering a GPU for events."""

    REGISTERED = auto()  # events will arrive
    UNSUPPORTED = auto()  # the GPU or driver does not support events; this is not a fault
    REFUSED = auto()  # try again later; the event set is unchanged
    UNDEFINED = auto()  # try again with another event set; this event set must be freed


class Registered(msgspec.Struct, frozen=True):
    """The outcome, and in `why` the reason for missing events. `event` is an event that arrived during registration."""

    outcome: Outcome
    why: str = ""
    event: Event | None = None


def register(driver: Driver, handle: Handle, events: EventSet) -> Registered:
    """Register a GPU for all health events that it supports. If the driver does not support that, register only for Xids."""
    try:
        mask = int(WANTED) & driver.supported_event_types(handle)
    except NvmlError as error:
        return _refused(error, Outcome.REFUSED)  # the event set is not affected: the call did not use it
    if not mask:
        return Registered(Outcome.UNSUPPORTED, "it reports no events")
    answer = _ask(driver, handle, mask, events)
    if answer.outcome is Outcome.UNSUPPORTED and mask & EventType.XID_CRITICAL and mask != EventType.XID_CRITICAL:
        return _ask(driver, handle, int(EventType.XID_CRITICAL), events)
    return answer


def register_warily(driver: Driver, handle: Handle, events: EventSet) -> Registered:
    """Register a GPU that may have made an event set unusable: try it in an event set of its own before."""
    try:
        own_set = driver.event_set()
    except NvmlError as error:
        return Registered(Outcome.REFUSED, _registration_error(error))
    try:
        tried = register(driver, handle, own_set)
        if tried.outcome is not Outcome.REGISTERED:
            # The state of that set does not matter, as it is freed below.
            outcome = Outcome.REFUSED if tried.outcome is Outcome.UNDEFINED else tried.outcome
            return Registered(outcome, tried.why)
        event = _waited(driver, own_set)
    except NvmlError as error:
        return Registered(Outcome.REFUSED, _registration_error(error))
    finally:
        with suppress(NvmlError):  # the set may be unusable because the GPU is lost
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
    return Registered(Outcome.REGISTERED)


def _refused(error: NvmlError, otherwise: Outcome) -> Registered:
    if error.unsupported:
        return Registered(Outcome.UNSUPPORTED, "it is too old to report events")
    return Registered(otherwise, _registration_error(error))


def _registration_error(error: NvmlError) -> str:
    return f"registering for them failed: {error}"


STABLE_AFTER = 180.0  # seconds of use after which the end of an event set does not delay the next event set
FREE_REBUILDS = 2  # event sets in a row that are replaced without a pause

FIRST_REBUILD_PAUSE = 8.0  # seconds before the next event set after those: the first pause
LONGEST_REBUILD_PAUSE = 60.0  # and the longest


class Member(msgspec.Struct):
    """A GPU with a registration for events, its handle, and the answer; None while there is no answer."""

    handle: Handle
    answer: Registered | None = None

    @property
    def settled(self) -> bool:
        """True if the GPU need not be registered again."""
        return self.answer is not None and self.answer.outcome in (Outcome.REGISTERED, Outcome.UNSUPPORTED)


class LiveSet(msgspec.Struct):
    """An event set, made at time `born` of the event loop.

    `waiter` is the current or last waiter. `registrations` are the registration calls that use the set, whichever list has
    the GPU now. `members` are the GPUs by uuid. `unusable` is the reason why the set is unusable; empty if it is usable.
    """

    events: EventSet
    born: float
    waiter: EventWaiter | None = None
    registrations: set[Job[Any]] = msgspec.field(default_factory=set)
    members: dict[str, Member] = msgspec.field(default_factory=dict)
    unusable: str = ""
    _freeing: Job[None] | None = None

    @property
    def in_use(self) -> bool:
        """True while a call uses the set: it must not be freed."""
        waiting = self.waiter is not None and not self.waiter.ended
        return waiting or any(not job.returned for job in self.registrations)

    @property
    def gone(self) -> bool:
        """True if the set was freed, or the driver refused to free it."""
        return self._freeing is not None and self._freeing.returned

    def free(self, calls: DriverCalls, driver: Driver) -> None:
        """Start freeing the set, once, unless a call uses it. No call may use the set afterwards."""
        if self._freeing is None and not self.in_use:
            self._freeing = calls.begin(partial(driver.free_event_set, self.events))

    async def left(self, seconds: float) -> None:
        """Wait up to this many seconds until no call uses the set."""
        until = anyio.current_time() + seconds
        if self.waiter is not None:
            await self.waiter.left(seconds)
        for job in tuple(self.registrations):
            await job.wait(max(0.0, until - anyio.current_time()))

    async def freed(self, seconds: float) -> None:
        """Wait up to this many seconds until the set is freed, if freeing has begun."""
        if self._freeing is not None:
            await self._freeing.wait(seconds)
