"""Parts that run for as long as the process does."""

import logging
from collections.abc import Awaitable, Callable

import anyio

log = logging.getLogger(__name__)

FIRST_RETRY = 1.0
LONGEST_RETRY = 30.0
"""Seconds before a failed part is begun again: the first time, and at most."""


async def forever(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Runs an eternal part; one that ends or fails is begun again, ever more slowly, and takes no other with it."""
    pause = FIRST_RETRY
    while True:
        began = anyio.current_time()
        try:
            await run()
            log.error("%s ended, which it should not; restarting it", name)
        except Exception:
            log.exception("%s failed; restarting it", name)
        if anyio.current_time() - began > LONGEST_RETRY:
            pause = FIRST_RETRY
        await anyio.sleep(pause)
        pause = min(pause * 2, LONGEST_RETRY)
