"""Blocking calls on daemon threads, so that a call that hangs holds up nothing else.

The interpreter waits at its exit for the threads of a pool, and a hung NVML call or disk write cannot be ended. So each thread
here is a daemon thread. A thread that does not return is left behind.

    begin(call, "name")              a call on a thread of its own: a `Job`, whose outcome stays readable however late it comes
    SlowCall("name")                 the only call of its kind: while it runs, no other begins
    computed(call, ..., apart=True)  a computation, which ends by itself
"""

import asyncio
import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class NoAnswerError(TimeoutError):
    """A call did not return within its seconds. A TimeoutError that the call raises is another error."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer for {seconds:g} s")


class Job(Generic[T]):
    """One call under way.

    Attributes:
        started: event loop time at which the call was handed over, in seconds.
        done: the outcome.
    """

    def __init__(self, call: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop
        self.started = loop.time()
        self.done: asyncio.Future[T] = loop.create_future()

    @property
    def returned(self) -> bool:
        """Whether the call has returned."""
        return self.done.done()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for the call, at most `seconds` (None: without a limit). Return whether it has returned.

        A finished call counts, however late the event loop runs.
        """
        returned = anyio.Event()

        def wake(_: object) -> None:
            returned.set()

        if not self.done.done():
            self.done.add_done_callback(wake)
            try:
                with anyio.move_on_after(seconds):
                    await returned.wait()
            finally:
                self.done.remove_done_callback(wake)
        return self.done.done()

    async def result(self, seconds: float | None = None) -> T:
        """Return the result. Raises the error of the call, or NoAnswerError after `seconds`, while the call runs on."""
        if not await self.wait(seconds):
            assert seconds is not None
            raise NoAnswerError(seconds)
        return self.done.result()

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
    return Threads(name).begin(call)


class Threads:
    """Makes each call on a daemon thread of its own, all of one name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def begin(self, call: Callable[[], T]) -> Job[T]:
        """Start a call. Call it on the event loop's thread. The call runs on if its waiter is cancelled."""
        job = Job(call, asyncio.get_running_loop())
        try:
            threading.Thread(target=job.run, name=self.name, daemon=True).start()
        except RuntimeError as error:  # the process may have no more threads: the call has this error
            job.settle(None, error)
        return job


class SlowCall(Generic[T]):
    """A call of which at most one runs. Its waiters may be cancelled, and the call runs on.

    Use it on the event loop's thread. Calls that each GPU has for itself are plain `Job`s by GPU (`nvml.finding`,
    `nvml.reports`).
    """

    def __init__(self, threads: str | Threads) -> None:
        """`threads` makes the calls. With a name in its place, each call has a thread with this name."""
        self._threads = Threads(threads) if isinstance(threads, str) else threads
        self._job: Job[T] | None = None

    @property
    def begun(self) -> bool:
        """Whether there is a call whose outcome was not taken yet."""
        return self._job is not None

    @property
    def under_way(self) -> bool:
        """Whether the call runs."""
        return self._job is not None and not self._job.returned

    @property
    def back(self) -> bool:
        """Whether the call has returned, and its outcome was not taken yet."""
        return self._job is not None and self._job.returned

    @property
    def started(self) -> float | None:
        """Event loop time at which the call began, in seconds; None without a call."""
        return None if self._job is None else self._job.started

    def begin(self, call: Callable[[], T]) -> None:
        """Begin a call unless there is a call."""
        if self._job is None:
            self._job = self._threads.begin(call)

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for the call, at most `seconds` (None: without a limit). Return whether the call has returned."""
        return self._job is not None and await self._job.wait(seconds)

    def take(self) -> Job[T]:
        """Remove the call, which has returned, and return it with its outcome."""
        assert self._job is not None
        job, self._job = self._job, None
        return job

    def forget(self) -> None:
        """Drop the call, so that another may begin while it still runs. Its outcome is lost."""
        self._job = None

    async def joined(self, call: Callable[[], T], seconds: float) -> T:
        """Return the result of the call, or of the call that runs already. Several tasks may wait for the same call.

        Raises:
            NoAnswerError: it takes longer. It runs on, and the next `joined` waits for it.
            Exception: the error of the call.
        """
        self.begin(call)
        return (await self._over(anyio.current_time() + seconds, seconds)).done.result()

    async def fresh(self, call: Callable[[], T], seconds: float) -> T:
        """Return the result of this call, which begins after the calls before it. Their results are dropped.

        Raises:
            NoAnswerError: all together take longer. The present call runs on.
            Exception: the error of the call.
        """
        until = anyio.current_time() + seconds
        while self.begun:
            await self._over(until, seconds)
        self.begin(call)
        return (await self._over(until, seconds)).done.result()

    async def _over(self, until: float, seconds: float) -> Job[T]:
        """Wait for the present call, remove it unless another waiter has replaced it, and return it.

        Raises NoAnswerError if it runs at event loop time `until`, `seconds` after the request.
        """
        assert self._job is not None
        job = self._job
        if not await job.wait(max(0.0, until - anyio.current_time())):
            raise NoAnswerError(seconds)
        if self._job is job:
            self._job = None
        return job


# Lists of this many devices or more are judged on a thread (2 to 4 µs each), so that the event loop runs on.
OFF_LOOP_DEVICES = 2_000


async def computed(call: Callable[[*Ts], T], *args: *Ts, apart: bool) -> T:
    """Return the result of a computation, on a thread if `apart`, so that the event loop runs on.

    A computation creates a tuple and more for each device. That many objects start the search for reference cycles, which stops
    the event loop for 0.1 s. So the search is off until the computation ends.
    """
    if not apart:
        return call(*args)
    return await anyio.to_thread.run_sync(_without_cycles, call, *args, abandon_on_cancel=True)


def _without_cycles(call: Callable[[*Ts], T], *args: *Ts) -> T:
    gc.disable()
    try:
        return call(*args)
    finally:
        gc.enable()
