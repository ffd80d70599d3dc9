"""An event loop without waits: while it is idle, its time advances to the next timer at once.

Sockets, pipes and inotify are real: data in flight within the process arrives before time advances. The
loop does not count the time of threads, so tests on it run the work of threads in place.
"""

import asyncio
import selectors
from collections.abc import Mapping
from typing import Any

STUCK = 20.0
"""Seconds of real time after which a loop without timers, in which nothing happens, is said to be stuck."""


class _Skipping(selectors.BaseSelector):
    """A selector that reports what is ready now, or has `passed` on by as long as it was to wait."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.passed = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not ready and timeout is None:
            ready = self._real.select(STUCK)
            if not ready:
                raise RuntimeError("nothing will ever happen on this loop")
        elif not ready and timeout:
            self.passed += timeout
        return ready

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class SkippingLoop(asyncio.SelectorEventLoop):
    """Begins at time 0."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Seconds since the loop's beginning."""
        return self._skipping.passed
