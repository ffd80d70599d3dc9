"""Wait for a condition in a test."""

from collections.abc import Callable

import anyio


async def until(met: Callable[[], object], seconds: float = 20) -> None:
    """Return once `met()` is true. Raises TimeoutError after this many seconds."""
    with anyio.fail_after(seconds):
        while not met():
            await anyio.sleep(0.002)
