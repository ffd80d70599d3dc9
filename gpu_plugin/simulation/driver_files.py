"""Makes a driver's user-space files for a simulated node, with the layout of the .run installer, to put into containers."""

import os
import struct
from pathlib import Path

from gpu_plugin.runtime.regular_file import replace_file

DIRECTORY = "driver-root"  # The directory of these files, below a simulated node's state directory

# SONAMEs of libraries of all driver versions
_LIBRARIES = (
    *("libcuda.so.1", "libcudadebugger.so.1", "libnvcuvid.so.1", "libnvidia-allocator.so.1", "libnvidia-cfg.so.1"),
    *("libnvidia-encode.so.1", "libnvidia-ml.so.1", "libnvidia-nvvm.so.4", "libnvidia-opencl.so.1"),
    *("libnvidia-opticalflow.so.1", "libnvidia-ptxjitcompiler.so.1"),
)

_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine, EM_X86_64 and EM_AARCH64 (elf.h)

# Structures of 64-bit files, and constants, from elf.h
_HEADER = "<16sHHIQQQIHHHHHH"
_PROGRAM_HEADER = "<IIQQQQQQ"
_DYNAMIC = "<qQ"
_ET_DYN = 3
_PT_LOAD = 1
_PT_DYNAMIC = 2
_DT_NULL = 0
_DT_STRTAB = 5
_DT_STRSZ = 10
_DT_SONAME = 14
_READ = 4  # PF_R
_PAGE = 0x1000  # bytes


def make(root: Path, version: str) -> Path:
    """Make the files of this driver version below `root`, remove the files of other versions, and return `root`.

    Its nvidia-smi is a script that prints that a simulated node has no nvidia-smi. Raises OSError if the files cannot be made.
    """
    libraries, programs = root / "usr/lib64", root / "usr/bin"
    root.mkdir(parents=True, exist_ok=True)
    for directory in (root, root / "usr", libraries, programs):
        directory.mkdir(exist_ok=True)
        # regardless of the umask: containers must not get files that other users may change
        directory.chmod(directory.stat().st_mode & 0o755)
    wanted = {f"{soname.rpartition('.')[0]}.{version}": soname for soname in _LIBRARIES}
    for path in libraries.iterdir():
        if path.name not in wanted and path.name not in wanted.values():
            path.unlink()
    for name, soname in wanted.items():
        _put(libraries / name, shared_library(soname), 0o644)
        link = libraries / soname
        if not link.is_symlink() or link.readlink() != Path(name):
            link.unlink(missing_ok=True)
            link.symlink_to(name)
    script = f"#!/bin/sh\necho 'a simulated node with driver {version} has no nvidia-smi'\nexit 1\n".encode()
    _put(programs / "nvidia-smi", script, 0o755)
    return root


def _put(file: Path, content: bytes, mode: int) -> None:
    if not file.exists() or file.read_bytes() != content:
        replace_file(file, content, mode)


def shared_library(soname: str, machine: str = os.uname().machine) -> bytes:
    """Return a 64-bit ELF shared library (elf(5)) with this SONAME; empty for no SONAME. `machine` is as in uname(2).

    It has no code and no symbols. Readers of its headers cannot distinguish it from a real library.
    """
    strings = b"\0" + soname.encode() + b"\0"
    at = struct.calcsize(_HEADER) + 2 * struct.calcsize(_PROGRAM_HEADER)
    dynamic_at = (at + len(strings) + 7) & ~7
    tags = [(_DT_STRTAB, at), (_DT_STRSZ, len(strings))]
    if soname:
        tags.append((_DT_SONAME, 1))
    dynamic = b"".join(struct.pack(_DYNAMIC, *tag) for tag in [*tags, (_DT_NULL, 0)])
    size = dynamic_at + len(dynamic)
    header = struct.pack(
        _HEADER,
        b"\x7fELF\x02\x01\x01",  # 64 bits, little-endian, version 1
        _ET_DYN,
        _MACHINES.get(machine, _MACHINES["x86_64"]),
        1,
        0,
        struct.calcsize(_HEADER),
        0,
        0,
        struct.calcsize(_HEADER),
        struct.calcsize(_PROGRAM_HEADER),
        *(2, 0, 0, 0),
    )
    load = struct.pack(_PROGRAM_HEADER, _PT_LOAD, _READ, 0, 0, 0, size, size, _PAGE)
    where = struct.pack(_PROGRAM_HEADER, _PT_DYNAMIC, _READ, dynamic_at, dynamic_at, dynamic_at, *[len(dynamic)] * 2, 8)
    content = header + load + where + strings
    return content.ljust(dynamic_at, b"\0") + dynamic
