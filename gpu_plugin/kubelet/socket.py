"""The names of our sockets in the kubelet's device plugin directory, and the removal of sockets of ended processes."""

import ctypes
import errno
import logging
import os
import socket
import stat
import struct
from contextlib import closing
from functools import cache
from pathlib import Path

from gpu_plugin.config.socket_path import room
from gpu_plugin.runtime.printable import excerpts

log = logging.getLogger(__name__)

PREFIX = "gpu-plugin-"

# A random part of the names of this process's sockets: an older process that ends must not affect our registration.
INSTANCE = os.urandom(4).hex()


# Of linux/stat.h; struct statx has stx_mask (u32) at 0, stx_ino (u64) at 32, and stx_btime (s64 seconds, u32 nanoseconds) at 80.
_AT_FDCWD = -100
_BASIC_STATS_AND_BTIME = 0xFFF
_BTIME = 0x800
_SIZE = 256
_STATX = struct.Struct("=I28xQ40xqI")


def socket_path(directory: Path, resource: str, incarnation: int, instance: str = INSTANCE) -> Path:
    """Return the path of a resource's socket, which is different for each incarnation.

    The resource's name is shortened if the path would be too long for a socket address.

    Raises:
        ValueError: even the path without the resource's name is too long.
    """
    tail = f"-{instance}-{incarnation}.sock"
    left = room(f"{directory}/{PREFIX}{tail}")
    if left < 0:
        raise ValueError(f"{directory} is too long a path for a unix socket")
    name = resource.rpartition("/")[2][:left]
    return directory / f"{PREFIX}{name}{tail}"


def remove_stale(directory: Path) -> list[str]:
    """Remove sockets with our prefix that have no listener, and return their names. All other sockets stay."""
    removed: list[str] = []
    stay: list[str] = []
    trouble = ""
    try:
        entries = [
            entry for entry in os.scandir(directory) if entry.name.startswith(PREFIX) and entry.name.endswith(".sock")
        ]
    except OSError:
        return []
    for entry in entries:
        try:
            if _dead(entry.path):
                Path(entry.path).unlink(missing_ok=True)
                removed.append(entry.name)
        except OSError as error:
            stay.append(entry.name)
            trouble = trouble or error.strerror or str(error)
    if stay:
        log.warning(
            "%s: %d stale %s with this plugin's prefix cannot be removed: %s (%s)",
            directory,
            len(stay),
            "file" if len(stay) == 1 else "files",
            excerpts(sorted(stay)),
            trouble,
        )
    return removed


def _dead(path: str) -> bool:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


Identity = tuple[int, int, int]


def identity(path: Path) -> Identity | None:
    """Return the identity of the socket at `path`: device, inode and time of creation. None if there is no socket.

    The time is needed because an inode number may be used again. The identity stays the same if the socket's mode or times
    change, if it gets another link, or if it is renamed and renamed back.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - faster, and it is called often
    except OSError:
        return None
    return (status.st_dev, status.st_ino, _birth(path, status)) if stat.S_ISSOCK(status.st_mode) else None


def _birth(path: Path, status: os.stat_result) -> int:
    """Return when the file was made, in nanoseconds, or when its status last changed if the file system does not store it."""
    call = _statx()
    if call is not None:
        buffer = ctypes.create_string_buffer(_SIZE)
        if call(_AT_FDCWD, os.fsencode(path), 0, _BASIC_STATS_AND_BTIME, buffer) == 0:
            mask, inode, seconds, nanoseconds = _STATX.unpack_from(buffer)
            if mask & _BTIME and inode == status.st_ino:
                return int(seconds * 1_000_000_000 + nanoseconds)
    return status.st_ctime_ns


@cache
def _statx() -> "ctypes._FuncPointer | None":
    """Return statx(2) of the C library, which Python lacks before 3.15; None if the C library lacks it."""
    return getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
