"""Shared libraries that have a name and nothing else: what stands for a driver's libraries on a simulated node."""

import os
import struct

_MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine, EM_X86_64 and EM_AARCH64 (elf.h)
_HEADER, _PROGRAM_HEADER, _DYNAMIC = "<16sHHIQQQIHHHHHH", "<IIQQQQQQ", "<qQ"
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_STRTAB, _DT_STRSZ, _DT_SONAME = 0, 5, 10, 14
_ET_DYN = 3
_READ, _PAGE = 4, 0x1000


def shared_library(soname: str, machine: str = os.uname().machine) -> bytes:
    """A shared library of 64 bits with this SONAME, empty for none, as ELF has it (elf(5)); `machine` as uname(2) says.

    It has no code and no symbols; readers of its headers cannot tell it from a real one.
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
        b"\x7fELF\x02\x01\x01",  # 64 bits, least byte first, version 1
        _ET_DYN,
        _MACHINES.get(machine, _MACHINES["x86_64"]),
        1,
        0,
        struct.calcsize(_HEADER),
        0,
        0,
        struct.calcsize(_HEADER),
        struct.calcsize(_PROGRAM_HEADER),
        2,
        0,
        0,
        0,
    )
    load = struct.pack(_PROGRAM_HEADER, _PT_LOAD, _READ, 0, 0, 0, size, size, _PAGE)
    where = struct.pack(_PROGRAM_HEADER, _PT_DYNAMIC, _READ, dynamic_at, dynamic_at, dynamic_at, *[len(dynamic)] * 2, 8)
    content = header + load + where + strings
    return content.ljust(dynamic_at, b"\0") + dynamic
