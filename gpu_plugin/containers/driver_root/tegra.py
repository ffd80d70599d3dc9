"""Finds the files that the lists of Linux for Tegra name below a root. Searches again only after a change."""

import os
from collections.abc import Iterable, Sequence
from itertools import islice

from msgspec.structs import replace

from gpu_plugin.containers.cdi import tegra
from gpu_plugin.containers.cdi.build import Built
from gpu_plugin.containers.cdi.host_files import DeviceFile, HostDevices, Kind, Seen
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.cdi.tegra import Entry, Line
from gpu_plugin.containers.driver_root.safe import judge
from gpu_plugin.containers.driver_root.tree import FirstRoot, Tree, device_node
from gpu_plugin.devices.node import Gpu

MAX_PATHS = 5_000  # the lists of a Jetson name some 300 paths


class TegraSearch(FirstRoot[tegra.TegraFiles]):
    """Keeps the files that the lists name, until a list or a directory changes.

    Each entry of `roots` is the path in this process and the path on the host, without a slash at the end, empty for /. The lists
    come from the first root with a list, or from this machine. Their paths are below the first root that exists. Device nodes are
    searched on this machine and below each root. `own` is False if the roots belong to another machine; then this machine does
    not count.
    """

    def __init__(self, roots: Sequence[tuple[str, str]], *, own: bool = True) -> None:
        self._here = ("",) if own else ()
        super().__init__(roots)
        self._lines: tuple[Line, ...] = ()

    def files(self, running: str = "") -> tegra.TegraFiles:
        """Return the files and the present device nodes."""
        return self._with_devices(super().files(running))

    def specs(self, files: tegra.TegraFiles, gpus: Sequence[Gpu], host: HostDevices, options: CdiOptions) -> Built:
        """Build the specification of the single device. The lists name its device nodes."""
        del gpus, host
        return tegra.tegra_specs(files, options)

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
            if release.kind is Kind.FILE and not release.fault:
                looked = tegra.Looked(Line(Entry.LIBRARY, tegra.RELEASE), release)
                found = replace(found, looked=(*found.looked, looked))
        else:
            found = tegra.TegraFiles(complaints=tuple(complaints), fault=tegra.not_found(host or "/"))
        self.host_root = host
        self._lines = tuple(line for line in lines if line.kind is Entry.DEVICE)
        self._trees = tuple(trees.values())
        return found

    def _with_devices(self, found: tegra.TegraFiles) -> tegra.TegraFiles:
        """Add the present device nodes. They are read each time, since no watched directory shows a change of them."""
        roots = {**dict.fromkeys(self._here, ""), **dict(reversed(self.roots))}
        nodes: dict[str, DeviceFile] = {}
        looked: dict[str, tegra.Looked] = {}
        for line in self._lines:
            paths = sorted({path for root in roots for path in Tree(root).expand(line.path)}) or [line.path]
            for path in paths:
                seen = Seen(path, Kind.MISSING)
                for root, host in roots.items():
                    seen, known = device_file(root, path)
                    if known is not None:
                        nodes[path] = replace(known, root=host)
                    if seen.kind is not Kind.MISSING:
                        break
                looked[path] = tegra.Looked(Line(Entry.DEVICE, path), seen)
        searched = tuple(root or "/" for root in roots)
        return replace(found, looked=(*looked.values(), *found.looked), nodes=nodes, searched=searched)


def _first_lists(trees: Iterable[Tree]) -> tuple[list[Line], list[str]]:
    """Return the lines of the lists below the first root with a list, and sentences about their faults."""
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
    try:
        return tegra.parse(path, tree.read(path, tegra.MAX_BYTES))
    except OSError as error:
        return (), (f"{path} is left out: {error.strerror}",)
    except ValueError as error:
        return (), (f"{path} is left out: {error}",)


def find(tree: Tree, lines: Iterable[Line]) -> tegra.TegraFiles:
    """Find the files for these lines below the root of this tree, MAX_PATHS at most. Blocks. Raises OSError."""
    paths = ((line, path) for line in lines for path in ([*tree.expand(line.path)] or [line.path]))
    first = [*islice(dict.fromkeys(Line(line.kind, path) for line, path in paths), MAX_PATHS + 1)]
    complaints = (f"the lists of Linux for Tegra name more than {MAX_PATHS:,} paths; the rest is left out",)
    looked = tuple(_look(tree, line) for line in first[:MAX_PATHS])
    return tegra.TegraFiles(looked, complaints=complaints if len(first) > MAX_PATHS else ())


def _look(tree: Tree, line: Line) -> tegra.Looked:
    kinds = (Kind.DIRECTORY,) if line.kind is Entry.DIRECTORY else (Kind.FILE, Kind.DIRECTORY)
    seen = tree.look(line.path, kinds)
    named = seen.kind is Kind.FILE and not seen.fault and tegra.is_library(line.path)
    return tegra.Looked(line, seen, tree.library(line.path) if named else None)


def device_file(root: str, path: str) -> tuple[Seen, DeviceFile | None]:
    """Return the file at a path below a root, and its device node; None if it is not a device node or not safe."""
    judged = judge(root, path, (Kind.DEVICE,))
    node = None if judged.seen.fault or judged.way.status is None else device_node(judged.way.status)
    return judged.seen, node
