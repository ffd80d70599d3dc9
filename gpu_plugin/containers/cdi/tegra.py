"""The CDI specification of a Tegra: one device with the files that the lists of Linux for Tegra name.

A list has lines of the form `kind, path`, by the mount plugin specification (libnvidia-container, design/mount_plugins.md) and
its reader in nvidia-container-toolkit (internal/platform-support/tegra/csv). Containers get the same files as from NVIDIA's
toolkit in mode csv (internal/platform-support/tegra). If the operator names no hook program, the target of a link is mounted at
the link's path, and a library is also mounted in the default directories of a container's dynamic loader.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from gpu_plugin.containers import cdi_names
from gpu_plugin.containers.cdi import driver, hooks
from gpu_plugin.containers.cdi.build import HIDDEN, Built, Nodes, bind, gpu_spec, loadable
from gpu_plugin.containers.cdi.host_files import DeviceFile, HostDevices, Kind, Library, Seen, SeenLibrary
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.cdi.spec import Edits, SpecDevice
from gpu_plugin.devices.device import TEGRA_GPU

DIRECTORY = "etc/nvidia-container-runtime/host-files-for-container.d"

NAMES = ("devices.csv", "drivers.csv", "l4t.csv")
"""The lists for every container. Other lists, such as cudnn.csv, are only for images of JetPack 4 (csv.BaseFilesOnly)."""

MAX_BYTES = 1024 * 1024
MAX_LINES = 10_000
"""No list is longer: the list of a Jetson Orin has 285 lines in 20 KiB."""

MAX_FAULTS = 20  # the most faults of one list that get their own sentence


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


def not_found(root: str) -> str:
    """Say why no container can use the GPU if no list is found."""
    return (
        f"none of {', '.join(NAMES)} is in /{DIRECTORY}, neither in the driver root {root} nor in this process's root: they "
        "belong to the package nvidia-l4t-init of Linux for Tegra, and this process can read them if the host's root is mounted"
    )


RELEASE = "/etc/nv_tegra_release"  # the file by which programs recognize a Tegra
MAX_NAMED_PATHS = 3  # the most paths in a sentence about several paths

_LIBRARY = re.compile(r"lib.+\.so(\..+)?")


class Looked(msgspec.Struct, frozen=True):
    """A line without wildcards, and the file at its path. `library` has the ELF data if the file has the name of a library."""

    line: Line
    seen: Seen
    library: SeenLibrary | None = None


class TegraFiles(msgspec.Struct, frozen=True):
    """The files and device nodes that the lists of a Tegra name."""

    looked: tuple[Looked, ...] = ()  # the lines with their files
    # The device nodes that exist, by their path under /dev.
    nodes: Mapping[str, DeviceFile] = msgspec.field(default_factory=dict)
    complaints: tuple[str, ...] = ()  # sentences about lines that are left out
    fault: str = ""  # why there are no lines; empty if there are lines
    searched: tuple[str, ...] = ("/",)  # the roots whose device nodes were searched, as paths of this process


def is_library(path: str) -> bool:
    """Whether the file's name is that of a library for the dynamic loader."""
    return _LIBRARY.fullmatch(path.rpartition("/")[2]) is not None


def tegra_specs(files: TegraFiles, options: CdiOptions) -> Built:
    """Build the specification of the single device, under the names `tegra`, `0` and `all`, with the listed files that exist."""
    root = options.driver_root
    mounted = [each for each in files.looked if each.line.kind is not Entry.DEVICE and _mounts(each)]
    devices = [each.line.path for each in files.looked if each.line.kind is Entry.DEVICE]
    sound = [each for each in files.looked if not each.seen.fault]
    gone = [each.line.path for each in sound if each.line.kind is not Entry.DEVICE and not _mounts(each)]
    gone += [each.line.path for each in sound if each.line.kind is Entry.DEVICE and each.line.path not in files.nodes]
    unsafe = driver.all_left_out(
        ((each.seen, each.seen.fault) for each in files.looked if each.seen.fault), root or "/"
    )
    complaints = [*files.complaints, *unsafe, *_left_out(gone, len(files.looked))]
    # Files that have the name of a library and cannot be read as a library.
    named = [(each.line.path, each.library.fault) for each in mounted if each.library is not None]
    unread = [(path, fault) for path, fault in named if fault]
    complaints += [f"{path} is mounted in containers only at that path: {fault}" for path, fault in unread]
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


def _mounts(each: Looked) -> bool:
    """Whether the file has the kind of its line, and containers may get it."""
    kinds = (Kind.DIRECTORY,) if each.line.kind is Entry.DIRECTORY else (Kind.FILE, Kind.DIRECTORY)
    return not each.seen.fault and each.seen.kind in kinds


def _left_out(gone: Sequence[str], count: int) -> Iterable[str]:
    if gone:
        more = ", ..." if len(gone) > MAX_NAMED_PATHS else ""
        yield (
            f"{len(gone)} of {count} paths in the lists of Linux for Tegra are left out, since they do not exist or have another "
            f"kind: {', '.join(gone[:MAX_NAMED_PATHS])}{more}"
        )


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
    for link in hooks.soname_links(libraries):
        target, _, path = link.partition("::")
        links.setdefault(path, target)
    wanted = [f"{target}::{path}" for path, target in links.items() if path not in mounts]
    made = hooks.hooks(options.hook, options.disabled_hooks, wanted, [library.target for library in libraries])
    return Edits(env=(HIDDEN,), hooks=made, mounts=tuple(mounts.values()))
