"""Parts that run for as long as the process does."""

import logging
from collections.abc import Awaitable, Callable

import anyio

from gpu_plugin.runtime.backoff import Backoff

log = logging.getLogger(__name__)

FIRST_RETRY = 1.0
LONGEST_RETRY = 30.0
"""Seconds before a failed part is begun again: the first time, and at most."""


async def forever(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Runs an eternal part; one that ends or fails is begun again, ever more slowly, and takes no other with it."""
    backoff = Backoff(FIRST_RETRY, LONGEST_RETRY, stable=LONGEST_RETRY)
    while True:
        began = anyio.current_time()
        try:
            await run()
            log.error("%s ended, which it should not; restarting it", name)
        except Exception:
            log.exception("%s failed; restarting it", name)
        now = anyio.current_time()
        await anyio.sleep(backoff.failed(now, worked_for=now - began))
