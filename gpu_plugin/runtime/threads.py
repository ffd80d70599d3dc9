"""Blocking calls on daemon threads, so that a call that hangs holds up nothing else.

The interpreter waits at its exit for the threads of a pool, and a hung NVML call or disk write cannot be ended. So each thread
here is a daemon thread. A thread that does not return is left behind and replaced.
"""

import asyncio
import collections
import gc
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)


class NoAnswerError(TimeoutError):
    """A call did not return within its seconds. A TimeoutError that the call raises is another error."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer for {seconds:g} s")


class Job(Generic[T]):
    """One call under way. Its outcome stays readable however late it comes."""

    def __init__(self, call: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop
        self.started = loop.time()
        """Event loop time at which the call was handed over, in seconds."""
        self.done: asyncio.Future[T] = loop.create_future()

    def run(self) -> None:
        """Make the call on this thread, and pass its outcome to the event loop."""
        outcome: T | None = None
        error: BaseException | None = None
        try:
            outcome = self._call()
        except Exception as raised:  # noqa: BLE001 - it is raised again where the call was asked for
            error = raised
        with suppress(RuntimeError):  # the loop has closed, so the process ends and needs no outcome
            self._loop.call_soon_threadsafe(self.settle, outcome, error)

    def settle(self, outcome: Any, error: BaseException | None) -> None:
        """Set the outcome, also of a call that cannot be made. Call it on the event loop's thread."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(outcome)
        else:
            self.done.set_exception(error)
            self.done.exception()  # marks it as retrieved: asyncio logs errors of calls that have no waiter


def begin(call: Callable[[], T], name: str) -> Job[T]:
    """Start a call on a daemon thread of its own with this name. Call it on the event loop's thread."""
    job = Job(call, asyncio.get_running_loop())
    try:
        threading.Thread(target=job.run, name=name, daemon=True).start()
    except RuntimeError as error:  # the process may have no more threads: the call has this error
        job.settle(None, error)
    return job


async def settled(job: "Job[Any]", patience: float | None = None) -> bool:
    """Wait for a call, at most `patience` seconds (None: without a limit). Returns whether it has returned."""
    back = anyio.Event()

    def tell(_: object) -> None:
        back.set()

    if not job.done.done():
        job.done.add_done_callback(tell)
        try:
            with anyio.move_on_after(patience):
                await back.wait()
        finally:
            job.done.remove_done_callback(tell)
    return job.done.done()


async def answered(job: Job[T], patience: float) -> T:
    """The result of a call. Raises the error of the call, or NoAnswerError after `patience` seconds, while the call runs on."""
    if not await settled(job, patience):
        raise NoAnswerError(patience)
    return job.done.result()


STALL = 0.02
"""Seconds after which waiting calls get workers of their own if every worker is still busy."""


OFF_LOOP_DEVICES = 2_000
"""Lists of this many devices or more are judged on a thread (2 to 4 µs each), so that the event loop runs on."""


async def computed(call: Callable[[*Ts], T], *args: *Ts, apart: bool) -> T:
    """The result of a computation, on a thread if `apart`, so that the event loop runs on.

    A computation creates a tuple and more for each device. That many objects start the search for reference cycles, which stops
    the event loop for 0.1 s. So the search is off until the computation ends.
    """
    return (
        await anyio.to_thread.run_sync(_without_cycles, call, *args, abandon_on_cancel=True) if apart else call(*args)
    )


def _without_cycles(call: Callable[[*Ts], T], *args: *Ts) -> T:
    gc.disable()
    try:
        return call(*args)
    finally:
        gc.enable()


class Workers:
    """Runs calls at once with as few daemon threads of this name as possible. Call it on the event loop's thread.

    One worker makes quick calls one after the other. It begins the next call when the event loop has the outcome of the last,
    so that the loop gets the interpreter in between. If no call began for `STALL` seconds, each waiting call gets a worker. One
    idle worker stays, and the others end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: collections.deque[Job[Any]] = collections.deque()
        self._idle: queue.SimpleQueue[Job[Any] | None] | None = None
        self._busy: set[queue.SimpleQueue[Job[Any] | None]] = set()
        self._begun = 0
        self._closed = False
        self._watching = False

    def begin(self, call: Callable[[], T]) -> Job[T]:
        """Start a call. It runs on if its waiter is cancelled."""
        loop = asyncio.get_running_loop()
        job = Job(call, loop)
        self._closed = False
        if self._idle is not None:
            mine, self._idle = self._idle, None
            self._give(mine, job)
        elif not self._busy:
            self._start(job, loop)
        else:
            self._waiting.append(job)
            if not self._watching:
                self._watch(loop)
        return job

    async def run(self, call: Callable[[], T], patience: float) -> T:
        """The result of the call. Raises its error, or NoAnswerError after `patience` seconds; then the call runs on."""
        return await answered(self.begin(call), patience)

    def close(self) -> None:
        """End every thread, after its present call if it makes one. A thread that hangs ends with the process."""
        self._closed = True
        for mine in self._busy if self._idle is None else self._busy | {self._idle}:
            mine.put(None)
        self._busy, self._idle = set(), None

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watching = True
        loop.call_later(STALL, self._look, loop, self._begun)

    def _look(self, loop: asyncio.AbstractEventLoop, begun: int) -> None:
        self._watching = False
        if self._begun == begun:
            while self._waiting:
                self._start(self._waiting.popleft(), loop)
        if self._waiting:
            self._watch(loop)

    def _start(self, job: Job[Any], loop: asyncio.AbstractEventLoop) -> None:
        mine: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._give(mine, job)
        try:
            threading.Thread(target=self._work, args=(mine, loop), name=self._name, daemon=True).start()
        except RuntimeError as error:
            self._busy.discard(mine)
            job.settle(None, error)

    def _give(self, mine: "queue.SimpleQueue[Job[Any] | None]", job: Job[Any]) -> None:
        self._begun += 1
        self._busy.add(mine)
        mine.put(job)

    def _free(self, mine: "queue.SimpleQueue[Job[Any] | None]") -> None:
        """A worker has nothing to do."""
        if mine not in self._busy:  # `close` has ended it
            return
        self._busy.discard(mine)
        if self._waiting:
            self._give(mine, self._waiting.popleft())
        elif self._closed or self._idle is not None:
            mine.put(None)
        else:
            self._idle = mine

    def _work(self, mine: "queue.SimpleQueue[Job[Any] | None]", loop: asyncio.AbstractEventLoop) -> None:
        while (job := mine.get()) is not None:
            job.run()
            del job  # frees the outcome before the wait for the next call
            try:
                loop.call_soon_threadsafe(self._free, mine)
            except RuntimeError:  # the loop has closed, so the process ends
                return
