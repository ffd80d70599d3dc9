"""The real daemon as a child process, with its log."""

import asyncio
import collections
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping

from gpu_plugin.config.settings import OPTIONS

EXIT_SECONDS = 5.0
LOG_TAIL = 15


class DaemonProcess:
    """The daemon as a child process. Log lines are stored when they arrive, and `wake` is called after each."""

    def __init__(self, process: asyncio.subprocess.Process, wake: Callable[[], None]) -> None:
        self.messages: list[str] = []
        self.tail: collections.deque[str] = collections.deque(maxlen=LOG_TAIL)
        self.process = process
        self._wake = wake
        self._reader = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        """Whether the process has ended and its whole log was read."""
        return self._reader.done()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self.tail.append(line)
            with contextlib.suppress(ValueError, TypeError, KeyError):  # not every line is a JSON log record
                self.messages.append(str(json.loads(line)["message"]))
            self._wake()
        await self.process.wait()
        asyncio.get_running_loop().call_soon(self._wake)

    async def end(self) -> None:
        """End the process: with SIGTERM if it reacts in time, else with SIGKILL."""
        if self.process.returncode is None:
            self.process.terminate()
        try:
            async with asyncio.timeout(EXIT_SECONDS):
                await asyncio.shield(self._reader)
        except TimeoutError:
            self.process.kill()
            await self._reader


@contextlib.asynccontextmanager
async def daemon_process(flags: Mapping[str, object], wake: Callable[[], None]) -> AsyncIterator[DaemonProcess]:
    """Run `gpu-plugin run` with `flags` (without their dashes) during the context, with its log as JSON."""
    arguments = {**flags, "log-format": "json"}
    given = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    ours = {
        name for option in OPTIONS for name in option.envs
    }  # settings in the environment of this process are for another daemon
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gpu_plugin", "run", *given),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        limit=1 << 20,
    )
    daemon = DaemonProcess(process, wake)
    try:
        yield daemon
    finally:
        await daemon.end()
