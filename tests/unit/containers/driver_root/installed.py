"""Driver roots for tests: files and links where distributions and installers put them."""

import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpu_plugin.simulation.driver_files import shared_library

VERSION = "550.54.15"

SONAMES = {
    "libcuda.so": "libcuda.so.1",
    "libnvidia-ml.so": "libnvidia-ml.so.1",
    "libnvidia-allocator.so": "libnvidia-allocator.so.1",
}


def put(root: Path, path: str, content: str | bytes = "x") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def link(root: Path, path: str, target: str) -> Path:
    made = root / path
    made.parent.mkdir(parents=True, exist_ok=True)
    made.symlink_to(target)
    return made


class Root:
    """The root directory of a driver installation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return str(self.path)

    def write(self, path: str, content: bytes = b"x") -> Path:
        return put(self.path, path, content)

    def link(self, path: str, target: str) -> Path:
        return link(self.path, path, target)

    def links(self, targets: Mapping[str, str]) -> None:
        for path, target in targets.items():
            self.link(path, target)

    def listen(self, path: str) -> Path:
        """A socket. It is bound from within its directory, since a path to a socket may have 107 bytes."""
        place = self.path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        here = os.open(place.parent, os.O_PATH)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{here}/{place.name}")
        os.close(here)
        return place

    def library(self, path: str, soname: str | None = None, machine: str = "x86_64") -> Path:
        """A library. Without `soname`, its SONAME comes from the file's name."""
        name = path.rpartition("/")[2]
        base = name.partition(".so.")[0] + ".so"
        return self.write(path, shared_library(SONAMES.get(base, f"{base}.0") if soname is None else soname, machine))

    def driver(
        self, directory: str, version: str = VERSION, names: Iterable[str] = ("libcuda.so", "libnvidia-ml.so")
    ) -> None:
        for name in names:
            self.library(f"{directory}/{name}.{version}")


def ld_cache_of(paths: Sequence[str], before: bytes = b"") -> bytes:
    """An ld.so.cache in the format of glibc 2.2 and later, after the header `before`."""
    header = 48 + 24 * len(paths)
    names, entries = b"", b""
    for path in paths:
        name = os.fsencode(path)
        at = header + len(names)
        entries += struct.pack("<iIIIQ", 0x0303, at + name.rfind(b"/") + 1, at, 0, 0)
        names += name + b"\0"
    start = b"glibc-ld.so.cache1.1" + struct.pack("<II", len(paths), len(names)) + b"\2" + bytes(19)
    return before + bytes(-len(before) % 8) + start + entries + names


def old_ld_cache_of(paths: Sequence[str], both: Sequence[str] = ()) -> bytes:
    """An ld.so.cache in the older format; with the newer one behind it if `both` has paths for that."""
    names, entries = b"", b""
    for path in paths:
        name = os.fsencode(path)
        entries += struct.pack("<iII", 3, len(names) + name.rfind(b"/") + 1, len(names))
        names += name + b"\0"
    start = b"ld.so-1.7.0\0" + struct.pack("<I", len(paths)) + entries
    return ld_cache_of(both, start) if both else start + names
