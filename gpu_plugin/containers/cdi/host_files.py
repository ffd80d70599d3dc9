"""The files and device nodes that were found on the host, for the builder of CDI specifications, and where libraries are."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import msgspec

# Directories of libraries below a root that are always searched, in addition to the directories of the root's dynamic loader: of
# distributions, Debian's alternatives, GKE's installer, prebuilt images, NixOS, Talos, Bottlerocket, Container-Optimized OS, and
# Flatcar, in this order.
LIBRARY_DIRECTORIES = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib64/nvidia",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "lib",
    "usr/local/nvidia/lib64",
    "opt/nvidia/lib64",
    "lib64/nvidia",
    "run/opengl-driver/lib",
    "usr/local/lib",
    "usr/local/glibc/usr/lib64",
    "usr/local/glibc/usr/lib",
    "usr/lib/nvidia/tesla",
    "var/lib/nvidia/lib64",
    "opt/nvidia/current/usr/lib64",
    "opt/nvidia/current/lib64",
)

# WSL's directory of the Windows host's driver libraries, or of their loaders (see ld.so.conf.d/ld.wsl.conf there).
WSL_LIBRARIES = "usr/lib/wsl/lib"

DXCORE = "libdxcore.so"  # the library through which Linux reaches a Windows host's GPUs

# The directories that may have DXCORE: WSL's own, or the directory that Docker Desktop or NVIDIA's runtime uses in its nodes.
DXCORE_DIRECTORIES = (WSL_LIBRARIES, *LIBRARY_DIRECTORIES)


class Kind(StrEnum):
    """The type of the file at a path, after links."""

    FILE = "file"
    SOCKET = "socket"
    DIRECTORY = "directory"
    DEVICE = "device node"
    OTHER = "FIFO"
    MISSING = "missing"


class Seen(msgspec.Struct, frozen=True):
    """A path below a root, such as /usr/bin/nvidia-smi, and the file at that path."""

    path: str
    kind: Kind = Kind.FILE  # the type of the file
    target: str = ""  # the path of the same file without links, also below the root; empty for a broken link
    fault: str = ""  # why containers must not get the file; empty if they may
    link: bool = False  # True if the path itself is a link; False if at most a directory of the path is a link


class SeenLibrary(msgspec.Struct, frozen=True):
    """A shared library."""

    seen: Seen
    soname: str = ""  # the SONAME; empty if the library has no SONAME
    machine: str = ""  # the processor by its ELF name, such as EM_X86_64
    bits: int = 64
    fault: str = ""  # why the library cannot be read; empty if it can


# The names in each directory below a root, such as usr/lib64, in their order. A directory that does not exist has no entry.
Listing = Mapping[str, tuple[str, ...]]


class Library(msgspec.Struct, frozen=True):
    """A library for containers."""

    target: str  # the path below its root, without links
    # The names in containers, relative to the loader's directories: libcuda.so.1, or vdpau/libvdpau_nvidia.so.1.
    names: tuple[str, ...]
    path: str  # the path below its root at which it was found; NVIDIA's hooks use it


class PlacedFile(msgspec.Struct, frozen=True):
    """Another file for containers: its path below its root, its path in the container, and its group."""

    target: str
    container_path: str
    group: str


class DriverFiles(msgspec.Struct, frozen=True):
    """The files of a driver's user space for containers."""

    version: str = ""
    machine: str = ""
    libraries: tuple[Library, ...] = ()
    files: tuple[PlacedFile, ...] = ()
    complaints: tuple[str, ...] = ()  # sentences about single files
    fault: str = ""  # why no container can use a GPU with it; empty if containers can


class DeviceFile(msgspec.Struct, frozen=True):
    """A device node of the host."""

    major: int
    minor: int
    mode: int = 0o666  # permission bits
    gid: int = 0
    type: Literal["b", "c"] = "c"  # as in mknod(1)
    root: str = ""  # the root in which it was found, as a host path without a slash at the end; empty for /


class HostDevices(msgspec.Struct, frozen=True):
    """The device nodes of the host."""

    # The device nodes by their path under /dev. They include links in /dev/dri/by-path, with the numbers of their targets.
    nodes: Mapping[str, DeviceFile] = msgspec.field(default_factory=dict)
    # The paths of a GPU's DRM device nodes, by its PCI bus id in NVML's form.
    drm: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    # Why containers must not get a device node, by its path. Such a node is not in `nodes`.
    faults: Mapping[str, str] = msgspec.field(default_factory=dict)
    searched: tuple[str, ...] = ("/",)  # the roots whose dev/ was searched, as paths of this process
