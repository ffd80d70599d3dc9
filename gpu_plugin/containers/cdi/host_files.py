"""What the host has, as the search found it: facts for the builder of CDI specifications."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import msgspec


class Kind(StrEnum):
    """What a path leads to."""

    FILE = "file"
    SOCKET = "socket"
    DIRECTORY = "directory"
    DEVICE = "device node"
    OTHER = "FIFO"
    MISSING = "missing"


class Seen(msgspec.Struct, frozen=True):
    """A path below a root, such as /usr/bin/nvidia-smi, and what it leads to.

    `target` is the same file by a path without links, below that root too; empty for a link that leads nowhere. `fault` is
    why containers must not be given it, empty where they may. `link` says that the path itself is a link, rather than a
    directory on the way.
    """

    path: str
    kind: Kind = Kind.FILE
    target: str = ""
    fault: str = ""
    link: bool = False


class SeenLibrary(msgspec.Struct, frozen=True):
    """A shared library. `machine` is its processor as ELF has it, such as EM_X86_64, `bits` 32 or 64.

    `soname` is empty where it has none. `fault` is why it cannot be read, empty where it can.
    """

    seen: Seen
    soname: str = ""
    machine: str = ""
    bits: int = 64
    fault: str = ""


Listing = Mapping[str, tuple[str, ...]]
"""Names in each directory below a root, such as usr/lib64, in their order; no entry for a directory that is not there."""


class Library(msgspec.Struct, frozen=True):
    """A library for containers: the file without links below its root, and the names to bind it at.

    `names` are relative to each of the loader's directories: libcuda.so.1, or vdpau/libvdpau_nvidia.so.1. `path` is the
    file's own path below the root, which NVIDIA's hooks go by.
    """

    target: str
    names: tuple[str, ...]
    path: str


class PlacedFile(msgspec.Struct, frozen=True):
    """Another file for containers: where it is below its root, where it goes, and what it is of."""

    target: str
    container_path: str
    group: str


class DriverFiles(msgspec.Struct, frozen=True):
    """A driver's user space: what containers are given of it.

    `fault` is why no container could use a GPU with it, empty where one can; `complaints` are sentences about single files.
    """

    version: str = ""
    machine: str = ""
    libraries: tuple[Library, ...] = ()
    files: tuple[PlacedFile, ...] = ()
    complaints: tuple[str, ...] = ()
    fault: str = ""


class DeviceFile(msgspec.Struct, frozen=True):
    """A device node of the host: its numbers, its permission bits, the id of its group, and its type as in mknod(1).

    `root` is the host's path of the root where it was found, without a slash at the end, empty for /.
    """

    major: int
    minor: int
    mode: int = 0o666
    gid: int = 0
    type: Literal["b", "c"] = "c"
    root: str = ""


class HostDevices(msgspec.Struct, frozen=True):
    """Device nodes that exist, by their path under /dev, and those of the DRM that are a GPU's, by its PCI bus id.

    Bus ids are as NVML writes them. Links in /dev/dri/by-path are among the nodes, with the numbers of what they lead to.
    `faults` is why containers must not be given a node, by its path; such a node is not among the others. `searched` has the
    roots whose dev/ was searched, as this process sees them.
    """

    nodes: Mapping[str, DeviceFile] = msgspec.field(default_factory=dict)
    drm: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    faults: Mapping[str, str] = msgspec.field(default_factory=dict)
    searched: tuple[str, ...] = ("/",)
