"""Watch the device plugin directory. The kubelet empties it, and it may be removed and made again as a whole."""

import asyncio
import logging
import os
from collections.abc import Set as AbstractSet
from pathlib import Path

import anyio

from gpu_plugin.runtime.inotify import ANY, Directories, Place, route
from gpu_plugin.runtime.pulse import Pulse

log = logging.getLogger(__name__)

# Seconds after which the directory is checked without an event: inotify may miss some changes (a remount, an overflow).
POLL_INTERVAL = 10.0


async def watch(directory: Path, changed: Pulse, orphaned: str = "the kubelet cannot be reached") -> None:
    """Ring `changed` whenever something in `directory`, or above it, may have changed. Never returns.

    A ring means that the present state should be checked, so an old queued event does no harm. `orphaned` is the consequence,
    for the log, if the directory was removed on the host.
    """
    event, was_orphan = asyncio.Event(), False
    with Directories(event, f"in {directory}") as directories:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(directories.listen)
            while True:
                if (is_orphan := _is_orphan(directory)) and not was_orphan:
                    log.error(
                        "%s was removed on the host, and only the removed directory is mounted here: %s until this pod is "
                        "started again, or the process if it runs without a container",
                        directory,
                        orphaned,
                    )
                was_orphan = is_orphan
                event.clear()
                while directories.arm(_places(directory)):
                    pass  # a change before its watch began was missed, and may need more watches
                changed.ring()
                with anyio.move_on_after(POLL_INTERVAL):
                    await event.wait()


def _places(directory: Path) -> AbstractSet[Place]:
    """Return the places to watch: every name in the directory, and each name on the path to it."""
    return {Place(place.directory, place.name) for place in route(directory)} | {
        Place(os.path.realpath(directory), ANY)
    }


def _is_orphan(directory: Path) -> bool:
    """Whether the directory was removed and is still mounted here. A new directory at its path is not visible here then."""
    try:
        return directory.stat().st_nlink == 0
    except OSError:
        return False
