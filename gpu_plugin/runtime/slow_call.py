"""Calls that may take long or never return: one at a time, with the result collected later."""

from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from gpu_plugin.runtime.threads import Job, NoAnswerError, settled

T = TypeVar("T")


class SlowCall(Generic[T]):
    """The only call of its kind: while it runs, no other begins.

    Calls that each GPU has for itself are plain `Job`s by GPU (`nvml.finding`, `nvml.reports`).

    Use it on the event loop's thread. A waiter may be cancelled, and the call runs on.
    """

    def __init__(self, begin: Callable[[Callable[[], T]], Job[T]]) -> None:
        """`begin` starts a call on a thread that does not hold up the end of the process."""
        self._begin = begin
        self._job: Job[T] | None = None

    @property
    def begun(self) -> bool:
        """Whether there is a call whose outcome was not taken yet."""
        return self._job is not None

    @property
    def under_way(self) -> bool:
        """Whether the call runs."""
        return self._job is not None and not self._job.done.done()

    @property
    def back(self) -> bool:
        """Whether the call has returned, and its outcome was not taken yet."""
        return self._job is not None and self._job.done.done()

    @property
    def started(self) -> float | None:
        """Event loop time at which the call began, in seconds; None without a call."""
        return None if self._job is None else self._job.started

    def begin(self, call: Callable[[], T]) -> None:
        """Begin a call unless there is a call."""
        if self._job is None:
            self._job = self._begin(call)

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait for the call, at most `seconds` (None: without a limit). Returns whether the call has returned."""
        return self._job is not None and await settled(self._job, seconds)

    def take(self) -> Job[T]:
        """Remove the call, which has returned, and return it with its outcome."""
        assert self._job is not None
        job, self._job = self._job, None
        return job

    def forget(self) -> None:
        """Drop the call, so that another may begin while it still runs. Its outcome is lost."""
        self._job = None

    async def joined(self, call: Callable[[], T], seconds: float) -> T:
        """The result of the call, or of the call that runs already. Several tasks may wait for the same call.

        Raises:
            NoAnswerError: it takes longer. It runs on, and the next `joined` waits for it.
            Exception: the error of the call.
        """
        self.begin(call)
        return (await self._over(anyio.current_time() + seconds, seconds)).done.result()

    async def fresh(self, call: Callable[[], T], seconds: float) -> T:
        """The result of this call, which begins after the calls before it. Their results are dropped.

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

        Raises NoAnswerError if it runs at event loop time `until`, `seconds` after the request. A call that has returned counts,
        however late the event loop runs.
        """
        assert self._job is not None
        job = self._job
        if not await settled(job, max(0.0, until - anyio.current_time())):
            raise NoAnswerError(seconds)
        if self._job is job:
            self._job = None
        return job
