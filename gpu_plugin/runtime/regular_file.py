"""Regular files that others wrote, read with a bound: under their names may be a disk image, a pipe or a directory."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}

_NULL = os.makedev(1, 3)
"""The device number of /dev/null (Linux, Documentation/admin-guide/devices.txt)."""


class UnfitFileError(OSError):
    """What is there is not a regular file, or larger than any such file is; `strerror` says which, as in "is a directory"."""


def kind(mode: int) -> str:
    """What has this mode (st_mode), in words, as in "is a directory"."""
    return f"is {_KINDS.get(stat.S_IFMT(mode), 'not a regular file')}"


def open_file(path: str | Path, *, links: bool = True, null: bool = False) -> BinaryIO:
    """A regular file, open to be read. Blocks, but never for somebody to write to a pipe.

    Args:
        path: its name.
        links: whether the last part of the name may be a symbolic link.
        null: whether /dev/null will do as well, which is as an empty file.

    Raises:
        UnfitFileError: it is not a regular file.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:  # a link, or links that go in circles; a socket, or a device
            there = Path(path).stat(follow_symlinks=links)
            if not stat.S_ISREG(there.st_mode):
                raise UnfitFileError(error.errno, kind(there.st_mode)) from None
        raise
    there = os.fstat(descriptor)
    if stat.S_ISREG(there.st_mode) or (null and stat.S_ISCHR(there.st_mode) and there.st_rdev == _NULL):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UnfitFileError(errno.EINVAL, kind(there.st_mode))


def content(stream: BinaryIO, most: int) -> bytes:
    """What a file that is open holds, from where it stands, up to `most` bytes. Raises UnfitFileError where that is more."""
    # Its size is no proof: it may grow, or be one of /proc or /sys, whose size the kernel does not tell.
    read = stream.read(most + 1)
    if len(read) > most:
        raise _too_large(most)
    return read


def read_file(path: str | Path, most: int, *, links: bool = True) -> bytes:
    """The content of a regular file of up to `most` bytes. Blocks, but never for somebody to write to a pipe.

    Raises:
        UnfitFileError: it is another kind of file, or larger.
        OSError: it cannot be read.
    """
    with open_file(path, links=links) as stream:
        return content(stream, most)


def require_file(path: Path, most: int) -> None:
    """Raises as `read_file` does, without reading the file; OSError where it is not there."""
    there = path.stat()
    if not stat.S_ISREG(there.st_mode):
        raise UnfitFileError(errno.EINVAL, kind(there.st_mode))
    if there.st_size > most:
        raise _too_large(most)


def _too_large(most: int) -> UnfitFileError:
    return UnfitFileError(errno.EFBIG, f"is larger than {most} bytes, the most that such a file has")
