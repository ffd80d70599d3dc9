"""Says that the content of files changed, however they are changed.

A file is rewritten in place, or another is renamed over it; a ConfigMap's is reached through `..data`, a link that is made to
point elsewhere; directories go and come. So nothing that is heard is believed: it is only a reason to look at the content
again, and to hear more, along the way as it leads now. A look now and then makes up for what is not heard.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Generic, Self, TypeVar

import anyio
import msgspec

from gpu_plugin.runtime.inotify import Event, Inotify, Mask
from gpu_plugin.runtime.pulse import Pulse
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

ANY = ""
"""Stands for whatever name in a directory."""

_ENTRIES = (
    Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR
)
_CONTENTS = Mask.MODIFY | Mask.CLOSE_WRITE | Mask.ATTRIB

_MAX_LINKS = 40
"""Symbolic links followed on one way, as many as Linux does (path_resolution(7))."""


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


class Place(msgspec.Struct, frozen=True):
    """A name in a directory that something depends on; `content` where on what the file holds, not on the name alone."""

    directory: str
    name: str
    content: bool = False


def route(path: Path) -> frozenset[Place]:
    """Every name that is looked up on the way to `path`, through all symbolic links, as far as the way exists."""
    places: set[Place] = set()
    at, links = "/", 0
    whole = path if path.is_absolute() else Path.cwd() / path
    ahead = list(whole.parts[:0:-1])
    while ahead:
        name = ahead.pop()
        if name in {"", "."}:
            continue
        if name == "..":
            at = os.path.dirname(at)  # noqa: PTH120 - text, of a way that holds no link any more
            continue
        places.add(Place(at, name, content=not ahead))
        entry = f"{at.rstrip('/')}/{name}"
        try:
            target = os.readlink(entry)  # noqa: PTH115 - the text, whatever it may be
        except OSError:
            if not ahead or not os.path.isdir(entry):  # noqa: PTH112 - the way ends here
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
    """Watches directories for what happens to certain names in them. A context manager."""

    def __init__(self, happened: Callable[[], None]) -> None:
        """Calls `happened`, on the event loop, after anything that may matter."""
        self._happened = happened
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
        """Watches these places and no others. Returns whether any is watched that was not.

        Where the system refuses (its inotify limits, for one), that is said once; who needs to know must look by himself.
        """
        try:
            return self._arm(places)
        except OSError as error:
            if not self._said:
                self._said = True
                what = f"{error.filename}: " if error.filename else ""
                log.warning(
                    "changes of configuration files are looked for now and then instead of being told of: %s%s "
                    "(fs.inotify.max_user_watches and max_user_instances may be too low)",
                    what,
                    error.strerror,
                )
            return False

    def _arm(self, places: Iterable[Place]) -> bool:
        if self._inotify is None:
            self._inotify = Inotify()
            self._opened.ring()
        wanted: dict[str, tuple[set[str], Mask]] = {}
        for place in places:
            names, mask = wanted.get(place.directory, (set(), _ENTRIES))
            names.add(place.name)
            wanted[place.directory] = names, mask | _CONTENTS if place.content else mask
        names_of: dict[int, set[str]] = {}
        try:
            for directory, (names, mask) in wanted.items():
                with suppress(FileNotFoundError, NotADirectoryError):  # it went this moment: its parent tells of that
                    names_of.setdefault(self._inotify.add_watch(directory, mask).wd, set()).update(names)
        finally:
            new = names_of.keys() - self._names.keys()
            gone = self._names.keys() - names_of.keys()
            self._names = names_of
            for watch in self._inotify.watches:
                if watch.wd in gone:
                    with suppress(OSError):  # the directory is gone, and its watch with it
                        self._inotify.rm_watch(watch)
        self._said = False
        return bool(new)

    async def listen(self) -> None:
        """Hears what happens. Never returns."""
        while self._inotify is None:
            await self._opened.wait()
        while True:
            if self._matters(await self._inotify.get()):
                self._happened()

    def _matters(self, event: Event) -> bool:
        if event.mask & Mask.Q_OVERFLOW:
            return True
        watch = event.watch
        names = self._names.get(watch.wd) if watch is not None else None
        if names is None:
            return False  # of a watch that was given up
        return event.name is None or ANY in names or str(event.name) in names


class Observed(msgspec.Struct, Generic[T], frozen=True):
    """What was seen, and all the places where a change could make it another."""

    seen: T
    places: frozenset[Place]


class FileWatcher(Generic[T]):
    """Looks again whenever there may be something new to see, once what happens has calmed down, and now and then anyway."""

    def __init__(self, look: Callable[[], Observed[T]], take: Callable[[T], None]) -> None:
        """`look` runs on a thread and may block; `take` gets all that it sees, on the event loop, changed or not."""
        self._look = look
        self._take = take
        self._notified = False
        self._bell = Pulse()
        self._patient = True

    def notify(self) -> None:
        """Something that `look` depends on changed. From the event loop's thread only."""
        self._notified = True
        self._bell.ring()

    async def run(self) -> None:
        """Looks at once, then for ever."""
        threads = Workers("configuration-files")
        try:
            with Directories(self.notify) as directories:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(directories.listen)
                    while True:
                        self._notified = False
                        await self._look_once(threads, directories)
                        await self._wait()
        finally:
            threads.close()

    async def _look_once(self, threads: Workers, directories: Directories) -> None:
        try:
            sight = await threads.run(self._look, PATIENCE)
            if directories.arm(sight.places):  # what happened there before it was watched was not heard
                sight = await threads.run(self._look, PATIENCE)
                directories.arm(sight.places)
        except TimeoutError:
            if self._patient:
                log.warning(
                    "configuration files cannot be looked at: the file system does not answer for %g s", PATIENCE
                )
            self._patient = False
            return
        self._patient = True
        self._take(sight.seen)

    async def _wait(self) -> None:
        if not self._notified:
            await self._bell.wait(POLL_INTERVAL)
        until = anyio.current_time() + LONGEST_SETTLE
        while self._notified and anyio.current_time() < until:
            self._notified = False
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

    await FileWatcher(lambda: Observed(fingerprint(path), route(path)), take).run()
