"""Which GPUs' events are asked for, and the thread that waits for them."""

import logging
from collections.abc import Callable, Iterable

from gpu_plugin.nvml.events import WAIT_MS, EventWaiter, register
from gpu_plugin.nvml.port import Driver, Event, EventSet, NvmlError
from gpu_plugin.nvml.watched import Watched
from gpu_plugin.threads import DaemonThreads

log = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds a GPU may take to answer the request for its events before the others' turn."""


class EventSubscription:
    """One event set for all GPUs. What was refused for lack of support is never asked for again, all else is."""

    def __init__(self, driver: Driver, threads: DaemonThreads) -> None:
        self._driver = driver
        self._threads = threads
        self._events: EventSet | None = None
        self._waiter: EventWaiter | None = None
        self._unsupported = False
        self._said = ""

    @property
    def owed(self) -> bool:
        """Whether there is no event set, and asking for one makes sense."""
        return self._events is None and not self._unsupported

    async def begin(self, gpus: Iterable[Watched], timeout: float) -> None:
        """Makes the event set, within `timeout` seconds, and asks for every GPU's events."""
        if self._unsupported:
            return
        try:
            self._events = await self._threads.run(self._driver.event_set, timeout)
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
        """Asks for one GPU's events, unless that is settled; an answer that takes its time becomes its pending call."""
        handle, events = watched.handle, self._events
        if handle is None or events is None or watched.events:
            return
        supported = watched.gpu.event_types
        job = await self._threads.submit(lambda: register(self._driver, handle, supported, events), PATIENCE)
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

    def listen(self, deliver: Callable[[Event], None], upset: Callable[[], None]) -> None:
        """Begins to wait as soon as there is something to wait on; nothing happens where that is under way."""
        if self._waiter is None and self._events is not None:
            self._waiter = EventWaiter(self._driver, self._events, deliver, upset)
            self._waiter.start()

    def stop(self) -> None:
        """Lets the waiting thread end; what was asked for stays asked for."""
        if self._waiter is not None:
            self._waiter.stop()
        self._waiter = None

    async def leave(self) -> bool:
        """Ends the wait and forgets the event set, so that the driver can be closed. Returns whether the thread is out of it."""
        waiter = self._waiter
        self.stop()
        if waiter is not None:
            seconds = 2 * WAIT_MS / 1000
            left = await self._threads.submit(lambda: waiter.join(seconds), seconds + PATIENCE)
            if not (left.done.done() and left.done.result()):
                return False
        self._events = None
        return True
