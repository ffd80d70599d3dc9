"""Reads directories and files below a driver root. Every call blocks for as long as the file system does."""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from gpu_plugin.containers.cdi.host_files import DeviceFile, HostDevices, Kind, Listing, Seen, SeenLibrary
from gpu_plugin.containers.driver_root.inside import Way, resolve, walk
from gpu_plugin.containers.driver_root.safe import judge
from gpu_plugin.devices.node import Gpu
from gpu_plugin.runtime.regular_file import open_file

if TYPE_CHECKING:
    from gpu_plugin.containers.cdi.build import Built
    from gpu_plugin.containers.cdi.options import CdiOptions

MAX_NAMES = 200_000  # the most names of one directory that are read
MAX_MATCHES = 1_000  # the most paths that match a path with wildcards

_WILD = frozenset("*?[")

Stamp = tuple[int, int, int, int, int] | None
"""The identity of a file: device, inode, mode, owner, and time of the last change in ns (0 if the time does not count).

None for a missing file.
"""

LEADS_NOWHERE = "it is a broken link"  # the reason why a file is left out although its name is in its directory

Identity = tuple[int, int, int, int]  # device, inode, time of the last change in ns, and size


class Tree(msgspec.Struct):
    """The files below a root, which is a path in this process; empty for /.

    `stamps` has every directory and file that the results depend on. The results do not change while the stamps stay the same and
    no missing file appears. `libraries` has the ELF data of libraries by their identity, since reading them takes most of the
    time. `remembered` has the `libraries` of an earlier tree.
    """

    root: str
    remembered: Mapping[Identity, SeenLibrary] = msgspec.field(default_factory=dict)
    libraries: dict[Identity, SeenLibrary] = msgspec.field(default_factory=dict)
    stamps: dict[str, Stamp] = msgspec.field(default_factory=dict)
    _absent: dict[str, None] = msgspec.field(default_factory=dict)
    _looked_for: dict[str, tuple[Kind, bool, Seen]] = msgspec.field(default_factory=dict)
    _incomplete: dict[str, SeenLibrary] = msgspec.field(
        default_factory=dict
    )  # libraries that may be copied now, by target
    _listed: set[str] = msgspec.field(default_factory=set)

    def names(self, directories: Iterable[str]) -> Listing:
        """Return the names in each existing directory, in alphabetical order. A directory counts under its first path only."""
        found: dict[str, tuple[str, ...]] = {}
        for directory in directories:
            path = self.directory(f"/{directory}")
            if path is None or path in self._listed:
                continue  # for example, lib64 and usr/lib64 are the same directory on most systems
            self._listed.add(path)
            try:
                with os.scandir(path or "/") as entries:
                    found[directory] = tuple(
                        sorted(entry.name for entry, _ in zip(entries, range(MAX_NAMES), strict=False))
                    )
            except (NotADirectoryError, FileNotFoundError):
                continue  # not a directory, or removed just now; its stamp shows a later change
        return found

    def directory(self, path: str) -> str | None:
        """Return the path of a directory without links; None if it is missing. `changed` then includes changes of its names."""
        way = walk(self.root, self.root + path)
        self._passed(self.root + path, way)
        if way.path is not None and way.status is not None:
            self._stamp(way.path, way.status, names=True)
        return way.path

    def expand(self, pattern: str) -> Iterator[str]:
        """Yield the paths that match `pattern`, in order, MAX_MATCHES at most. A path without wildcards matches itself."""
        if _WILD.isdisjoint(pattern):
            yield pattern
            return
        found = [""]
        for part in pattern.split("/")[1:]:
            if _WILD.isdisjoint(part):
                found = [f"{base}/{part}" for base in found]
            else:
                matches = (f"{base}/{name}" for base in found for name in self._matching(base, part))
                found = list(islice(matches, MAX_MATCHES))
        yield from found

    def _matching(self, directory: str, pattern: str) -> Iterator[str]:
        path = self.directory(directory)
        try:
            names = sorted(os.listdir(path or "/")) if path is not None else []  # noqa: PTH208
        except OSError:
            return  # not a directory, or it cannot be read
        hidden = pattern.startswith(".")
        yield from (name for name in names if fnmatchcase(name, pattern) and name.startswith(".") == hidden)

    def look(self, path: str, kinds: Sequence[Kind] = (Kind.FILE,)) -> Seen:
        """Return the file at a path below the root, and whether containers may get it (see `judge`)."""
        judged = judge(self.root, path, kinds)
        self._passed(self.root + path, judged.way)
        if judged.way.names:
            last = judged.way.names[-1]
            self._stamp(last.directory, last.directory_status, names=True)
        return judged.seen

    def look_for(self, path: str, kind: Kind = Kind.FILE, *, links: bool = True) -> Seen:
        """Like `look`, for a path in a directory that changes often: `changed` compares only the result."""
        seen = judge(self.root, path, (kind,), links=links).seen
        self._looked_for[path] = (kind, links, seen)
        return seen

    def library(self, path: str) -> SeenLibrary:
        """Return a library with its ELF data, or with the reason why it cannot be read."""
        seen = self.look(path)
        if seen.fault or seen.kind is Kind.MISSING:
            return SeenLibrary(seen, fault=seen.fault or LEADS_NOWHERE)
        read = self._read(seen)
        if not read.soname:
            self._incomplete[seen.target] = read
        return msgspec.structs.replace(read, seen=seen)

    def _read(self, seen: Seen) -> SeenLibrary:
        from gpu_plugin.containers.driver_root import elf  # noqa: PLC0415 - 30 ms that only CDI specifications need

        file = self.root + seen.target
        try:
            status = os.stat(file)  # noqa: PTH116
            identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
            known = self.libraries.get(identity) or self.remembered.get(identity)
            if known is None:
                read = elf.read(file)
                known = SeenLibrary(seen, read.soname, read.machine, read.bits)
            if known.soname:  # else it may be incomplete, and times are too coarse to show the rest of a copy
                self.libraries[identity] = known
        except OSError as error:
            return SeenLibrary(seen, fault=f"it cannot be read: {error.strerror or error}")
        except ValueError as error:
            return SeenLibrary(seen, fault=str(error))
        return known

    def read(self, path: str, limit: int) -> bytes:
        """Read a safe file of up to `limit` bytes. Raises OSError, and ValueError with the reason why it is not read."""
        seen = self.look_for(path)
        if seen.fault or seen.kind is Kind.MISSING:
            raise ValueError(seen.fault or LEADS_NOWHERE)
        file = self.root + seen.target
        self.stamps[file] = stamp(file)
        with open_file(file) as stream:
            content = stream.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"it has more than {limit:,} bytes")
        return content

    @property
    def changed(self) -> bool:
        """Whether a file or directory that the results depend on has changed."""
        return (
            any(stamp(path, times=then is None or bool(then[-1])) != then for path, then in self.stamps.items())
            or any(resolve(self.root, path) is not None for path in self._absent)
            # A file that was being copied is completed without a change of its directory.
            or any(self._read(then.seen) != then for then in self._incomplete.values())
            or any(
                judge(self.root, path, (kind,), links=links).seen != then
                for path, (kind, links, then) in self._looked_for.items()
            )
        )

    def _passed(self, path: str, way: Way) -> None:
        """Add stamps for every directory and file on the way, and for the names in each directory that has a link on the way."""
        if way.path is None:
            self._absent[path] = None
        for name in way.names:
            self._stamp(name.directory, name.directory_status, names=name.link)
            self._stamp(name.path, name.status)

    def _stamp(self, path: str, status: os.stat_result, *, names: bool = False) -> None:
        known = self.stamps.get(path)
        if known is None or (names and not known[-1]):
            self.stamps[path] = _stamp(status, times=names)


def stamp(path: str, *, times: bool = True) -> Stamp:
    """Return the present stamp of a file. An empty path is /."""
    try:
        return _stamp(os.lstat(path or "/"), times=times)
    except OSError:
        return None


def _stamp(status: os.stat_result, *, times: bool) -> Stamp:
    changed = status.st_mtime_ns if times else 0
    return status.st_dev, status.st_ino, status.st_mode, status.st_uid, changed


def device_node(status: os.stat_result) -> DeviceFile | None:
    """Return the character or block device with this status; None for another kind of file."""
    if not stat.S_ISCHR(status.st_mode) and not stat.S_ISBLK(status.st_mode):
        return None
    numbers = os.major(status.st_rdev), os.minor(status.st_rdev)
    return DeviceFile(*numbers, status.st_mode & 0o777, status.st_gid, "b" if stat.S_ISBLK(status.st_mode) else "c")


Files = TypeVar("Files")


class FirstRoot(Generic[Files]):
    """Keeps the files below the first usable root, until a file or directory there changes.

    Each entry of `roots` is the path in this process and the path on the host, without a slash at the end, empty for /.
    """

    def __init__(self, roots: Sequence[tuple[str, str]]) -> None:
        self.roots = tuple(dict.fromkeys(roots))
        self.host_root = self.roots[0][1]
        """The host path of the root in use."""
        self.searches = 0
        """The number of searches, so that tests can detect needless searches."""
        self._trees: tuple[Tree, ...] = ()
        self._last: tuple[str, Files] | None = None

    def files(self, running: str = "") -> Files:
        """Return the files of the running driver version. `running` is empty if it is unknown or does not matter. Blocks.

        Raises OSError if a directory cannot be read. The earlier result is kept then.
        """
        if self._last is None or running != self._last[0] or any(tree.changed for tree in self._trees):
            self.searches += 1
            self._last = running, self._search(running)
        return self._last[1]

    def forget(self) -> None:
        """Make the next call of `files` search again."""
        self._last = None

    def _tree(self, root: str) -> Tree:
        """Return a new tree of a root, with the known ELF data of its libraries."""
        return Tree(root, next((tree.libraries for tree in self._trees if tree.root == root), {}))

    def _search(self, running: str) -> Files:
        """Find the files below the first usable root, or below the first root if no root is usable."""
        trees: list[Tree] = []
        found: list[tuple[Files, str]] = []
        for seen_at, host in self.roots:
            trees.append(self._tree(seen_at))
            files, usable = self._in(trees[-1], host or "/", running)
            found.append((files, host))
            if usable:
                break
        else:
            found = found[:1]
        self._trees = tuple(trees)
        files, self.host_root = found[-1]
        return files

    def _in(self, tree: Tree, root: str, running: str) -> tuple[Files, bool]:
        """Return the files of a tree, and whether its root is usable. `root` is its path on the host. Raises OSError."""
        raise NotImplementedError

    def specs(self, files: Files, gpus: Sequence[Gpu], host: HostDevices, options: "CdiOptions") -> "Built":
        """Build the specifications of the node from these files of `files`."""
        raise NotImplementedError
