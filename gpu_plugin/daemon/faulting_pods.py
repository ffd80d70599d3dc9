"""Finds out which pods held a GPU when an application's error was reported on it, without haste and without a flood."""

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

import anyio
import msgspec

from gpu_plugin.health.observation import ApplicationError
from gpu_plugin.kubelet.pod_listing import Pods
from gpu_plugin.kubelet.snapshot import Snapshot
from gpu_plugin.runtime.pulse import Pulse

log = logging.getLogger(__name__)

QUESTION_INTERVAL = 0.25
"""Seconds between two questions: the kubelet answers 100 calls a second, all clients' together."""

SAME_ERROR_SECONDS = 0.05
"""Seconds within which the same Xid on the same GPU is the same error still: one failing kernel raises hundreds at once."""

MAX_WAITING = 256
"""Errors that wait for an answer at most; of more, the oldest are let go."""


class Error(msgspec.Struct, frozen=True):
    """An application's error: the GPU's uuid, the Xid, and the MIG devices that alone it was reported on, if it was."""

    uuid: str
    xid: int
    devices: frozenset[str] = frozenset()


class FaultingPods:
    """Asks who holds what, one question at a time, and passes errors on with the pods that may have made them.

    Errors that come while a question is under way are answered by the next. Everything runs on the event loop.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Pods | None]],
        snapshot: Callable[[], Snapshot],
        observe: Callable[[str, ApplicationError], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes how to learn what pods hold, what device ids mean now, where errors go, and a steady clock in seconds."""
        self._ask = ask
        self._snapshot = snapshot
        self._observe = observe
        self._clock = clock
        self._waiting: deque[Error] = deque(maxlen=MAX_WAITING)
        self._burst: dict[Error, float] = {}
        self._bell = Pulse()

    def heard(self, error: Error) -> None:
        """Takes in an error that was reported just now. What belongs to the burst before it counts for nothing more."""
        now = self._clock()
        while self._burst and now - next(iter(self._burst.values())) >= SAME_ERROR_SECONDS:
            del self._burst[next(iter(self._burst))]
        known = self._burst.pop(error, None) is not None
        self._burst[error] = now  # at the end, so that the oldest comes first
        if not known:
            self._waiting.append(error)
            self._bell.ring()

    async def run(self) -> None:
        """Passes errors on as they come. Never returns."""
        while True:
            if not self._waiting:
                await self._bell.wait()
                continue
            errors = [*self._waiting]
            self._waiting.clear()
            holders = await self._ask()
            for error in errors:
                pods = None if holders is None else self._pods(error, holders)
                log.debug("GPU %s: Xid %d: held by %s", error.uuid, error.xid, "nobody knows" if pods is None else pods)
                self._observe(error.uuid, ApplicationError(error.xid, pods))
            await anyio.sleep(QUESTION_INTERVAL)

    def _pods(self, error: Error, holders: Pods) -> frozenset[str]:
        """The pods that hold what the error was reported on."""
        found = (
            pods
            for _, device, pods in self._snapshot().allocated(holders)
            if device.gpu == error.uuid and (not error.devices or device.visible_id in error.devices)
        )
        return frozenset().union(*found)
