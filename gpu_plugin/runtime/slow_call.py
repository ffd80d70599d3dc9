"""Calls that may take long, or never come back: one at a time, and what one brings is collected later."""

from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from gpu_plugin.runtime.threads import Job, NoAnswerError, settled

T = TypeVar("T")


class SlowCall(Generic[T]):
    """The one call of its kind. While it is under way no other is begun, however often it is asked for.

    Calls of which each GPU has one are plain `Job`s by GPU (`nvml.finding`, `nvml.reports`).

    For the event loop's thread; whoever waits here may be cancelled, and the call goes on.
    """

    def __init__(self, begin: Callable[[Callable[[], T]], Job[T]]) -> None:
        """`begin` hands a call to a thread that nobody waits for at the end of the process."""
        self._begin = begin
        self._job: Job[T] | None = None

    @property
    def begun(self) -> bool:
        """Whether there is a call whose outcome nobody has taken yet."""
        return self._job is not None

    @property
    def under_way(self) -> bool:
        """Whether it has not come back yet."""
        return self._job is not None and not self._job.done.done()

    @property
    def back(self) -> bool:
        """Whether it has come back, and its outcome is there to be taken."""
        return self._job is not None and self._job.done.done()

    @property
    def started(self) -> float | None:
        """Event loop time at which it was begun, in seconds; None where there is none."""
        return None if self._job is None else self._job.started

    def begin(self, call: Callable[[], T]) -> None:
        """Begins a call, unless there is one."""
        if self._job is None:
            self._job = self._begin(call)

    async def wait(self, seconds: float | None = None) -> bool:
        """Waits for it, at most so many seconds (None: for as long as it takes). Returns whether it is back."""
        return self._job is not None and await settled(self._job, seconds)

    def take(self) -> Job[T]:
        """The call with its outcome, once it is back: from then on there is none."""
        assert self._job is not None
        job, self._job = self._job, None
        return job

    def forget(self) -> None:
        """Gives up the call under way: nobody takes its outcome, and the next call may begin beside it."""
        self._job = None

    async def joined(self, call: Callable[[], T], seconds: float) -> T:
        """What the call brings; where one is under way already, what that one does. Several may wait for the same one.

        Raises:
            NoAnswerError: it takes longer. It goes on, and is the one that is asked about the next time.
            Exception: whatever the call raises.
        """
        self.begin(call)
        return (await self._over(anyio.current_time() + seconds, seconds)).done.result()

    async def fresh(self, call: Callable[[], T], seconds: float) -> T:
        """What this very call brings; those that are under way before it are waited for, and what they bring is let go of.

        Raises:
            NoAnswerError: all together take longer. One of them goes on.
            Exception: whatever the call raises.
        """
        until = anyio.current_time() + seconds
        while self.begun:
            await self._over(until, seconds)
        self.begin(call)
        return (await self._over(until, seconds)).done.result()

    async def _over(self, until: float, seconds: float) -> Job[T]:
        """The call that there is, once it is over; from then on there is none, unless another who waited began the next.

        Raises NoAnswerError where it is not by that event loop time, `seconds` after it was asked for. What has come back counts,
        however late the loop itself gets to look.
        """
        assert self._job is not None
        job = self._job
        if not await settled(job, max(0.0, until - anyio.current_time())):
            raise NoAnswerError(seconds)
        if self._job is job:
            self._job = None
        return job
