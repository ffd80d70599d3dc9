"""Watch directories with inotify: the only import of asyncinotify, which here runs no program.

asyncinotify finds the C library with `ctypes.util.find_library`, which runs ldconfig or a compiler. Without a result, it uses the
C library that this process has loaded.
"""

import asyncio
import ctypes.util
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from gpu_plugin.runtime.pulse import Pulse

_find = ctypes.util.find_library


def _nothing(name: str) -> str | None:  # noqa: ARG001
    """In place of `find_library` while asyncinotify is imported."""
    return None


ctypes.util.find_library = _nothing
try:
    from asyncinotify import Event, Inotify, Mask
finally:
    ctypes.util.find_library = _find

log = logging.getLogger(__name__)

ANY = ""  # any name in a directory

_ENTRIES = (
    Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
)
_CONTENTS = Mask.MODIFY | Mask.CLOSE_WRITE | Mask.ATTRIB

_MAX_LINKS = 40  # the most symbolic links on one path, as in Linux (path_resolution(7))


class Place(msgspec.Struct, frozen=True):
    """A watched name in a directory; `content` if changes of the file's content matter, and not only of the name."""

    directory: str
    name: str
    content: bool = False


def route(path: Path) -> frozenset[Place]:
    """Every name that Linux looks up to open `path`, through all symbolic links, as far as they exist."""
    places: set[Place] = set()
    at, links = "/", 0
    whole = path if path.is_absolute() else Path.cwd() / path
    ahead = list(whole.parts[:0:-1])
    while ahead:
        name = ahead.pop()
        if name in {"", "."}:
            continue
        if name == "..":
            at = os.path.dirname(at)  # noqa: PTH120 - text: this part of the path has no link
            continue
        places.add(Place(at, name, content=not ahead))
        entry = f"{at.rstrip('/')}/{name}"
        try:
            target = os.readlink(entry)  # noqa: PTH115 - the text alone
        except OSError:
            if not ahead or not os.path.isdir(entry):  # noqa: PTH112 - the path ends here
                break
            at = entry
            continue
        links += 1
        if links > _MAX_LINKS:
            break
        if target.startswith("/"):
            at = "/"
        ahead.extend(reversed(target.split("/")))
    return frozenset(places)


class Directories:
    """Watches certain names in directories. A context manager."""

    def __init__(self, changed: asyncio.Event, what: str) -> None:
        """`changed` is set after a change. `what` is for the log: "of configuration files"."""
        self._changed = changed
        self._what = what
        self._inotify: Inotify | None = None
        self._opened = Pulse()
        self._names: dict[int, set[str]] = {}
        self._said = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def arm(self, places: Iterable[Place]) -> bool:
        """Watch these places and no others. Return whether a further directory is watched now.

        If the kernel refuses, for example because of its inotify limits, the log has one line, and callers must read the files at
        intervals. A directory that may not be read is skipped if only its subdirectories matter.
        """
        new = False
        refused: OSError | None = None
        try:
            new, refused = self._arm(places)
        except OSError as error:
            refused = error
        if refused is not None and not self._said:
            where = f"{refused.filename}: " if refused.filename else ""
            limits = " (fs.inotify.max_user_watches and max_user_instances may be too low)"
            log.warning(
                "changes %s are found by reading at intervals, since the kernel reports no events: %s%s%s",
                self._what,
                where,
                refused.strerror,
                "" if isinstance(refused, PermissionError) else limits,
            )
        self._said = refused is not None
        return new

    def _arm(self, places: Iterable[Place]) -> tuple[bool, PermissionError | None]:
        """Return whether a directory is new, and why a path's last directory is not watched. Raises OSError."""
        if self._inotify is None:
            self._inotify = Inotify()
            self._opened.ring()
        wanted: dict[str, tuple[set[str], Mask]] = {}
        for place in places:
            names, mask = wanted.get(place.directory, (set(), _ENTRIES))
            names.add(place.name)
            wanted[place.directory] = names, mask | _CONTENTS if place.content else mask
        names_of: dict[int, set[str]] = {}
        refused: PermissionError | None = None
        try:
            for directory, (names, mask) in wanted.items():
                try:
                    names_of.setdefault(self._inotify.add_watch(directory, mask).wd, set()).update(names)
                except (FileNotFoundError, NotADirectoryError):  # it was just removed, which is an event of its parent
                    continue
                except PermissionError as error:
                    if ANY in names or mask & _CONTENTS:
                        refused = error
        finally:
            new = names_of.keys() - self._names.keys()
            gone = self._names.keys() - names_of.keys()
            self._names = names_of
            for watch in self._inotify.watches:
                if watch.wd in gone:
                    with suppress(OSError):  # the directory is gone, and its watch with it
                        self._inotify.rm_watch(watch)
        return bool(new), refused

    async def listen(self) -> None:
        """Report changes. Never returns."""
        while self._inotify is None:
            await self._opened.wait()
        while True:
            if self._matters(await self._inotify.get()):
                self._changed.set()

    def _matters(self, event: Event) -> bool:
        if event.mask & Mask.Q_OVERFLOW:
            return True
        watch = event.watch
        names = self._names.get(watch.wd) if watch is not None else None
        if names is None:
            return False  # from a removed watch
        return event.name is None or ANY in names or str(event.name) in names
