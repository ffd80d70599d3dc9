"""The CDI specification of a Tegra: one device with the files that the lists of Linux for Tegra name.

A list has lines of the form `kind, path`, by the mount plugin specification (libnvidia-container, design/mount_plugins.md) and
its reader in nvidia-container-toolkit (internal/platform-support/tegra/csv). Containers get the same files as from NVIDIA's
toolkit in mode csv (internal/platform-support/tegra). If the operator names no hook program, the target of a link is mounted at
the link's path, and a library is also mounted in the default directories of a container's dynamic loader.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import islice

import msgspec
from msgspec.structs import replace

from gpu_plugin.containers import cdi_names
from gpu_plugin.containers.cdi import driver
from gpu_plugin.containers.cdi.build import HIDDEN, Built, Nodes, bind, gpu_spec, loadable, soname_links, toolkit_hooks
from gpu_plugin.containers.cdi.host_files import DeviceFile, HostDevices, Kind, Library, Seen, SeenLibrary
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.cdi.spec import Edits, SpecDevice
from gpu_plugin.containers.driver_root.safe import judge
from gpu_plugin.containers.driver_root.tree import FirstRoot, Tree, device_node
from gpu_plugin.devices.device import TEGRA_GPU
from gpu_plugin.devices.node import Gpu

DIRECTORY = "etc/nvidia-container-runtime/host-files-for-container.d"
RELEASE = "/etc/nv_tegra_release"  # the file by which programs recognize a Tegra

# The lists for every container. Other lists, such as cudnn.csv, are only for images of JetPack 4 (csv.BaseFilesOnly).
NAMES = ("devices.csv", "drivers.csv", "l4t.csv")

# The list of a Jetson Orin has 285 lines in 20 KiB.
MAX_BYTES = 1024 * 1024
MAX_LINES = 10_000
MAX_PATHS = 5_000  # the most paths that all lists may name
MAX_FAULTS = 20  # the most faults of one list that get their own sentence
MAX_NAMED_PATHS = 3  # the most paths in a sentence about several paths

_LIBRARY = re.compile(r"lib.+\.so(\..+)?")


class Entry(StrEnum):
    """The kind of a line. `lib` is any regular file."""

    DEVICE = "dev"
    LIBRARY = "lib"
    DIRECTORY = "dir"
    LINK = "sym"


class Line(msgspec.Struct, frozen=True):
    """A line: its kind and an absolute path. The path may have the wildcards *, ? and [...], as in a shell."""

    kind: Entry
    path: str


class Looked(msgspec.Struct, frozen=True):
    """A line without wildcards, and the file at its path. `library` has the ELF data if the file has the name of a library."""

    line: Line
    seen: Seen
    library: SeenLibrary | None = None

    @property
    def mounted(self) -> bool:
        """Whether the file has the kind of its line, and containers may get it."""
        return not self.seen.fault and self.seen.kind in _kinds(self.line)


class TegraFiles(msgspec.Struct, frozen=True):
    """The files and device nodes that the lists of a Tegra name."""

    looked: tuple[Looked, ...] = ()  # the lines with their files
    # The device nodes that exist, by their path under /dev.
    nodes: Mapping[str, DeviceFile] = msgspec.field(default_factory=dict)
    complaints: tuple[str, ...] = ()  # sentences about lines that are left out
    fault: str = ""  # why there are no lines; empty if there are lines
    searched: tuple[str, ...] = ("/",)  # the roots whose device nodes were searched, as paths of this process


def parse(name: str, content: bytes) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """Parse the list of this name. Return its lines without duplicates, and a sentence for each invalid line."""
    rows = content.decode(errors="replace").removesuffix("\n").split("\n")
    found: dict[Line, None] = {}
    faults: list[str] = []
    for number, row in enumerate(rows[:MAX_LINES], 1):
        text = row.strip()
        if not text or text.startswith("#"):
            continue
        line = _line(text)
        if isinstance(line, Line):
            found[line] = None
        else:
            faults.append(f"{name}:{number} is left out: {line}")
    complaints = faults[:MAX_FAULTS]
    if len(faults) > MAX_FAULTS:
        complaints.append(f"{name}: {len(faults) - MAX_FAULTS} more lines are left out")
    if len(rows) > MAX_LINES:
        complaints.append(f"{name} has {len(rows):,} lines; the lines after the first {MAX_LINES:,} are left out")
    return tuple(found), tuple(complaints)


def _line(text: str) -> Line | str:
    word, comma, path = (part.strip() for part in text.partition(","))
    shown = repr(text[:80])
    if not comma:
        return f"{shown} is not of the form `kind, path`"
    if word not in set(Entry):
        return f"{word[:80]!r} is not one of {', '.join(Entry)}"
    if not path.startswith("/") or not path.isprintable() or "\ufffd" in path:
        return f"{shown} has no absolute path of printable characters"
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        return f"{shown} has a path that leads to the root or out of it"
    return Line(Entry(word), "/" + "/".join(parts))


class TegraSearch(FirstRoot[TegraFiles]):
    """Keeps the files that the lists name, until a list or a directory changes.

    The lists come from the first root with a list, or from this machine. Their paths are below the first root that exists. Device
    nodes are searched on this machine and below each root. `own` is False if the roots belong to another machine; then this
    machine does not count.
    """

    def __init__(self, roots: Sequence[tuple[str, str]], *, own: bool = True) -> None:
        super().__init__(roots)
        self._here = ("",) if own else ()
        self._devices: tuple[Line, ...] = ()

    def files(self, running: str = "") -> TegraFiles:
        """Return the files and the present device nodes."""
        return self._with_devices(super().files(running))

    def specs(self, files: TegraFiles, gpus: Sequence[Gpu], host: HostDevices, options: CdiOptions) -> Built:
        """Build the specification of the single device. The lists name its device nodes."""
        del gpus, host
        return tegra_specs(files, options)

    def _search(self, running: str) -> TegraFiles:
        del running
        trees = {root: self._tree(root) for root in (*(seen_at for seen_at, _ in self.roots), *self._here)}
        lines, complaints = _first_lists(trees.values())
        seen_at, host = next((each for each in self.roots if os.path.isdir(each[0] or "/")), self.roots[0])  # noqa: PTH112
        if lines:
            tree = trees[seen_at]
            looked, too_many = _find(tree, (line for line in lines if line.kind is not Entry.DEVICE))
            release = tree.look_for(RELEASE)
            if release.kind is Kind.FILE and not release.fault:
                looked.append(Looked(Line(Entry.LIBRARY, RELEASE), release))
            found = TegraFiles(tuple(looked), complaints=(*complaints, *too_many))
        else:
            fault = (
                f"none of {', '.join(NAMES)} is in /{DIRECTORY}, neither in the driver root {host or '/'} nor in this process's "
                "root: they belong to the package nvidia-l4t-init of Linux for Tegra, and this process can read them if the "
                "host's root is mounted"
            )
            found = TegraFiles(complaints=tuple(complaints), fault=fault)
        self.host_root = host
        self._devices = tuple(line for line in lines if line.kind is Entry.DEVICE)
        self._trees = tuple(trees.values())
        return found

    def _with_devices(self, found: TegraFiles) -> TegraFiles:
        """Add the present device nodes. They are read each time, since no watched directory shows a change of them."""
        roots = {**dict.fromkeys(self._here, ""), **dict(reversed(self.roots))}
        nodes: dict[str, DeviceFile] = {}
        looked: dict[str, Looked] = {}
        for line in self._devices:
            paths = sorted({path for root in roots for path in Tree(root).expand(line.path)}) or [line.path]
            for path in paths:
                seen = Seen(path, Kind.MISSING)
                for root, host in roots.items():
                    seen, known = device_file(root, path)
                    if known is not None:
                        nodes[path] = replace(known, root=host)
                    if seen.kind is not Kind.MISSING:
                        break
                looked[path] = Looked(Line(Entry.DEVICE, path), seen)
        searched = tuple(root or "/" for root in roots)
        return replace(found, looked=(*looked.values(), *found.looked), nodes=nodes, searched=searched)


def _first_lists(trees: Iterable[Tree]) -> tuple[list[Line], list[str]]:
    """Return the lines of the lists below the first root with a list, and sentences about their faults."""
    lines: dict[Line, None] = {}
    complaints: list[str] = []
    for tree in trees:
        there = tree.names([DIRECTORY]).get(DIRECTORY, ())
        for path in (f"/{DIRECTORY}/{name}" for name in NAMES if name in there):
            try:
                parsed, faults = parse(path, tree.read(path, MAX_BYTES))
            except OSError as error:
                complaints.append(f"{path} is left out: {error.strerror}")
            except ValueError as error:
                complaints.append(f"{path} is left out: {error}")
            else:
                lines |= dict.fromkeys(parsed)
                complaints += faults
        if lines:
            break
    return list(lines), complaints


def _find(tree: Tree, lines: Iterable[Line]) -> tuple[list[Looked], list[str]]:
    """Return the files for these lines, MAX_PATHS at most, and a sentence if there are more. Raises OSError."""
    paths = ((line, path) for line in lines for path in ([*tree.expand(line.path)] or [line.path]))
    first = [*islice(dict.fromkeys(Line(line.kind, path) for line, path in paths), MAX_PATHS + 1)]
    looked = []
    for line in first[:MAX_PATHS]:
        seen = tree.look(line.path, _kinds(line))
        named = seen.kind is Kind.FILE and not seen.fault and is_library(line.path)
        looked.append(Looked(line, seen, tree.library(line.path) if named else None))
    if len(first) <= MAX_PATHS:
        return looked, []
    return looked, [f"the lists of Linux for Tegra name more than {MAX_PATHS:,} paths; the rest is left out"]


def _kinds(line: Line) -> tuple[Kind, ...]:
    return (Kind.DIRECTORY,) if line.kind is Entry.DIRECTORY else (Kind.FILE, Kind.DIRECTORY)


def is_library(path: str) -> bool:
    """Whether the file's name is that of a library for the dynamic loader."""
    return _LIBRARY.fullmatch(path.rpartition("/")[2]) is not None


def device_file(root: str, path: str) -> tuple[Seen, DeviceFile | None]:
    """Return the file at a path below a root, and its device node; None if it is not a device node or not safe."""
    judged = judge(root, path, (Kind.DEVICE,))
    node = None if judged.seen.fault or judged.way.status is None else device_node(judged.way.status)
    return judged.seen, node


def tegra_specs(files: TegraFiles, options: CdiOptions) -> Built:
    """Build the specification of the single device, under the names `tegra`, `0` and `all`, with the listed files that exist."""
    root = options.driver_root
    devices = [each.line.path for each in files.looked if each.line.kind is Entry.DEVICE]
    others = [each for each in files.looked if each.line.kind is not Entry.DEVICE]
    mounted = [each for each in others if each.mounted]
    complaints = [*files.complaints]
    unsafe = [(each.seen, each.seen.fault) for each in files.looked if each.seen.fault]
    complaints += driver.all_left_out(unsafe, root or "/")
    gone = [each.line.path for each in others if not each.seen.fault and not each.mounted]
    gone += [
        each.line.path
        for each in files.looked
        if each.line.kind is Entry.DEVICE and not each.seen.fault and each.line.path not in files.nodes
    ]
    if gone:
        more = ", ..." if len(gone) > MAX_NAMED_PATHS else ""
        complaints.append(
            f"{len(gone)} of {len(files.looked)} paths in the lists of Linux for Tegra are left out, since they do not exist or "
            f"have another kind: {', '.join(gone[:MAX_NAMED_PATHS])}{more}"
        )
    complaints += [
        f"{each.line.path} is mounted in containers only at that path: {each.library.fault}"
        for each in mounted
        if each.library is not None and each.library.fault
    ]
    nodes = Nodes(HostDevices(files.nodes), options)
    trouble = files.fault
    if not trouble and not nodes.there(devices):
        trouble = f"no device node that the lists of Linux for Tegra name exists under {' or '.join(files.searched)}"
    if trouble:
        return Built(trouble=trouble, complaints=tuple(complaints))
    libraries, machine = _libraries(mounted)
    if options.hook:
        common = _hooked(root, mounted, libraries, options)
    else:
        mounts = {each.line.path: bind(root, each.seen.target, each.line.path) for each in mounted}
        common = Edits(env=(HIDDEN,), mounts=tuple({**loadable(root, libraries, machine), **mounts}.values()))
    edits = nodes.edits(nodes.there(devices))
    device_names = (TEGRA_GPU, cdi_names.INDEX, cdi_names.ALL)
    spec_devices = tuple(SpecDevice(name=name, container_edits=edits) for name in device_names)
    return Built(gpu_spec(spec_devices, common), complaints=tuple(complaints))


def _libraries(mounted: Iterable[Looked]) -> tuple[list[Library], str]:
    """Return the libraries for 64-bit programs, each name once, and their processor: libcuda's, if there is a libcuda."""
    good = [each.library for each in mounted if each.library is not None and not each.library.fault]
    by_cuda = sorted(good, key=lambda each: not each.soname.startswith("libcuda.so"))
    machine = next((each.machine for each in by_cuda if each.bits == 64), "")
    usable: dict[str, SeenLibrary] = {}
    for each in good:
        if (each.machine, each.bits) == (machine, 64):
            usable.setdefault(each.seen.target, each)
    return list(driver.named_once(usable.values())), machine


def _hooked(root: str, mounted: Sequence[Looked], libraries: Sequence[Library], options: CdiOptions) -> Edits:
    """Return the same edits as NVIDIA's toolkit: the targets of links at their own paths, and hooks.

    The hooks make the links and add the libraries' directories to the loader's cache.
    """
    mounts = {each.seen.target: bind(root, each.seen.target, each.seen.target) for each in mounted if each.seen.link}
    mounts |= {each.line.path: bind(root, each.seen.target, each.line.path) for each in mounted if not each.seen.link}
    links = {each.line.path: each.seen.target for each in mounted if each.seen.link}
    for link in soname_links(libraries):
        target, _, path = link.partition("::")
        links.setdefault(path, target)
    wanted = [f"{target}::{path}" for path, target in links.items() if path not in mounts]
    made = toolkit_hooks(options.hook, options.disabled_hooks, wanted, [library.target for library in libraries])
    return Edits(env=(HIDDEN,), hooks=made, mounts=tuple(mounts.values()))
