"""Parts that run for as long as the process does."""

import logging
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from gpu_plugin.runtime.backoff import Backoff

log = logging.getLogger(__name__)

Part = tuple[str, Callable[[], Awaitable[None]]]  # A part that runs until it is cancelled, with its name for the log

# Seconds before a failed part is begun again: the first time, and at most.
FIRST_RETRY = 1.0
LONGEST_RETRY = 30.0


async def forever(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Runs an eternal part, and starts it again at growing intervals if it ends or fails. Other parts run on."""
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


class PartGroup:
    """Parts that start together and end together, any number of times."""

    def __init__(self, tasks: anyio.abc.TaskGroup, *parts: Part) -> None:
        """The parts run in `tasks`. A part that fails is started again."""
        self._tasks = tasks
        self._parts = parts
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    def start(self) -> None:
        """Start the parts, none of which runs."""
        self._scope, self._ended = anyio.CancelScope(), anyio.Event()
        self._tasks.start_soon(self._run, self._scope, self._ended)

    async def end(self) -> None:
        """Cancel the parts, and wait until all have ended."""
        self._scope.cancel()
        await self._ended.wait()

    async def _run(self, scope: anyio.CancelScope, ended: anyio.Event) -> None:
        try:
            with scope:
                async with anyio.create_task_group() as tasks:
                    for name, run in self._parts:
                        tasks.start_soon(forever, name, run)
        finally:
            ended.set()
