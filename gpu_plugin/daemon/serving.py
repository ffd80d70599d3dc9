"""The parts that answer the kubelet. They may outlive their daemon, until the next daemon has registered."""

from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from gpu_plugin.runtime.supervision import forever


class Serving:
    """Runs parts in a task group of the process until `end`."""

    def __init__(self, around: anyio.abc.TaskGroup) -> None:
        self._around = around
        self._scope = anyio.CancelScope()
        self._ended: anyio.Event | None = None

    def start(self, *parts: tuple[str, Callable[[], Awaitable[None]]]) -> None:
        """Start the parts, by name. A part that fails is started again. Call it once."""
        self._ended = anyio.Event()
        self._around.start_soon(self._run, parts, self._ended)

    def cancel(self) -> None:
        """Cancel all parts, without waiting."""
        self._scope.cancel()

    async def end(self) -> None:
        """Cancel all parts and wait until they have ended."""
        self._scope.cancel()
        if self._ended is not None:
            with anyio.CancelScope(shield=True):
                await self._ended.wait()

    async def _run(self, parts: tuple[tuple[str, Callable[[], Awaitable[None]]], ...], ended: anyio.Event) -> None:
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    for name, run in parts:
                        tasks.start_soon(forever, name, run)
        finally:
            ended.set()
