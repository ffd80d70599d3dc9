"""Blocking calls on daemon threads of our own, so that one that hangs holds nothing but itself.

A pool's threads would be waited for at exit, and a hung NVML call or disk write cannot be ended: so each thread here is
a daemon, and one that does not come back is left behind and replaced.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import anyio

T = TypeVar("T")

log = logging.getLogger(__name__)


class Job(Generic[T]):
    """One call under way. Its outcome stays readable however late it comes."""

    def __init__(self, call: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop
        self.started = loop.time()
        """Event loop time at which the call was handed over, in seconds."""
        self.done: asyncio.Future[T] = loop.create_future()

    def run(self) -> None:
        """Makes the call, on the thread that runs this, and hands its outcome to the event loop."""
        outcome: T | None = None
        error: BaseException | None = None
        try:
            outcome = self._call()
        except Exception as raised:  # noqa: BLE001 - it is raised again where the call was asked for
            error = raised
        with suppress(RuntimeError):  # the loop has closed: the process is leaving, nobody wants the outcome
            self._loop.call_soon_threadsafe(self._settle, outcome, error)

    def _settle(self, outcome: Any, error: BaseException | None) -> None:
        if self.done.cancelled():
            return
        if error is None:
            self.done.set_result(outcome)
        else:
            self.done.set_exception(error)
            self.done.exception()  # marks it as seen: a call given up on may fail unheard


def begin(call: Callable[[], T], name: str) -> Job[T]:
    """Starts a call on a daemon thread of its own, called `name`, which ends with it. From the event loop's thread."""
    job = Job(call, asyncio.get_running_loop())
    threading.Thread(target=job.run, name=name, daemon=True).start()
    return job


async def settled(job: "Job[Any]", patience: float | None = None) -> bool:
    """Waits for a call, at most so many seconds (None: for as long as it takes). Returns whether it has come back."""
    back = anyio.Event()

    def tell(_: object) -> None:
        back.set()

    if not job.done.done():
        job.done.add_done_callback(tell)
        with anyio.move_on_after(patience):
            await back.wait()
        job.done.remove_done_callback(tell)
    return job.done.done()


class DaemonThreads:
    """Runs calls one after the other on a daemon thread called `name`, and on a fresh one once a call is given up on."""

    def __init__(self, name: str = "nvml-calls") -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Job[Any] | None] | None = None

    async def submit(self, call: Callable[[], T], patience: float) -> Job[T]:
        """Starts a call and gives it `patience` seconds; it may still be under way when this returns."""
        loop = asyncio.get_running_loop()
        job = Job(call, loop)
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True).start()
        mine = self._queue
        mine.put(job)
        try:
            with anyio.move_on_after(patience):
                await asyncio.wait([job.done])
        finally:
            if not job.done.done() and self._queue is mine:
                self._queue = None
                mine.put(None)  # the thread ends itself if the call ever comes back
        return job

    async def run(self, call: Callable[[], T], timeout: float) -> T:
        """The call's result. Raises what the call raises, and TimeoutError after `timeout` seconds."""
        job = await self.submit(call, timeout)
        if not job.done.done():
            raise TimeoutError(f"no answer for {timeout:g} s")
        return job.done.result()

    def close(self) -> None:
        """Lets the idle thread end; a hung one is a daemon and ends with the process."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None


def _work(jobs: "queue.SimpleQueue[Job[Any] | None]") -> None:
    while (job := jobs.get()) is not None:
        job.run()
