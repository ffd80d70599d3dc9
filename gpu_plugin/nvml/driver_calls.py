"""Driver calls on threads: as few threads as possible, and a call that hangs keeps its own."""

import asyncio
import collections
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from gpu_plugin.runtime.threads import Job, Threads

T = TypeVar("T")

# Seconds after which waiting calls get threads of their own if every thread is still busy.
STALL = 0.02


class DriverCalls(Threads):
    """Makes driver calls, and records which calls have not returned. Use it on the event loop's thread.

    One thread makes quick calls one after the other. It begins the next call when the event loop has the outcome of the last,
    so that the loop gets the interpreter in between. If no call began for `STALL` seconds, each waiting call gets a thread. One
    idle thread stays, and the others end.
    """

    def __init__(self) -> None:
        super().__init__("nvml-calls")
        self._out: set[Job[Any]] = set()
        self._waiting: collections.deque[Job[Any]] = collections.deque()
        self._idle: queue.SimpleQueue[Job[Any] | None] | None = None
        self._busy: set[queue.SimpleQueue[Job[Any] | None]] = set()
        self._begun = 0
        self._closed = False
        self._watching = False

    @property
    def under_way(self) -> bool:
        """True if a call has not returned, even if no task waits for it any more."""
        return any(not job.returned for job in self._out)

    async def back(self, seconds: float) -> bool:
        """Wait up to this many seconds until all calls have returned. Return whether they have."""
        until = anyio.current_time() + seconds
        for job in tuple(self._out):
            await job.wait(max(0.0, until - anyio.current_time()))
        return not self.under_way

    def begin(self, call: Callable[[], T]) -> Job[T]:
        """Start a call. It runs on if its waiter is cancelled."""
        loop = asyncio.get_running_loop()
        job = Job(call, loop)
        self._out.add(job)
        job.done.add_done_callback(lambda _: self._out.discard(job))
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
            threading.Thread(target=self._work, args=(mine, loop), name=self.name, daemon=True).start()
        except RuntimeError as error:
            self._busy.discard(mine)
            job.settle(None, error)

    def _give(self, mine: "queue.SimpleQueue[Job[Any] | None]", job: Job[Any]) -> None:
        self._begun += 1
        self._busy.add(mine)
        mine.put(job)

    def _free(self, mine: "queue.SimpleQueue[Job[Any] | None]") -> None:
        """A thread has nothing to do."""
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
