"""Blocking calls on daemon threads of our own, so that one that hangs holds nothing but itself.

A pool's threads would be waited for at exit, and a hung NVML call or disk write cannot be ended: so each thread here is
a daemon, and one that does not come back is left behind and replaced.
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
    """A call has not come back within the seconds that it was given. A TimeoutError of the call's own is none of these."""

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
        """Makes the call, on the thread that runs this, and hands its outcome to the event loop."""
        outcome: T | None = None
        error: BaseException | None = None
        try:
            outcome = self._call()
        except Exception as raised:  # noqa: BLE001 - it is raised again where the call was asked for
            error = raised
        with suppress(RuntimeError):  # the loop has closed: the process is leaving, nobody wants the outcome
            self._loop.call_soon_threadsafe(self.settle, outcome, error)

    def settle(self, outcome: Any, error: BaseException | None) -> None:
        """Gives the call its outcome, also one that cannot be made. From the event loop's thread."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(outcome)
        else:
            self.done.set_exception(error)
            self.done.exception()  # marks it as seen: a call given up on may fail unheard


def begin(call: Callable[[], T], name: str) -> Job[T]:
    """Starts a call on a daemon thread of its own, called `name`, which ends with it. From the event loop's thread."""
    job = Job(call, asyncio.get_running_loop())
    try:
        threading.Thread(target=job.run, name=name, daemon=True).start()
    except RuntimeError as error:  # the process may have no more threads: that is the call's outcome
        job.settle(None, error)
    return job


async def settled(job: "Job[Any]", patience: float | None = None) -> bool:
    """Waits for a call, at most so many seconds (None: for as long as it takes). Returns whether it has come back."""
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
    """A call's result. Raises what the call raises, and NoAnswerError after `patience` seconds; it goes on then."""
    if not await settled(job, patience):
        raise NoAnswerError(patience)
    return job.done.result()


STALL = 0.02
"""Seconds for which every worker stays in its call, while other calls wait, before those get workers of their own."""


OFF_LOOP_DEVICES = 2_000
"""From so many devices on (2 to 4 µs each) what is told of them is judged on a thread, so that the loop runs on."""


async def computed(call: Callable[[*Ts], T], *args: *Ts, apart: bool) -> T:
    """What a call brings that computes and waits for nothing, made on a thread where that is `apart`, so that the loop runs on.

    What it makes there, a tuple for each device and more, goes as it comes; the interpreter would look for cycles among all
    devices because of so much, which takes 0.1 s in which the event loop stands still. So it does not look meanwhile.
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
    """Runs calls at once with as few daemon threads called `name` as will do.

    One worker makes quick calls one after the other; each next one is begun once the event loop has the last one's outcome,
    so that a row of them does not keep the interpreter from the loop. Where none was begun for `STALL` seconds, each that
    waits gets a worker. Of those that have nothing to do one stays, the others end. For the event loop's thread.
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
        """Hands a call over. It goes on whoever stops waiting for it."""
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
        """The call's result. Raises what the call raises, and NoAnswerError after `patience` seconds; it goes on then."""
        return await answered(self.begin(call), patience)

    def close(self) -> None:
        """Lets every thread end: at once, or after the call that it is in; one that hangs ends with the process."""
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
        if mine not in self._busy:  # it was told to end
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
            del job  # its outcome is not to live for as long as the next one is waited for
            try:
                loop.call_soon_threadsafe(self._free, mine)
            except RuntimeError:  # the loop has closed: the process is leaving
                return
