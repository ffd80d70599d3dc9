"""The CDI specification of a Tegra: one device, with what the lists of Linux for Tegra name.

Lines of a list are `kind, path`, after the mount plugin specification (libnvidia-container, design/mount_plugins.md) and its
reader in nvidia-container-toolkit (internal/platform-support/tegra/csv). What is given is NVIDIA's in mode csv
(internal/platform-support/tegra). Without its hook, a link is what it leads to, bound at its own path, and a library is bound
besides where a container's dynamic loader looks.
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
"""The lists that every container gets; others, such as cudnn.csv, only images of JetPack 4 (csv.BaseFilesOnly)."""

MAX_BYTES = 1024 * 1024
MAX_LINES = 10_000
"""More than any list has: that of a Jetson Orin has 285 lines, in 20 KiB."""

MAX_FAULTS = 20  # faults of one list that are told one by one


class Entry(StrEnum):
    """What a line is about. `lib` is any regular file."""

    DEVICE = "dev"
    LIBRARY = "lib"
    DIRECTORY = "dir"
    LINK = "sym"


class Line(msgspec.Struct, frozen=True):
    """A line: its kind, and an absolute path, in which *, ? and [...] are as in a shell."""

    kind: Entry
    path: str


def parse(name: str, content: bytes) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """The lines of the list of this name, each once, and a sentence for each that is none, which is left out.

    `content` is at most MAX_BYTES + 1 long.
    """
    if len(content) > MAX_BYTES:
        return (), (f"{name} is left out: it has more than {MAX_BYTES:,} bytes",)
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
        behind = f"those behind the first {MAX_LINES:,} are left out"
        complaints.append(f"{name} has {len(rows):,} lines, of which {behind}")
    return tuple(found), tuple(complaints)


def _line(text: str) -> Line | str:
    word, comma, path = (part.strip() for part in text.partition(","))
    shown = repr(text[:80])
    if not comma:
        return f"{shown} is not of the form `kind, path`"
    if word not in set(Entry):
        return f"{word[:80]!r} is none of {', '.join(Entry)}"
    if not path.startswith("/") or not path.isprintable() or "\ufffd" in path:
        return f"{shown} has no absolute path of printable characters"
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        return f"{shown} has a path that leads to the root or out of it"
    return Line(Entry(word), "/" + "/".join(parts))


def not_found(root: str) -> str:
    """Why no container can use the GPU where no list is found."""
    return (
        f"none of {', '.join(NAMES)} is in /{DIRECTORY}, neither in the driver root {root} nor here: they come with "
        "nvidia-l4t-init of Linux for Tegra, and are seen here where the host's root is mounted"
    )


RELEASE = "/etc/nv_tegra_release"  # the file by which programs know a Tegra
MAX_NAMED_PATHS = 3  # paths that a sentence about several names

_LIBRARY = re.compile(r"lib.+\.so(\..+)?")


class Looked(msgspec.Struct, frozen=True):
    """A line, wildcards replaced, with what its path leads to; `library` has what a file that is named as one says of itself."""

    line: Line
    seen: Seen
    library: SeenLibrary | None = None


class TegraFiles(msgspec.Struct, frozen=True):
    """What the lists of a Tegra name, and the device nodes of theirs that exist, by their path under /dev.

    `fault` is why there are none, empty where there are; `complaints` are sentences about lines that are left out. `searched`
    has the roots whose device nodes were searched, as this process sees them.
    """

    looked: tuple[Looked, ...] = ()
    nodes: Mapping[str, DeviceFile] = msgspec.field(default_factory=dict)
    complaints: tuple[str, ...] = ()
    fault: str = ""
    searched: tuple[str, ...] = ("/",)


def is_library(path: str) -> bool:
    """Whether a file is named as libraries are that the dynamic loader is asked for."""
    return _LIBRARY.fullmatch(path.rpartition("/")[2]) is not None


def tegra_specs(files: TegraFiles, options: CdiOptions) -> Built:
    """The specification of the one device, by the names `tegra`, `0` and `all`: what its lists name, as far as it is there."""
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
    # What is named as libraries are, and is none.
    named = [(each.line.path, each.library.fault) for each in mounted if each.library is not None]
    unread = [(path, fault) for path, fault in named if fault]
    complaints += [f"{path} is given to containers only at that path: {fault}" for path, fault in unread]
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
    called = tuple(SpecDevice(name=name, container_edits=edits) for name in (TEGRA_GPU, cdi_names.INDEX, cdi_names.ALL))
    return Built(gpu_spec(called, common), complaints=tuple(complaints))


def _mounts(each: Looked) -> bool:
    """Whether a path leads to what its line says, and containers may be given that."""
    kinds = (Kind.DIRECTORY,) if each.line.kind is Entry.DIRECTORY else (Kind.FILE, Kind.DIRECTORY)
    return not each.seen.fault and each.seen.kind in kinds


def _left_out(gone: Sequence[str], count: int) -> Iterable[str]:
    if gone:
        more = ", ..." if len(gone) > MAX_NAMED_PATHS else ""
        yield (
            f"{len(gone)} of {count} paths in the lists of Linux for Tegra are left out, as they are not there or of another "
            f"kind: {', '.join(gone[:MAX_NAMED_PATHS])}{more}"
        )


def _libraries(mounted: Iterable[Looked]) -> tuple[list[Library], str]:
    """The libraries for programs of 64 bits, each name once, and their processor, that of libcuda where there is one."""
    good = [each.library for each in mounted if each.library is not None and not each.library.fault]
    by_cuda = sorted(good, key=lambda each: not each.soname.startswith("libcuda.so"))
    machine = next((each.machine for each in by_cuda if each.bits == 64), "")
    usable: dict[str, SeenLibrary] = {}
    for each in good:
        if (each.machine, each.bits) == (machine, 64):
            usable.setdefault(each.seen.target, each)
    return list(driver.named_once(usable.values())), machine


def _hooked(root: str, mounted: Sequence[Looked], libraries: Sequence[Library], options: CdiOptions) -> Edits:
    """As NVIDIA's: files at the paths that links lead to, and hooks that make the links and tell the loader of directories."""
    mounts = {each.seen.target: bind(root, each.seen.target, each.seen.target) for each in mounted if each.seen.link}
    mounts |= {each.line.path: bind(root, each.seen.target, each.line.path) for each in mounted if not each.seen.link}
    links = {each.line.path: each.seen.target for each in mounted if each.seen.link}
    for link in hooks.soname_links(libraries):
        target, _, path = link.partition("::")
        links.setdefault(path, target)
    wanted = [f"{target}::{path}" for path, target in links.items() if path not in mounts]
    made = hooks.hooks(options.hook, options.disabled_hooks, wanted, [library.target for library in libraries])
    return Edits(env=(HIDDEN,), hooks=made, mounts=tuple(mounts.values()))
