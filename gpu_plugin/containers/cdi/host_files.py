"""The files and device nodes that were found on the host, for the builder of CDI specifications."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import msgspec


class Kind(StrEnum):
    """The type of the file at a path, after links."""

    FILE = "file"
    SOCKET = "socket"
    DIRECTORY = "directory"
    DEVICE = "device node"
    OTHER = "FIFO"
    MISSING = "missing"


class Seen(msgspec.Struct, frozen=True):
    """A path below a root, such as /usr/bin/nvidia-smi, and the file at that path.

    Attributes:
        path: the path.
        kind: the type of the file.
        target: the path of the same file without links, also below the root; empty for a broken link.
        fault: why containers must not get the file; empty if they may.
        link: True if the path itself is a link; False if at most a directory of the path is a link.
    """

    path: str
    kind: Kind = Kind.FILE
    target: str = ""
    fault: str = ""
    link: bool = False


class SeenLibrary(msgspec.Struct, frozen=True):
    """A shared library.

    Attributes:
        seen: the path and the file.
        soname: the SONAME; empty if the library has no SONAME.
        machine: the processor by its ELF name, such as EM_X86_64.
        bits: 32 or 64.
        fault: why the library cannot be read; empty if it can.
    """

    seen: Seen
    soname: str = ""
    machine: str = ""
    bits: int = 64
    fault: str = ""


Listing = Mapping[str, tuple[str, ...]]
"""The names in each directory below a root, such as usr/lib64, in their order. A directory that does not exist has no entry."""


class Library(msgspec.Struct, frozen=True):
    """A library for containers.

    Attributes:
        target: the path below its root, without links.
        names: the names in containers, relative to the loader's directories: libcuda.so.1, or vdpau/libvdpau_nvidia.so.1.
        path: the path below its root at which it was found; NVIDIA's hooks use it.
    """

    target: str
    names: tuple[str, ...]
    path: str


class PlacedFile(msgspec.Struct, frozen=True):
    """Another file for containers: its path below its root, its path in the container, and its group."""

    target: str
    container_path: str
    group: str


class DriverFiles(msgspec.Struct, frozen=True):
    """The files of a driver's user space for containers.

    `fault` is why no container can use a GPU with it; empty if containers can. `complaints` are sentences about single files.
    """

    version: str = ""
    machine: str = ""
    libraries: tuple[Library, ...] = ()
    files: tuple[PlacedFile, ...] = ()
    complaints: tuple[str, ...] = ()
    fault: str = ""


class DeviceFile(msgspec.Struct, frozen=True):
    """A device node of the host: its numbers, its permission bits, the id of its group, and its type as in mknod(1).

    `root` is the root in which the node was found, as a host path without a slash at the end; empty for /.
    """

    major: int
    minor: int
    mode: int = 0o666
    gid: int = 0
    type: Literal["b", "c"] = "c"
    root: str = ""


class HostDevices(msgspec.Struct, frozen=True):
    """The device nodes of the host.

    Attributes:
        nodes: the device nodes by their path under /dev. They include links in /dev/dri/by-path, with the numbers of their
            targets.
        drm: the paths of a GPU's DRM device nodes, by its PCI bus id in NVML's form.
        faults: why containers must not get a device node, by its path. Such a node is not in `nodes`.
        searched: the roots whose dev/ was searched, as paths of this process.
    """

    nodes: Mapping[str, DeviceFile] = msgspec.field(default_factory=dict)
    drm: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    faults: Mapping[str, str] = msgspec.field(default_factory=dict)
    searched: tuple[str, ...] = ("/",)
