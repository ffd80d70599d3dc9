"""Wakes everyone who waits. A pulse carries nothing: whoever wakes looks at the state of things again."""

import anyio


class Pulse:
    """A bell for level readers: look, find nothing to do, wait; no await stands between, so no ring is missed."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def ring(self) -> None:
        """Wakes all who wait now. From the event loop's thread only."""
        event, self._event = self._event, anyio.Event()
        event.set()

    async def wait(self, seconds: float | None = None) -> None:
        """Returns at the next ring, or after `seconds`."""
        event = self._event
        if seconds is None:
            await event.wait()
        else:
            with anyio.move_on_after(seconds):
                await event.wait()
