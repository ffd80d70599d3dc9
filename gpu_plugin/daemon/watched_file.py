"""Report that the content of files changed, by any kind of change.

A program rewrites a file in place, or renames another file over it. The file of a ConfigMap is reached through `..data`, a link
that the kubelet replaces. Directories are removed and created. So a file event is only a reason to read the content again and
to watch the directories on its present path. A read at intervals covers missed events.
"""

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import anyio

from gpu_plugin.runtime.inotify import Directories, Place
from gpu_plugin.runtime.log_lines import LogOnChange
from gpu_plugin.runtime.regular_file import UnfitFileError, open_file
from gpu_plugin.runtime.threads import begin

T = TypeVar("T")

log = logging.getLogger(__name__)

POLL_INTERVAL = 1.5  # seconds between two reads without a file event: every change is found within two seconds
SETTLE = 0.075  # seconds without a file event after which the files are read
LONGEST_SETTLE = 0.4  # seconds of the longest wait for SETTLE seconds without a file event
PATIENCE = 5.0  # seconds for a read: a dead network file system must block only its thread

# The fingerprint of a larger file has its size and time, not its content. Such a file is refused as configuration.
MAX_BYTES = 3 * 1024 * 1024

ABSENT = "absent"


def fingerprint(path: Path) -> str:
    """Return a digest of a file's content, or a text with the reason why it cannot be read, such as ABSENT. Never raises."""
    try:
        with open_file(path, null=True) as file:
            there = os.fstat(file.fileno())
            if there.st_size > MAX_BYTES:
                return f"too large: {there.st_size} {there.st_mtime_ns}"
            import hashlib  # noqa: PLC0415 - takes 1 ms, and only a file needs it

            digest = hashlib.blake2b(digest_size=16)
            left = MAX_BYTES
            while left > 0 and (piece := file.read(min(left, 1 << 16))):
                digest.update(piece)
                left -= len(piece)
            return digest.hexdigest()
    except FileNotFoundError:
        return ABSENT
    except UnfitFileError as error:
        return f"unfit: {error.strerror}"
    except OSError as error:
        return f"unreadable: {errno.errorcode.get(error.errno or 0, error.errno)}"


class FileWatcher(Generic[T]):
    """Reads files again after each change, once the changes have settled, and at intervals."""

    def __init__(self, read: Callable[[], tuple[T, frozenset[Place]]], receive: Callable[[T], None]) -> None:
        """`read` runs on a thread and may block. It returns a value, and all places where a change could change the value.

        `receive` is called on the event loop with each value, changed or not.
        """
        self._read = read
        self._receive = receive
        self._notified = asyncio.Event()
        self._hangs = LogOnChange(log, "configuration files cannot be read: the file system does not answer for %s s")

    def notify(self) -> None:
        """Report that input of `read` changed. Call on the event loop's thread only."""
        self._notified.set()

    async def run(self) -> None:
        """Read at once, and then at each change and at intervals. Never returns."""
        with Directories(self._notified, "of configuration files") as directories:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(directories.listen)
                while True:
                    self._notified.clear()
                    await self._read_once(directories)
                    await self._wait()

    async def _read_once(self, directories: Directories) -> None:
        try:
            value, places = await begin(self._read, "configuration-files").result(PATIENCE)
            if directories.arm(places):  # a change before the watch began had no event
                value, places = await begin(self._read, "configuration-files").result(PATIENCE)
                directories.arm(places)
        except TimeoutError:
            self._hangs.update(f"{PATIENCE:g}")
            return
        self._hangs.update("")
        self._receive(value)

    async def _wait(self) -> None:
        with anyio.move_on_after(POLL_INTERVAL):
            await self._notified.wait()
        until = anyio.current_time() + LONGEST_SETTLE
        while self._notified.is_set() and anyio.current_time() < until:
            self._notified.clear()
            await anyio.sleep(SETTLE)
