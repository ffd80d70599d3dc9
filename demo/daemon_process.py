"""Run the real daemon as a child process and read its log."""

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
    """The daemon as a child process. Calls `wake` after each log line and when the process has ended.

    Attributes:
        messages: the message of each log record, in order.
        tail: the last LOG_TAIL lines of the output, which need not be log records.
    """

    def __init__(self, process: asyncio.subprocess.Process, wake: Callable[[], None]) -> None:
        self.messages: list[str] = []
        self.tail: collections.deque[str] = collections.deque(maxlen=LOG_TAIL)
        self.process = process
        self._wake = wake
        self._reader = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        """Whether the process has ended and its whole log has been read."""
        return self._reader.done()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self.tail.append(line)
            with contextlib.suppress(ValueError, TypeError, KeyError):  # the line is not a log record
                self.messages.append(str(json.loads(line)["message"]))
            self._wake()
        await self.process.wait()
        asyncio.get_running_loop().call_soon(self._wake)

    async def end(self) -> None:
        """Terminate the process and wait until it has ended. Kill it after EXIT_SECONDS."""
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
    """Run `gpu-plugin run` with `flags` (names without dashes) until the context ends. The log is JSON."""
    arguments = {**flags, "log-format": "json"}
    given = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    # Variables that configure another daemon must not configure this daemon.
    ours = {name for option in OPTIONS for name in option.envs}
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
