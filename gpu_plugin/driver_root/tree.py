"""A look at the directories and files below a driver root. Every call blocks for as long as the file system does."""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gpu_plugin.access.cdi.found import Kind, Listing, Seen, SeenLibrary
from gpu_plugin.driver_root.inside import resolve

MOST_NAMES = 200_000
"""Names in one directory that are read at most."""

Stamp = tuple[int, int, int] | None
"""What a directory is known by: device, inode and time of the last change in ns; None for one that is not there."""


@dataclass(slots=True)
class Tree:
    """The files below a root as this process sees it, empty for the real one.

    `stamps` has every directory that had a say in the answers so far: as long as they are the same, so are the answers.
    `libraries` remembers what libraries say of themselves by their identity, since reading them takes most of the time.
    """

    root: str
    libraries: dict[tuple[int, int, int, int], SeenLibrary] = field(default_factory=dict)
    stamps: dict[str, Stamp] = field(default_factory=dict)
    _present: dict[str, bool] = field(default_factory=dict)
    _listed: set[str] = field(default_factory=set)

    def names(self, directories: Iterable[str]) -> Listing:
        """Names in those of these directories that are there, in alphabetical order; each only under its first name."""
        found: dict[str, tuple[str, ...]] = {}
        for directory in directories:
            path = self._resolve(f"{self.root}/{directory}")
            if path is None:
                self.stamps[f"{self.root}/{directory}"] = stamp(f"{self.root}/{directory}")
                continue
            if path in self._listed:
                continue  # as lib64 and usr/lib64 are one directory nearly everywhere
            self._listed.add(path)
            self.stamps[path] = stamp(path)
            try:
                with os.scandir(path) as entries:
                    found[directory] = tuple(
                        sorted(entry.name for entry, _ in zip(entries, range(MOST_NAMES), strict=False))
                    )
            except NotADirectoryError:
                continue
        return found

    def look(self, path: str) -> Seen:
        """What a path below the root leads to."""
        return self._seen(path, self._resolve(self.root + path))

    def look_for(self, path: str) -> Seen:
        """As `look`, for what lies in a directory that changes all the time: only whether it is there has a say."""
        self._present[self.root + path] = os.path.lexists(self.root + path)
        return self._seen(path, resolve(self.root, self.root + path))

    def _seen(self, path: str, target: str | None) -> Seen:
        if target is None:
            return Seen(path, Kind.MISSING)
        try:
            kind = _kind(os.lstat(target).st_mode)
        except OSError:
            return Seen(path, Kind.MISSING)
        return Seen(path, kind, target.removeprefix(self.root))

    def library(self, path: str) -> SeenLibrary:
        """A library, with what it says of itself; where it cannot be read, why."""
        from gpu_plugin.driver_root import elf  # noqa: PLC0415 - 30 ms that only CDI specifications need

        seen = self.look(path)
        if seen.kind is not Kind.FILE:
            what = (
                "it is a link that leads nowhere"
                if seen.kind is Kind.MISSING
                else f"it is no regular file ({seen.kind})"
            )
            return SeenLibrary(seen, fault=what)
        file = self.root + seen.target
        try:
            status = Path(file).stat()
            identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
            known = self.libraries.get(identity)
            if known is None:
                read = elf.read(file)
                known = self.libraries[identity] = SeenLibrary(seen, read.soname, read.machine, read.bits)
        except (ValueError, OSError) as error:
            text = error.strerror if isinstance(error, OSError) else str(error)
            return SeenLibrary(seen, fault=f"{text}")
        return SeenLibrary(seen, known.soname, known.machine, known.bits)

    @property
    def changed(self) -> bool:
        """Whether something that had a say is another now."""
        return any(stamp(path) != then for path, then in self.stamps.items()) or any(
            os.path.lexists(path) != then for path, then in self._present.items()
        )

    def _resolve(self, path: str) -> str | None:
        return resolve(self.root, path, self._passed)

    def _passed(self, directory: str) -> None:
        if directory not in self.stamps:
            self.stamps[directory] = stamp(directory)


def stamp(path: str) -> Stamp:
    """A directory's stamp now."""
    try:
        status = os.stat(path)  # noqa: PTH116 - some 60 of them each few seconds
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _kind(mode: int) -> Kind:
    if stat.S_ISREG(mode):
        return Kind.FILE
    if stat.S_ISSOCK(mode):
        return Kind.SOCKET
    return Kind.DIRECTORY if stat.S_ISDIR(mode) else Kind.OTHER
