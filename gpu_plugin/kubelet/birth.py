"""When a file was made: statx(2), which Python does not have before 3.15."""

import ctypes
import os
import struct
from functools import cache
from pathlib import Path

_AT_FDCWD = -100
_BASIC_STATS_AND_BTIME = 0xFFF
_BTIME = 0x800
_SIZE = 256
_MASK_AT, _INODE_AT, _BIRTH_AT = 0, 32, 80
"""struct statx of linux/stat.h: stx_mask (u32), stx_ino (u64), stx_btime (s64 seconds, u32 nanoseconds)."""


@cache
def _statx() -> "ctypes._FuncPointer | None":
    return getattr(ctypes.CDLL(None, use_errno=True), "statx", None)


def birth(path: Path, status: os.stat_result) -> int:
    """When the file of this status was made, in nanoseconds; when it last changed where the file system does not say."""
    call = _statx()
    if call is not None:
        told = ctypes.create_string_buffer(_SIZE)
        if call(_AT_FDCWD, os.fsencode(path), 0, _BASIC_STATS_AND_BTIME, told) == 0:
            (mask,) = struct.unpack_from("=I", told, _MASK_AT)
            (inode,) = struct.unpack_from("=Q", told, _INODE_AT)
            seconds, nanoseconds = struct.unpack_from("=qI", told, _BIRTH_AT)
            if mask & _BTIME and inode == status.st_ino:
                return int(seconds * 1_000_000_000 + nanoseconds)
    return status.st_ctime_ns
