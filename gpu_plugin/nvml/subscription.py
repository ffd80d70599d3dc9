"""Which GPUs' events are asked for, and the thread that waits for them."""

import logging
from collections.abc import Callable, Iterable

from gpu_plugin.nvml.calls import DriverCalls
from gpu_plugin.nvml.events import WAIT_MS, EventWaiter, Setbacks, register
from gpu_plugin.nvml.port import Driver, Event, EventSet, NvmlError
from gpu_plugin.nvml.watched import Watched
from gpu_plugin.threads import Job

log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds a GPU may take to answer the request for its events before the others' turn."""

_STUCK = "the call that waits for them does not come back"


class EventSubscription:
    """One event set for all GPUs. What was refused for lack of support is never asked for again, all else is."""

    def __init__(self, driver: Driver, calls: DriverCalls, tell: Callable[[str], None]) -> None:
        """`tell` is called with why waits for events keep failing, and with an empty text once they work again."""
        self._driver = driver
        self._calls = calls
        self._tell = tell
        self._events: EventSet | None = None
        self._making: Job[EventSet] | None = None
        self._waiter: EventWaiter | None = None
        self._leaving: EventWaiter | None = None
        self._held_up = False
        self._setbacks = Setbacks()
        self.deaf = ""
        """Why no event is heard, as far as that is known; empty where they are."""
        self._unsupported = False
        self._said = ""

    @property
    def owed(self) -> bool:
        """Whether there is no event set, and asking for one makes sense."""
        return self._events is None and not self._unsupported

    async def begin(self, gpus: Iterable[Watched], timeout: float) -> None:
        """Makes the event set, for `timeout` seconds but no longer than a GPU's turn, and asks for every GPU's events.

        One that takes longer is asked about, without waiting, the next time: there is never a second request beside it.
        """
        if self._unsupported:
            return
        patience = min(timeout, PATIENCE)
        if self._making is None:
            self._making = await self._calls.submit(self._driver.event_set, patience)
        job = self._making
        try:
            if not job.done.done():
                raise TimeoutError(f"no answer for {patience:g} s")
            self._making = None
            self._events = job.done.result()
        except (NvmlError, TimeoutError) as error:
            self._unsupported = isinstance(error, NvmlError) and error.unsupported
            if str(error) != self._said:
                log.warning("the driver reports no events, health relies on polling: %s", error)
            self._said = str(error)
            return
        self._said = ""
        for watched in gpus:
            watched.events = False
            await self.ask(watched)

    async def ask(self, watched: Watched) -> None:
        """Asks for one GPU's events, unless that is settled; an answer that takes its time becomes its pending call.

        A GPU with a call under way is asked after that.
        """
        handle, events = watched.handle, self._events
        if handle is None or events is None or watched.events or watched.pending is not None:
            return
        supported = watched.gpu.event_types
        job = await self._calls.submit(lambda: register(self._driver, handle, supported, events), PATIENCE)
        if not job.done.done():
            watched.pending = job
        elif job.done.exception() is not None:
            self._refused(watched, str(job.done.exception()))
        else:
            self.settled(watched, job.done.result())

    def settled(self, watched: Watched, why: str) -> None:
        """The driver answered: `why` no events will ever come, empty where they will. Not asked again but for a new handle."""
        watched.events = True
        self._refused(watched, why)

    def _refused(self, watched: Watched, why: str) -> None:
        if why and why != watched.refused:
            log.warning("GPU %s: no events come from it, health relies on polling: %s", watched.gpu.uuid, why)
        watched.refused = why

    def listen(self, deliver: Callable[[Event], None], upset: Callable[[], None], patience: float) -> None:
        """Begins to wait as soon as there is something to wait on; where that is under way, sees whether it works.

        A wait that holds the thread for `patience` seconds more than it was asked to hears nothing.
        """
        stays = self._held_up and self._leaving is not None and not self._leaving.ended  # another would be held as well
        if self._waiter is None and self._events is not None and not stays:
            self._waiter = EventWaiter(self._driver, self._events, deliver, upset, self._heard, self._setbacks)
            self._waiter.start()
        if stays or (self._waiter is not None and self._waiter.stuck(patience)):
            self._heard(_STUCK)
        elif self.deaf == _STUCK:
            self._heard("")

    def _heard(self, why: str) -> None:
        if bool(why) != bool(self.deaf):
            self.deaf = why
            self._tell(why)

    def stop(self) -> None:
        """Lets the waiting thread end; what was asked for stays asked for."""
        if self._waiter is not None:
            self._waiter.stop()
            self._leaving = self._waiter
        self._waiter = None

    async def leave(self) -> bool:
        """Ends the wait and forgets the event set, so that the driver can be closed. Returns whether the thread is out of it."""
        self.stop()
        waiter = self._leaving
        if waiter is not None:
            seconds = 2 * WAIT_MS / 1000
            left = await self._calls.aside(lambda: waiter.join(seconds), seconds + PATIENCE)
            self._held_up = not (left.done.done() and left.done.result())
            if self._held_up:
                return False
        self._leaving = self._events = self._making = None
        return True
