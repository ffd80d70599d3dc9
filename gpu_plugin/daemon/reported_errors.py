"""Errors that applications may have made, as the driver reports them: a queue without the repetitions of a burst."""

import time
from collections import deque
from collections.abc import Callable

import msgspec

from gpu_plugin.runtime.pulse import Pulse

SAME_ERROR_SECONDS = 0.05
"""Seconds within which the same Xid on the same GPU is the same error: one failing kernel raises hundreds at once."""

MAX_WAITING = 256
"""The most errors in the queue. If it is full, the oldest error is dropped."""


class Error(msgspec.Struct, frozen=True):
    """An application's error: the GPU's uuid, the Xid, and the MIG devices if the error was reported on these alone."""

    uuid: str
    xid: int
    devices: frozenset[str] = frozenset()


class ReportedErrors:
    """The queue. Everything runs on the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns the seconds of a steady clock."""
        self._clock = clock
        self._waiting: deque[Error] = deque(maxlen=MAX_WAITING)
        self._burst: dict[Error, float] = {}
        self._added = Pulse()

    def add(self, error: Error) -> None:
        """Add an error that was reported just now, unless it repeats an error of the same burst."""
        now = self._clock()
        while self._burst and now - next(iter(self._burst.values())) >= SAME_ERROR_SECONDS:
            del self._burst[next(iter(self._burst))]
        known = self._burst.pop(error, None) is not None
        self._burst[error] = now  # at the end, so that the oldest comes first
        if not known:
            self._waiting.append(error)
            self._added.ring()

    async def take(self) -> tuple[Error, ...]:
        """Wait for errors, and remove and return all of them, the oldest first."""
        while not self._waiting:
            await self._added.wait()
        errors = tuple(self._waiting)
        self._waiting.clear()
        return errors
