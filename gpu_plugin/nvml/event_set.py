"""One event set of the driver, with the calls that are in it, and when the next one may take its place."""

from collections.abc import Callable
from typing import Any

import anyio
import msgspec

from gpu_plugin.nvml.events import EventWaiter
from gpu_plugin.nvml.port import EventSet, Handle
from gpu_plugin.nvml.registration import Outcome, Registered
from gpu_plugin.nvml.session import DriverCalls
from gpu_plugin.runtime.threads import Job, settled

STABLE_AFTER = 180.0
"""Seconds that an event set must have lived for its end to say nothing of the next one's."""

FREE_REBUILDS = 2
"""Event sets in a row that take another's place at once."""

FIRST_REBUILD_PAUSE = 8.0
LONGEST_REBUILD_PAUSE = 60.0
"""Seconds from the end of one event set after those to the next: the first time, and at most."""


class Member(msgspec.Struct):
    """A GPU that was asked for its events, by which handle, and the answer; None: not yet."""

    handle: Handle
    answer: Registered | None = None

    @property
    def settled(self) -> bool:
        """Whether it need not be asked again."""
        return self.answer is not None and self.answer.outcome in (Outcome.HEARD, Outcome.UNSUPPORTED)


class LiveSet(msgspec.Struct):
    """An event set that was made at time `born` of the event loop.

    `waiter` waits on it, or was the last to. `registrations` are the requests with it, whoever owns the GPUs by now.
    `members` are the GPUs by uuid. `undone` says why nothing more is to be expected of it; empty while that is not so.
    """

    events: EventSet
    born: float
    waiter: EventWaiter | None = None
    registrations: set[Job[Any]] = msgspec.field(default_factory=set)
    members: dict[str, Member] = msgspec.field(default_factory=dict)
    undone: str = ""
    _freeing: Job[None] | None = None

    @property
    def entered(self) -> bool:
        """Whether a call is in it: it must not be freed then."""
        waiting = self.waiter is not None and not self.waiter.ended
        return waiting or any(not job.done.done() for job in self.registrations)

    @property
    def gone(self) -> bool:
        """Whether it was freed, or the driver refused to free it."""
        return self._freeing is not None and self._freeing.done.done()

    def free(self, calls: DriverCalls, free: Callable[[EventSet], None]) -> None:
        """Hands its end over, once, unless a call is in it. Nothing may enter it afterwards."""
        if self._freeing is None and not self.entered:
            events = self.events
            self._freeing = calls.begin(lambda: free(events))

    async def left(self, seconds: float) -> None:
        """Waits until no call is in it, at most so long."""
        until = anyio.current_time() + seconds
        if self.waiter is not None:
            await self.waiter.left(seconds)
        for job in tuple(self.registrations):
            await settled(job, max(0.0, until - anyio.current_time()))

    async def freed(self, seconds: float) -> None:
        """Waits until it is freed, at most so long, if that was begun."""
        if self._freeing is not None:
            await settled(self._freeing, seconds)
