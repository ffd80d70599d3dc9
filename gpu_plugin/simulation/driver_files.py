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

# Structures of 64-bit files (elf.h)
_HEADER = "<16sHHIQQQIHHHHHH"
_PROGRAM_HEADER = "<IIQQQQQQ"


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
    # DT_STRTAB, DT_STRSZ, DT_SONAME and DT_NULL
    tags = [(5, at), (10, len(strings)), *([(14, 1)] if soname else []), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    size = dynamic_at + len(dynamic)
    sizes = (struct.calcsize(_HEADER), struct.calcsize(_PROGRAM_HEADER))
    # 64 bits, little-endian, version 1; then ET_DYN, and EM_AARCH64 or EM_X86_64
    identity = (b"\x7fELF\x02\x01\x01", 3, 183 if machine == "aarch64" else 62, 1)
    header = struct.pack(_HEADER, *identity, 0, sizes[0], 0, 0, *sizes, 2, 0, 0, 0)
    # PT_LOAD and PT_DYNAMIC, both with PF_R
    load = struct.pack(_PROGRAM_HEADER, 1, 4, 0, 0, 0, size, size, 0x1000)
    where = struct.pack(_PROGRAM_HEADER, 2, 4, dynamic_at, dynamic_at, dynamic_at, *[len(dynamic)] * 2, 8)
    return (header + load + where + strings).ljust(dynamic_at, b"\0") + dynamic
