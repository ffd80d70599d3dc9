"""An event without a value: each waiter wakes and checks its condition again."""

import anyio


class Pulse:
    """An event that wakes all waiters and resets itself. Check the condition, then wait, with no await in between."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def ring(self) -> None:
        """Wake all present waiters. Only on the event loop's thread."""
        event, self._event = self._event, anyio.Event()
        event.set()

    async def wait(self, seconds: float | None = None) -> None:
        """Return at the next ring, or after `seconds`."""
        event = self._event
        if seconds is None:
            await event.wait()
        else:
            with anyio.move_on_after(seconds):
                await event.wait()
