"""Finds what the lists of Linux for Tegra name, below a root, again only where something there has changed."""

import os
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice

from msgspec.structs import replace

from gpu_plugin.access.cdi import tegra
from gpu_plugin.access.cdi.host_files import DeviceFile, Kind, Seen
from gpu_plugin.access.cdi.tegra import Entry, Line
from gpu_plugin.host.driver_root.inside import resolve
from gpu_plugin.host.driver_root.tree import FirstRoot, Tree, device_at, stamp
from gpu_plugin.runtime.regular_file import open_file

MAX_PATHS = 5_000  # paths that are looked at; the lists of a Jetson name some 300
MAX_MATCHES = 1_000  # paths that one line with wildcards may stand for

_WILD = frozenset("*?[")


class TegraSearch(FirstRoot[tegra.TegraFiles]):
    """Keeps what the lists below the first of these roots name, until a list or a directory changes.

    `roots` are (as this process sees it, as the host calls it), both without a slash at the end, empty for /. Lists are
    looked for below each of them in turn and here last; what they name lies below the first root that is there. Device
    nodes are looked for here, and below each root. `own`: this machine counts; it does not where the roots are of another.
    """

    def __init__(self, roots: Sequence[tuple[str, str]], *, own: bool = True) -> None:
        self._here = ("",) if own else ()
        super().__init__(roots)
        self._lines: tuple[Line, ...] = ()

    def files(self, running: str = "") -> tegra.TegraFiles:
        """What there is, the device nodes as they are now."""
        return self._with_devices(super().files(running))

    def _search(self, running: str) -> tegra.TegraFiles:
        del running
        trees = {root: self._tree(root) for root in (*(seen_at for seen_at, _ in self.roots), *self._here)}
        lines, complaints = _first_lists(trees.values())
        seen_at, host = next((each for each in self.roots if os.path.isdir(each[0] or "/")), self.roots[0])  # noqa: PTH112
        tree = trees[seen_at]
        if lines:
            found = find(tree, (line for line in lines if line.kind is not Entry.DEVICE))
            found = replace(found, complaints=(*complaints, *found.complaints))
            release = tree.look_for(tegra.RELEASE)
            if release.kind is Kind.FILE:
                looked = tegra.Looked(Line(Entry.LIBRARY, tegra.RELEASE), release)
                found = replace(found, looked=(*found.looked, looked))
        else:
            found = tegra.TegraFiles(complaints=tuple(complaints), fault=tegra.not_found(host or "/"))
        self.host_root = host
        self._lines = tuple(line for line in lines if line.kind is Entry.DEVICE)
        self._trees = tuple(trees.values())
        return found

    def _with_devices(self, found: tegra.TegraFiles) -> tegra.TegraFiles:
        """The same with the device nodes that there are now: they come and go without a trace that is worth watching."""
        roots = dict.fromkeys((*self._here, *(seen_at for seen_at, _ in self.roots)))
        nodes: dict[str, DeviceFile] = {}
        looked: dict[str, tegra.Looked] = {}
        for line in self._lines:
            paths = sorted({path for root in roots for path in expand(Tree(root), line.path)}) or [line.path]
            for path in paths:
                known = next((known for root in roots if (known := device_file(root, path))), None)
                if known is not None:
                    nodes[path] = known
                kind = Kind.OTHER if known is not None else Kind.MISSING
                looked[path] = tegra.Looked(Line(Entry.DEVICE, path), Seen(path, kind, path if known else ""))
        return replace(found, looked=(*looked.values(), *found.looked), nodes=nodes)


def _first_lists(trees: Iterable[Tree]) -> tuple[list[Line], list[str]]:
    """Lines of the lists below the first of these roots that has any, and what is wrong with them."""
    lines: dict[Line, None] = {}
    complaints: list[str] = []
    for tree in trees:
        there = tree.names([tegra.DIRECTORY]).get(tegra.DIRECTORY, ())
        for name in tegra.NAMES:
            if name in there:
                parsed, faults = _list(tree, f"/{tegra.DIRECTORY}/{name}")
                lines |= dict.fromkeys(parsed)
                complaints += faults
        if lines:
            break
    return list(lines), complaints


def _list(tree: Tree, path: str) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    seen = tree.look(path)
    if seen.kind is not Kind.FILE:
        return (), (f"{path} is left out: it is not a regular file ({seen.kind})",)
    file = tree.root + seen.target
    tree.stamps[file] = stamp(file)
    try:
        with open_file(file) as stream:
            return tegra.parse(path, stream.read(tegra.MAX_BYTES + 1))
    except OSError as error:
        return (), (f"{path} is left out: {error.strerror}",)


def find(tree: Tree, lines: Iterable[Line]) -> tegra.TegraFiles:
    """What is found of these lines below the root of this tree, at most MAX_PATHS of it. Blocks. Raises OSError."""
    paths = ((line, path) for line in lines for path in ([*expand(tree, line.path)] or [line.path]))
    first = [*islice(dict.fromkeys(Line(line.kind, path) for line, path in paths), MAX_PATHS + 1)]
    complaints = (f"the lists of Linux for Tegra name more than {MAX_PATHS:,} paths; the rest is left out",)
    looked = tuple(_look(tree, line) for line in first[:MAX_PATHS])
    return tegra.TegraFiles(looked, complaints=complaints if len(first) > MAX_PATHS else ())


def _look(tree: Tree, line: Line) -> tegra.Looked:
    seen = tree.look(line.path)
    directory, _, name = line.path.rpartition("/")
    parent = resolve(tree.root, tree.root + directory)
    place = tree.root + directory if parent is None else parent
    tree.stamps.setdefault(place, stamp(place))
    link = parent is not None and os.path.islink(f"{parent}/{name}")  # noqa: PTH114
    named = seen.kind is Kind.FILE and line.kind is not Entry.DIRECTORY and tegra.is_library(line.path)
    return tegra.Looked(line, seen, link, tree.library(line.path) if named else None)


def expand(tree: Tree, pattern: str) -> Iterator[str]:
    """Paths below the root of this tree that a path with wildcards stands for, in order; one without stands for itself."""
    if _WILD.isdisjoint(pattern):
        yield pattern
        return
    found = [""]
    for part in pattern.split("/")[1:]:
        if _WILD.isdisjoint(part):
            found = [f"{base}/{part}" for base in found]
        else:
            found = list(
                islice((f"{base}/{name}" for base in found for name in _matching(tree, base, part)), MAX_MATCHES)
            )
    yield from found


def _matching(tree: Tree, directory: str, pattern: str) -> Iterator[str]:
    path = resolve(tree.root, f"{tree.root}{directory}")
    tree.stamps[path or f"{tree.root}{directory}"] = stamp(path or f"{tree.root}{directory}")
    try:
        names = sorted(os.listdir(path)) if path is not None else []  # noqa: PTH208
    except OSError:
        return  # a file, or nothing that can be read
    yield from (
        name for name in names if fnmatchcase(name, pattern) and name.startswith(".") == pattern.startswith(".")
    )


def device_file(root: str, path: str) -> DeviceFile | None:
    """The character or block device that a path below a root leads to; None for anything else."""
    return device_at(resolve(root, f"{root}{path}") or "")
