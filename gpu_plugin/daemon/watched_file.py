"""Report that the content of files changed, in whichever way.

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

from gpu_plugin.runtime.inotify import Directories, Place, route
from gpu_plugin.runtime.regular_file import UnfitFileError, open_file
from gpu_plugin.runtime.threads import Workers

T = TypeVar("T")

log = logging.getLogger(__name__)

POLL_INTERVAL = 1.5
"""Seconds after which one looks even if nothing was heard, so that nothing stays unnoticed for two."""

SETTLE = 0.075
"""Seconds of quiet after which changes are looked at."""

LONGEST_SETTLE = 0.4
"""Seconds that are waited for that quiet at most."""

PATIENCE = 5.0
"""Seconds for a look: a dead network file system must hold up nothing but its thread."""

MAX_BYTES = 3 * 1024 * 1024
"""Of a larger file, which is refused as configuration anyway, size and time stand for the content."""

ABSENT = "absent"


def fingerprint(path: Path) -> str:
    """What tells one content of a file from another: a digest, or why there is none (`ABSENT`, for one). Never raises."""
    try:
        with open_file(path, null=True) as file:
            there = os.fstat(file.fileno())
            if there.st_size > MAX_BYTES:
                return f"too large: {there.st_size} {there.st_mtime_ns}"
            import hashlib  # noqa: PLC0415 - 1 ms that only a file needs

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
    """Looks again whenever there may be something new to see, once what happens has calmed down, and now and then anyway."""

    def __init__(self, look: Callable[[], tuple[T, frozenset[Place]]], take: Callable[[T], None]) -> None:
        """`look` runs on a thread and may block; it gives what it sees, and all places where a change could make it another.

        `take` gets all that it sees, on the event loop, changed or not.
        """
        self._look = look
        self._take = take
        self._notified = asyncio.Event()
        self._patient = True

    def notify(self) -> None:
        """Something that `look` depends on changed. From the event loop's thread only."""
        self._notified.set()

    async def run(self) -> None:
        """Looks at once, then for ever."""
        threads = Workers("configuration-files")
        try:
            with Directories(self.notify, "of configuration files") as directories:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(directories.listen)
                    while True:
                        self._notified.clear()
                        await self._look_once(threads, directories)
                        await self._wait()
        finally:
            threads.close()

    async def _look_once(self, threads: Workers, directories: Directories) -> None:
        try:
            seen, places = await threads.run(self._look, PATIENCE)
            if directories.arm(places):  # a change before the watch began had no event
                seen, places = await threads.run(self._look, PATIENCE)
                directories.arm(places)
        except TimeoutError:
            if self._patient:
                log.warning(
                    "configuration files cannot be looked at: the file system does not answer for %g s", PATIENCE
                )
            self._patient = False
            return
        self._patient = True
        self._take(seen)

    async def _wait(self) -> None:
        with anyio.move_on_after(POLL_INTERVAL):
            await self._notified.wait()
        until = anyio.current_time() + LONGEST_SETTLE
        while self._notified.is_set() and anyio.current_time() < until:
            self._notified.clear()
            await anyio.sleep(SETTLE)


async def watch_file(path: Path, changed: Callable[[], None], known: str | None = None) -> None:
    """Calls `changed` whenever the content of `path` is another than at the last call. Never returns.

    Another content is any whose `fingerprint` differs: so is none at all, or one that cannot be read. `known` is the
    fingerprint taken before the content was read first; without it, the first call comes at once.
    """
    last = known

    def take(seen: str) -> None:
        nonlocal last
        if seen != last:
            last = seen
            changed()

    await FileWatcher(lambda: (fingerprint(path), route(path)), take).run()
