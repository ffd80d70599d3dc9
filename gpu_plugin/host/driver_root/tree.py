"""A look at the directories and files below a driver root. Every call blocks for as long as the file system does."""

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from gpu_plugin.access.cdi.host_files import DeviceFile, Kind, Listing, Seen, SeenLibrary
from gpu_plugin.host.driver_root.inside import resolve

MAX_NAMES = 200_000  # names in one directory that are read at most

Stamp = tuple[int, int, int] | None
"""What a directory is known by: device, inode and time of the last change in ns; None for one that is not there."""

_KINDS = {stat.S_IFREG: Kind.FILE, stat.S_IFSOCK: Kind.SOCKET, stat.S_IFDIR: Kind.DIRECTORY}

Identity = tuple[int, int, int, int]  # what a file is known by: device, inode, time of the last change in ns, and size


class Tree(msgspec.Struct):
    """The files below a root as this process sees it, empty for the real one.

    `stamps` has every directory that had a say in the answers so far: as long as they are the same, and nothing came where
    nothing was, so are the answers. `libraries` has what libraries say of themselves by their identity, since reading them
    takes most of the time; `remembered` is that of an earlier tree.
    """

    root: str
    remembered: Mapping[Identity, SeenLibrary] = msgspec.field(default_factory=dict)
    libraries: dict[Identity, SeenLibrary] = msgspec.field(default_factory=dict)
    stamps: dict[str, Stamp] = msgspec.field(default_factory=dict)
    _absent: dict[str, None] = msgspec.field(default_factory=dict)
    _looked_for: dict[str, Seen] = msgspec.field(default_factory=dict)
    _listed: set[str] = msgspec.field(default_factory=set)

    def names(self, directories: Iterable[str]) -> Listing:
        """Names in those of these directories that are there, in alphabetical order; each only under its first name."""
        found: dict[str, tuple[str, ...]] = {}
        for directory in directories:
            path = self._resolve(f"{self.root}/{directory}")
            if path is None or path in self._listed:
                continue  # as lib64 and usr/lib64 are one directory nearly everywhere
            self._listed.add(path)
            self._passed(path)
            try:
                with os.scandir(path or "/") as entries:
                    found[directory] = tuple(
                        sorted(entry.name for entry, _ in zip(entries, range(MAX_NAMES), strict=False))
                    )
            except (NotADirectoryError, FileNotFoundError):
                continue  # no directory, or gone this moment: its stamp tells when that is another
        return found

    def look(self, path: str) -> Seen:
        """What a path below the root leads to."""
        target = self._resolve(self.root + path)
        if target is not None:
            self._passed(target.rpartition("/")[0])
        return self._seen(path, target)

    def look_for(self, path: str) -> Seen:
        """Looks as `look` does, for what lies in a directory that changes all the time: only what it leads to has a say."""
        seen = self._looked_for[path] = self._seen(path, resolve(self.root, self.root + path))
        return seen

    def _seen(self, path: str, target: str | None) -> Seen:
        if target is None:
            return Seen(path, Kind.MISSING)
        try:
            kind = _KINDS.get(stat.S_IFMT(os.lstat(target).st_mode), Kind.OTHER)
        except OSError:
            return Seen(path, Kind.MISSING)
        return Seen(path, kind, target.removeprefix(self.root))

    def library(self, path: str) -> SeenLibrary:
        """A library, with what it says of itself; where it cannot be read, why."""
        from gpu_plugin.host.driver_root import elf  # noqa: PLC0415 - 30 ms that only CDI specifications need

        seen = self.look(path)
        if seen.kind is not Kind.FILE:
            what = (
                "it is a link that leads nowhere"
                if seen.kind is Kind.MISSING
                else f"it is not a regular file ({seen.kind})"
            )
            return SeenLibrary(seen, fault=what)
        file = self.root + seen.target
        try:
            status = Path(file).stat()
            identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
            known = self.libraries.get(identity) or self.remembered.get(identity)
            if known is None:
                read = elf.read(file)
                known = SeenLibrary(seen, read.soname, read.machine, read.bits)
            self.libraries[identity] = known
        except OSError as error:
            return SeenLibrary(seen, fault=f"it cannot be read: {error.strerror or error}")
        except ValueError as error:
            return SeenLibrary(seen, fault=str(error))
        return SeenLibrary(seen, known.soname, known.machine, known.bits)

    @property
    def changed(self) -> bool:
        """Whether something that had a say is another now."""
        return (
            any(stamp(path) != then for path, then in self.stamps.items())
            or any(resolve(self.root, path) is not None for path in self._absent)
            or any(
                self._seen(path, resolve(self.root, self.root + path)) != then
                for path, then in self._looked_for.items()
            )
        )

    def _resolve(self, path: str) -> str | None:
        found = resolve(self.root, path, self._passed)
        if found is None:
            self._absent[path] = None
        return found

    def _passed(self, directory: str) -> None:
        if directory not in self.stamps:
            self.stamps[directory] = stamp(directory)


def stamp(path: str) -> Stamp:
    """A directory's stamp now; an empty path is /."""
    try:
        status = os.stat(path or "/")  # noqa: PTH116 - some 60 of them each few seconds
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def device_at(path: str) -> DeviceFile | None:
    """The character or block device that a path leads to; None for anything else."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    if not stat.S_ISCHR(status.st_mode) and not stat.S_ISBLK(status.st_mode):
        return None
    numbers = os.major(status.st_rdev), os.minor(status.st_rdev)
    return DeviceFile(*numbers, status.st_mode & 0o777, status.st_gid, "b" if stat.S_ISBLK(status.st_mode) else "c")


Files = TypeVar("Files")


class FirstRoot(Generic[Files]):
    """Keeps what was found below the first of these roots that serves, until something there changes.

    `roots` are (as this process sees it, as the host calls it), both without a slash at the end, empty for /.
    """

    def __init__(self, roots: Sequence[tuple[str, str]]) -> None:
        self.roots = tuple(dict.fromkeys(roots))
        self.host_root = self.roots[0][1]
        """The root in use, as the host calls it."""
        self.searches = 0
        """How often the files were searched, for those who watch that it is not done in vain."""
        self._trees: tuple[Tree, ...] = ()
        self._last: tuple[str, Files] | None = None

    def files(self, running: str = "") -> Files:
        """What there is for the driver of the version that runs; empty where it is not known, or has no say. Blocks.

        Raises OSError where a directory cannot be read; what was known stays then.
        """
        if self._last is None or running != self._last[0] or any(tree.changed for tree in self._trees):
            self.searches += 1
            self._last = running, self._search(running)
        return self._last[1]

    def _tree(self, root: str) -> Tree:
        """A new look below a root, with what is remembered of its libraries."""
        return Tree(root, next((tree.libraries for tree in self._trees if tree.root == root), {}))

    def _search(self, running: str) -> Files:
        """What there is below the first root that serves, else below the first of all."""
        trees: list[Tree] = []
        found: list[tuple[Files, str]] = []
        for seen_at, host in self.roots:
            trees.append(self._tree(seen_at))
            files, serves = self._in(trees[-1], host or "/", running)
            found.append((files, host))
            if serves:
                break
        else:
            found = found[:1]
        self._trees = tuple(trees)
        files, self.host_root = found[-1]
        return files

    def _in(self, tree: Tree, root: str, running: str) -> tuple[Files, bool]:
        """What there is below the root of a tree, which the operator calls `root`; and whether that serves. Raises OSError."""
        raise NotImplementedError
