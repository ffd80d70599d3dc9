"""Files that an operator names, read with a bound: a slip of the finger names a disk image, a pipe or a directory."""

import errno
import os
import stat
from pathlib import Path


class UnfitFileError(OSError):
    """What is there is not a regular file, or larger than any such file is; `strerror` says which."""


def read_file(path: Path, most: int) -> bytes:
    """The content of a regular file of up to `most` bytes. Blocks, but never for somebody to write to a pipe.

    Raises:
        UnfitFileError: it is another kind of file, or larger.
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        _require(os.fstat(descriptor), most)
        content = stream.read(most + 1)
    if len(content) > most:  # it grew, or is one whose size the kernel does not tell
        raise _too_large(most)
    return content


def require_file(path: Path, most: int) -> None:
    """Raises as `read_file` does, without reading the file; OSError where it is not there."""
    _require(path.stat(), most)


def _require(there: os.stat_result, most: int) -> None:
    if stat.S_ISDIR(there.st_mode):
        raise UnfitFileError(errno.EISDIR, "is a directory")
    if not stat.S_ISREG(there.st_mode):
        raise UnfitFileError(errno.EINVAL, "is not a regular file")
    if there.st_size > most:
        raise _too_large(most)


def _too_large(most: int) -> UnfitFileError:
    return UnfitFileError(errno.EFBIG, f"is larger than {most} bytes, the most that such a file has")
