"""Selects the files of a driver installation for containers, and their names in containers.

The names and directories are the same as in NVIDIA's container toolkit (nvidia-container-toolkit, pkg/nvcdi and
internal/discover), and some further directories of distributions.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from gpu_plugin.containers.cdi.host_files import (
    LIBRARY_DIRECTORIES,
    DriverFiles,
    Kind,
    Library,
    Listing,
    PlacedFile,
    Seen,
    SeenLibrary,
)

# The groups of files that are not libraries for the loader.
BINARY = "binary"
FIRMWARE = "firmware"
CONFIG = "config"
SOCKET = "socket"
XORG = "xorg"
STORAGE = "storage"

MAX_LIBRARIES = 512  # the most libraries of one driver in a container; drivers have some 60
MAX_NAMED_FILES = 3  # the most files with the same fault that get their own sentence

# Subdirectories of library directories from which other libraries load their drivers.
SUBDIRECTORIES = ("vdpau", "gbm")

# Directories of programs, for the same installers and distributions as LIBRARY_DIRECTORIES.
BINARY_DIRECTORIES = (
    "usr/bin",
    "usr/sbin",
    "bin",
    "sbin",
    "usr/lib/nvidia/current",
    "usr/local/nvidia/bin",
    "opt/nvidia/bin",
    "usr/local/bin",
    "run/current-system/sw/bin",
    "usr/libexec/nvidia/tesla/bin",
    "var/lib/nvidia/bin",
    "opt/bin",
    "opt/nvidia/current/usr/bin",
    "opt/nvidia/current/bin",
)

BINARIES = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
)

# Paths that may appear and disappear, with their group and kind: sockets of the driver's daemons, MPS's directory of sockets, and
# files for GPUDirect Storage. Only a file may be a link, since root may have moved cufile.json. A link in the place of a socket
# or a directory is refused.
COMING_AND_GOING = {
    "run/nvidia-persistenced/socket": (SOCKET, Kind.SOCKET),
    "run/nvidia-fabricmanager/socket": (SOCKET, Kind.SOCKET),
    "tmp/nvidia-mps": (SOCKET, Kind.DIRECTORY),
    "run/udev": (STORAGE, Kind.DIRECTORY),
    "etc/cufile.json": (STORAGE, Kind.FILE),
}

# Files by which the loaders of Vulkan, EGL, OpenCL, OptiX and X find the driver, below each of CONFIG_DIRECTORIES.
CONFIGS = {
    "vulkan/icd.d": ("nvidia_icd.json", "nvidia_icd.x86_64.json", "nvidia_icd.aarch64.json", "nvidia_layers.json"),
    "vulkan/implicit_layer.d": ("nvidia_layers.json",),
    "vulkansc/icd.d": ("nvidia_icd_vksc.json",),
    "glvnd/egl_vendor.d": ("10_nvidia.json",),
    "egl/egl_external_platform.d": (
        "09_nvidia_wayland2.json",
        "10_nvidia_wayland.json",
        "15_nvidia_gbm.json",
        "20_nvidia_xcb.json",
        "20_nvidia_xlib.json",
    ),
    "OpenCL/vendors": ("nvidia.icd",),
    "nvidia": ("nvoptix.bin",),
    "X11/xorg.conf.d": ("10-nvidia.conf", "nvidia.conf", "nvidia-drm-outputclass.conf"),
}
CONFIG_DIRECTORIES = ("etc", "usr/share", "usr/local/share")

_LOCAL = "/usr/local/share/"  # most loaders do not search it, so containers get these files in /usr/share

# The directories of CONFIGS that GKE's installer puts directly below its root. Containers get them in /etc.
VULKAN = ("vulkan/icd.d", "vulkan/implicit_layer.d")

XORG_DIRECTORIES = (
    "usr/lib/xorg/modules/drivers",
    "usr/lib/xorg/modules/extensions",
    "usr/lib/xorg/modules/updates/drivers",
    "usr/lib/xorg/modules/updates/extensions",
    "usr/lib64/xorg/modules/drivers",
    "usr/lib64/xorg/modules/extensions",
    "usr/lib64/xorg/modules/updates/drivers",
    "usr/lib64/xorg/modules/updates/extensions",
    "usr/lib/x86_64-linux-gnu/nvidia/xorg",
    "usr/lib/aarch64-linux-gnu/nvidia/xorg",
)

# Every directory below a root to list, except SUBDIRECTORIES, directories of firmware, and directories that the root names.
DIRECTORIES = (
    *LIBRARY_DIRECTORIES,
    *BINARY_DIRECTORIES,
    *XORG_DIRECTORIES,
    *(f"{base}/{config}" for base in CONFIG_DIRECTORIES for config in CONFIGS),
    *VULKAN,
)

# The first number has two or more digits: libcuda.so.1.1 belongs to a Tegra or to WSL, and has no driver version in its name.
_VERSION = re.compile(r"(?:libcuda|libnvidia-ml)\.so\.(\d{2,}\.\d+(?:\.\d+)*)")

# The prefixes of NVIDIA's own libraries. Other vendors' libraries do not end in a driver version.
_PREFIXES = (
    "libnvidia-",
    "libcuda",
    "libnvcuvid",
    "libnvoptix",
    "libEGL_nvidia",
    "libGL",
    "libvdpau_nvidia",
    "nvidia-",
)

# Libraries of a driver that have their own version numbers.
_OWN_VERSION = re.compile(
    r"libnvidia-egl-(?:gbm|wayland2?|xcb|xlib)\.so\.\d+(?:\.\d+)+|libnvidia-nvvm70\.so\.\d+|libnvidia-api\.so\.1"
)

# Names, in addition to the SONAME, under which programs open a library. NVIDIA's create-symlinks hook makes the same names.
_ALIASES = {
    "libcuda.so.1": ("libcuda.so",),
    "libGLX_nvidia.so.0": ("libGLX_indirect.so.0",),
    "libnvidia-opticalflow.so.1": ("libnvidia-opticalflow.so",),
}


def firmware_directories(version: str, kernel: str) -> Iterator[str]:
    """Yield the directories of this driver version's firmware for this kernel release, in the kernel's search order."""
    bases = [f"{base}/firmware{updates}" for updates in ("/updates", "") for base in ("lib", "usr/lib")]
    for base in bases:
        yield f"{base}/{kernel}/nvidia/{version}"
        yield f"{base}/nvidia/{version}"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


class NoVersionError(Exception):
    """The root has no usable driver. The text says why no container can use a GPU with it."""


def version_in(listing: Listing, places: Sequence[str], running: str, root: str) -> tuple[str, list[str]]:
    """Return the version of the driver for containers, and a sentence if there are several versions.

    Args:
        listing: the names in each directory.
        places: the directories of libraries.
        running: the version of the driver that the kernel runs; empty if it is not known.
        root: the operator's path of the root, for sentences.

    Raises:
        NoVersionError: there is no driver, or none of the running version.
    """
    names = {name for directory in places for name in listing.get(directory, ())}
    found = {match[1] for match in map(_VERSION.fullmatch, names) if match}
    there = sorted(found, key=lambda version: (_numbers(version), version))
    if not there:
        raise NoVersionError(
            f"the driver root {root} has no libcuda.so or libnvidia-ml.so with a version: is the driver installed "
            "there, and is that directory mounted for this process? Set the directory with --nvidia-driver-root, and its mount "
            f"point with --driver-root-ctr-path; searched below it: {', '.join(places)}"
        )
    if running and running not in there:
        raise NoVersionError(
            f"the kernel runs driver {running}, and the driver root {root} has libraries of {', '.join(there)}: "
            "reload the driver, or install its libraries"
        )
    version = running or there[-1]
    if len(there) == 1:
        return version, []
    why = "the version that the kernel runs"
    if not running:
        why = "the newest, since the version that the kernel runs is not known"
    return version, [f"the driver root {root} has libraries of {', '.join(there)}; containers get {version}, {why}"]


def libraries_of(listing: Listing, places: Sequence[str], version: str, root: str) -> tuple[list[str], list[str]]:
    """Return the paths of the libraries of this version, MAX_LIBRARIES at most, and a sentence if there are more."""
    found = sorted(_libraries(listing, places, version), key=_importance)
    if len(found) <= MAX_LIBRARIES:
        return found, []
    sentence = (
        f"the driver root {root} has {len(found)} libraries of the driver; containers get the first {MAX_LIBRARIES}"
    )
    return found[:MAX_LIBRARIES], [sentence]


def _importance(path: str) -> int:
    """Return a low number for libraries that are surely NVIDIA's: if there are too many libraries, containers get these."""
    name = path.rpartition("/")[2]
    return 0 if _VERSION.fullmatch(name) else 1 if name.startswith(_PREFIXES) else 2


def _libraries(listing: Listing, places: Sequence[str], version: str) -> Iterator[str]:
    ending = f".so.{version}"
    for directory in places:
        for at in (directory, f"{directory}/vdpau"):
            names = listing.get(at, ())
            yield from (f"/{at}/{name}" for name in names if name.startswith("lib") and name.endswith(ending))
            own = [name for name in names if _OWN_VERSION.fullmatch(name) and not name.endswith(ending)]
            newest_first = sorted(own, key=lambda name: _numbers(name.partition(".so.")[2]), reverse=True)
            yield from (f"/{at}/{name}" for name in newest_first)
        if "nvidia-drm_gbm.so" in listing.get(f"{directory}/gbm", ()):
            yield f"/{directory}/gbm/nvidia-drm_gbm.so"


def unversioned(listing: Listing, libraries: Iterable[str]) -> list[str]:
    """Return the paths of these libraries without a version, such as /usr/lib64/libnvidia-ml.so, in all directories.

    A path may be a link to another library.
    """
    names = {path.rpartition("/")[2].partition(".so.")[0] + ".so" for path in libraries}
    return [f"/{at}/{name}" for at, there in listing.items() for name in there if name in names]


def other_files(listing: Listing, version: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the group of each other file of this version."""
    for name in BINARIES:
        yield from ((f"/{at}/{name}", BINARY) for at in BINARY_DIRECTORIES if name in listing.get(at, ()))
    for at, names in listing.items():
        if at.endswith(f"/nvidia/{version}"):
            yield from ((f"/{at}/{name}", FIRMWARE) for name in names if re.fullmatch(r"gsp.*\.bin", name))
    for base in CONFIG_DIRECTORIES:
        for directory, names in CONFIGS.items():
            at = f"{base}/{directory}"
            yield from ((f"/{at}/{name}", CONFIG) for name in names if name in listing.get(at, ()))
    for at in VULKAN:
        yield from ((f"/{at}/{name}", CONFIG) for name in CONFIGS[at] if name in listing.get(at, ()))
    yield from ((f"/{path}", group) for path, (group, _) in COMING_AND_GOING.items())
    for at in XORG_DIRECTORIES:
        wanted = ("nvidia_drv.so", f"libglxserver_nvidia.so.{version}")
        yield from ((f"/{at}/{name}", XORG) for name in wanted if name in listing.get(at, ()))


def chosen(
    version: str,
    libraries: Sequence[SeenLibrary],
    files: Iterable[tuple[Seen, str]],
    root: str,
    links: Iterable[Seen] = (),
) -> DriverFiles:
    """Return the files for containers from the libraries and other files of this version.

    A library also gets the names of the `links` that lead to it. If several directories have a library of the same name, the
    first is used, as the loader does.
    """
    faulty = [(each.seen, each.fault) for each in libraries if each.fault]
    complaints = all_left_out(faulty, root)
    good = [each for each in libraries if not each.fault]
    machine = next((each.machine for each in good if _is_libcuda(each) and each.bits == 64), "")
    placed: dict[str, SeenLibrary] = {}
    for each in good:
        if (each.machine, each.bits) == (machine, 64):  # else it is for 32-bit programs, or for another processor
            placed.setdefault(_name(each), each)
    fault = ""
    if "libcuda.so.1" not in placed:
        why = _why_no_libcuda(libraries)
        fault = f"the driver root {root} has no libcuda.so.{version} that programs can load: {why}"
    more, others = _place(files, root, version)
    return DriverFiles(version, machine, tuple(named_once(placed.values(), links)), more, (*complaints, *others), fault)


def _left_out(seen: Seen, why: str, root: str) -> str:
    path = seen.path if seen.path.isprintable() else seen.path.encode("unicode_escape").decode()
    return f"{path} in the driver root {root} is left out: {why}"


def all_left_out(faulty: Iterable[tuple[Seen, str]], root: str) -> Iterator[str]:
    """Yield sentences about the files that are left out.

    Of the files with the same fault, MAX_NAMED_FILES get their own sentence, and the others one sentence together.
    """
    by_fault: dict[str, list[Seen]] = {}
    for seen, fault in faulty:
        by_fault.setdefault(fault, []).append(seen)
    for fault, files in by_fault.items():
        yield from (_left_out(seen, fault, root) for seen in files[:MAX_NAMED_FILES])
        if len(files) > MAX_NAMED_FILES:
            yield f"{len(files) - MAX_NAMED_FILES} more files in the driver root {root} are left out for the same reason: {fault}"


def _why_no_libcuda(libraries: Iterable[SeenLibrary]) -> str:
    found = [each for each in libraries if _is_libcuda(each)]
    faults = [each.fault for each in found if each.fault]
    if not found or faults:
        return faults[0] if faults else "there is no such file"
    return "its SONAME is not libcuda.so.1" if any(each.bits == 64 for each in found) else "it is for 32-bit programs"


def _is_libcuda(each: SeenLibrary) -> bool:
    return each.seen.path.rpartition("/")[2].startswith("libcuda.so.")


def named_once(libraries: Collection[SeenLibrary], links: Iterable[Seen] = ()) -> Iterator[Library]:
    """Yield the libraries with their names, so that each name occurs once: the first library gets it.

    An alias is left out if it is the name of another library.
    """
    own = set(map(_name, libraries))
    taken: set[str] = set()
    linked: dict[str, list[str]] = {}
    for link in links:
        if link.target:
            linked.setdefault(link.target, []).append(_relative(link.path))
    for each in libraries:
        others = (*_ALIASES.get(_name(each), ()), *linked.get(each.seen.target, ()))
        aliases = dict.fromkeys(alias for alias in others if alias not in own)
        free = tuple(name for name in (_name(each), *aliases) if name not in taken)
        taken.update(free)
        yield Library(each.seen.target, free, each.seen.path)


def _name(each: SeenLibrary) -> str:
    """Return the name relative to the loader's directories: the SONAME, or the file's name if it has no SONAME."""
    path = each.seen.path
    directory = path.rpartition("/")[0]
    named_by_file = directory.endswith("/gbm") or not each.soname
    return _relative(path if named_by_file else f"{directory}/{each.soname}")


def _relative(path: str) -> str:
    directory, _, file = path.rpartition("/")
    parent = directory.rpartition("/")[2]
    return f"{parent}/{file}" if parent in SUBDIRECTORIES else file


def _place(
    files: Iterable[tuple[Seen, str]], root: str, version: str
) -> tuple[tuple[PlacedFile, ...], tuple[str, ...]]:
    placed: dict[str, PlacedFile] = {}
    complaints = []
    for seen, group in files:
        if seen.kind is Kind.MISSING and group in (SOCKET, STORAGE):
            continue  # the daemon does not run on this node
        if seen.fault or seen.kind is Kind.MISSING:
            complaints.append(_left_out(seen, seen.fault or "it is a broken link", root))
            continue
        path = _container_path(seen.path, group, version)
        placed.setdefault(path, PlacedFile(seen.target, path, group))
    return tuple(placed.values()), tuple(complaints)


def _container_path(path: str, group: str, version: str) -> str:
    directory, _, name = path.rpartition("/")
    if group == BINARY:
        return f"/usr/sbin/{name}" if directory in ("/usr/sbin", "/sbin") else f"/usr/bin/{name}"
    if group == FIRMWARE:
        return f"/lib/firmware/nvidia/{version}/{name}"
    if group == XORG:  # X searches for modules without a version in their names
        return path.removesuffix(f".{version}")
    if path.startswith(_LOCAL):
        return f"/usr/share/{path.removeprefix(_LOCAL)}"
    return f"/etc{path}" if directory[1:] in VULKAN else path


def loader_directories(machine: str) -> tuple[str, ...]:
    """Return the default directories of a container's dynamic loader, on Fedora's family and on Debian (ld.so(8))."""
    debian = {"EM_X86_64": "/usr/lib/x86_64-linux-gnu", "EM_AARCH64": "/usr/lib/aarch64-linux-gnu"}
    return ("/usr/lib64", debian[machine]) if machine in debian else ("/usr/lib64",)
