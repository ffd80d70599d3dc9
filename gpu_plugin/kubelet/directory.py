"""Watches the device plugin directory, which the kubelet empties, or which may go and come as a whole."""

import logging
import os
from collections.abc import Set as AbstractSet
from pathlib import Path

import anyio

from gpu_plugin.runtime.inotify import ANY, Directories, Place, route
from gpu_plugin.runtime.pulse import Pulse

log = logging.getLogger(__name__)

POLL_INTERVAL = 10.0
"""Seconds after which one looks even if nothing was heard, under what inotify may miss (a remount, an overflow)."""

UNREACHABLE = "the kubelet cannot be reached"
"""What a device plugin directory means that is an orphan."""


async def watch(directory: Path, something_happened: Pulse, orphaned: str = UNREACHABLE) -> None:
    """Rings whenever something in `directory`, or above it, may have changed. Never returns.

    It says only that one should look again: a queued event of long ago does no harm to who looks at the present. `orphaned` is
    what it means that the directory was removed where it is mounted from.
    """
    heard, was_orphan = Pulse(), False
    with Directories(heard.ring, f"in {directory}") as directories:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(directories.listen)
            while True:
                if (is_orphan := _is_orphan(directory)) and not was_orphan:
                    log.error(
                        "%s was removed on the host, and what is mounted here is only what is left of it: %s until this pod is "
                        "started again, or the process where it runs without a container",
                        directory,
                        orphaned,
                    )
                was_orphan = is_orphan
                while directories.arm(_places(directory)):
                    pass  # what came before it was watched was not heard, and may lead further
                something_happened.ring()
                await heard.wait(POLL_INTERVAL)


def _places(directory: Path) -> AbstractSet[Place]:
    """What happens in the directory, whatever the name, and to the names on the way to it."""
    return {Place(place.directory, place.name) for place in route(directory)} | {
        Place(os.path.realpath(directory), ANY)
    }


def _is_orphan(directory: Path) -> bool:
    """Whether it was removed and is still mounted here: nothing that is made in its place will ever be seen."""
    try:
        return directory.stat().st_nlink == 0
    except OSError:
        return False
