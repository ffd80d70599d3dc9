"""Watches the device plugin directory, which the kubelet empties, or which may go and come as a whole."""

import logging
from collections.abc import Iterator
from pathlib import Path

import anyio

from gpu_plugin.runtime.inotify import Event, Inotify, Mask, Watch
from gpu_plugin.runtime.pulse import Pulse

log = logging.getLogger(__name__)

_WATCHED = (
    Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
)
_ON_THE_WAY = Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE | Mask.ONLYDIR

POLL_INTERVAL = 10.0
"""Seconds after which one looks even if nothing was heard, under what inotify may miss (a remount, an overflow)."""

Place = tuple[int, int]
"""Which directory something is: device and inode."""


UNREACHABLE = "the kubelet cannot be reached"
"""What a device plugin directory means that is an orphan."""


async def watch(directory: Path, something_happened: Pulse, orphaned: str = UNREACHABLE) -> None:
    """Rings whenever something in `directory`, or above it, may have changed. Never returns.

    It says only that one should look again: a queued event of long ago does no harm to who looks at the present. `orphaned` is
    what it means that the directory was removed where it is mounted from.
    """
    orphan = OrphanCheck(directory, orphaned)
    while True:
        try:
            await _watch_once(directory, something_happened, orphan)
        except OSError as error:
            log.warning("cannot watch %s, looking every %g s instead: %s", directory, POLL_INTERVAL, error)
            await anyio.sleep(POLL_INTERVAL)
        something_happened.ring()


async def _watch_once(directory: Path, something_happened: Pulse, orphan: "OrphanCheck") -> None:
    """Watches until what is watched is no longer the right place."""
    target, place = _nearest(directory)
    with Inotify() as inotify:
        inotify.add_watch(target, _WATCHED)
        on_the_way = dict(_watch_above(inotify, target))
        if _nearest(directory) != (target, place):
            return  # it appeared or went while the watch was being set
        something_happened.ring()
        while True:
            event = None
            orphan.look()
            with anyio.move_on_after(POLL_INTERVAL):
                event = await inotify.get()
            if event is not None and event.watch is not None and _beside(event, on_the_way.get(event.watch)):
                continue
            something_happened.ring()
            if event is not None and event.mask & (Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.IGNORED | Mask.Q_OVERFLOW):
                return
            if _nearest(directory) != (target, place):
                return


def _nearest(directory: Path) -> tuple[Path, Place]:
    """The directory, or the nearest one above it that exists, and which one it is. Raises OSError where that cannot be said."""
    while not directory.is_dir() and directory != directory.parent:
        directory = directory.parent
    status = directory.stat()
    return directory, (status.st_dev, status.st_ino)


def _watch_above(inotify: Inotify, target: Path) -> Iterator[tuple[Watch, frozenset[str]]]:
    """Watches the directories that lead to the target, by its own path and by the one that links on it lead to.

    Gives the names in each that are next on the way: renamed or made again, the path leads elsewhere.
    """
    names: dict[Place, set[str]] = {}
    paths: dict[Place, Path] = {}
    for way in (target, target.resolve()):
        for parent, name in zip(way.parents, (way, *way.parents), strict=False):
            status = parent.stat()
            place = status.st_dev, status.st_ino
            paths.setdefault(place, parent)
            names.setdefault(place, set()).add(name.name)
    for place, parent in paths.items():
        try:
            watch = inotify.add_watch(parent, _ON_THE_WAY)
        except PermissionError as error:  # what happens there is found out at the next look
            log.debug("cannot watch %s: %s", parent, error)
        else:
            yield watch, frozenset(names[place])


def _beside(event: Event, names: frozenset[str] | None) -> bool:
    """Whether what happened in a directory on the way has to do with a neighbour alone."""
    return names is not None and event.name is not None and event.name.name not in names


class OrphanCheck:
    """Whether a directory was removed that is still mounted here: nothing that is made in its place will ever be seen."""

    def __init__(self, directory: Path, means: str = UNREACHABLE) -> None:
        self._directory = directory
        self._means = means
        self._was = False

    def look(self) -> bool:
        """Says once that it was, and returns whether it is."""
        try:
            now = self._directory.stat().st_nlink == 0
        except OSError:
            now = False
        if now and not self._was:
            log.error(
                "%s was removed on the host, and what is mounted here is only what is left of it: %s until this pod is started "
                "again, or the process where it runs without a container",
                self._directory,
                self._means,
            )
        self._was = now
        return now
