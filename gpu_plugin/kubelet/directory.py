"""Watches the device plugin directory, which the kubelet empties, or which may go and come as a whole."""

import logging
from pathlib import Path

import anyio

from gpu_plugin.inotify import Inotify, Mask
from gpu_plugin.pulse import Pulse

log = logging.getLogger(__name__)

_WATCHED = (
    Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
)

NET = 10.0
"""Seconds after which one looks even if nothing was heard, under what inotify may miss (a remount, an overflow)."""


async def watch(directory: Path, something_happened: Pulse) -> None:
    """Rings whenever something in `directory`, or above it while it does not exist, may have changed. Never returns.

    It says only that one should look again: a queued event of long ago does no harm to who looks at the present.
    """
    while True:
        try:
            await _watch_once(directory, something_happened)
        except OSError as error:
            log.warning("cannot watch %s, looking every %g s instead: %s", directory, NET, error)
            await anyio.sleep(NET)
        something_happened.ring()


async def _watch_once(directory: Path, something_happened: Pulse) -> None:
    """Watches until what is watched is no longer the right place."""
    target = directory
    while not target.is_dir() and target != target.parent:
        target = target.parent
    with Inotify() as inotify:
        inotify.add_watch(target, _WATCHED)
        if target != _nearest(directory):
            return  # it appeared or went while the watch was being set
        something_happened.ring()
        while True:
            event = None
            with anyio.move_on_after(NET):
                event = await inotify.get()
            something_happened.ring()
            if event is not None and event.mask & (Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.IGNORED | Mask.Q_OVERFLOW):
                return
            if target != _nearest(directory):
                return


def _nearest(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    while not directory.is_dir() and directory != directory.parent:
        directory = directory.parent
    return directory
