"""A file of the state log: its allocated space, and writes at an offset that do not wait for the disk."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from gpu_plugin.state.directory import is_named, open_own, set_aside


class LogFile:
    """One of the two files of the state log.

    Attributes:
        descriptor: of the open file; -1 while no file is open, so that each call on it raises OSError.
        end: the end of the records in the file.
        used: the end of the bytes that may not be zero.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        self.end = self.used = 0

    @property
    def in_place(self) -> bool:
        """True if the open file still has its name and its bytes."""
        try:
            there = os.fstat(self.descriptor)
        except OSError:
            return False
        return there.st_size >= self.used and is_named(self.path, there)

    def open(self) -> bool:
        """Open the file that has the name now, or create it. Return True if it has lost records. Raises OSError."""
        gone = self.descriptor >= 0
        self.close()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        set_aside(self.path)
        self.descriptor = open_own(self.path, os.O_RDWR | os.O_CREAT)
        size = os.fstat(self.descriptor).st_size
        if not gone and size >= self.used:
            return False
        self.end, self.used = 0, size
        return True

    def close(self) -> None:
        """Close the file if it is open."""
        with suppress(OSError):
            os.close(self.descriptor)
        self.descriptor = -1

    def allocate(self, size: int) -> bool:
        """Allocate the bytes up to `size`. Return False if the file system cannot do that. Raises OSError if the disk is full."""
        present = os.fstat(self.descriptor).st_size
        try:
            if present:
                os.posix_fallocate(self.descriptor, 0, min(size, present))  # the file may have holes
            if size > present:
                # Only the bytes after the present size: if a tmpfs has no space for a whole range, it frees the allocated part.
                os.posix_fallocate(self.descriptor, present, size - present)
        except OSError as error:
            if error.errno in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
                return False
            raise
        return True

    def write(self, start: int, content: bytes) -> None:
        """Write at the offset `start`, and overwrite the rest with zeros. Raises OSError if not everything is written."""
        end = start + len(content)
        padded = content + bytes(max(0, self.used - end))
        self.used = max(self.used, end)
        if os.pwrite(self.descriptor, padded, start) < len(padded):
            raise OSError(errno.ENOSPC, "the write was incomplete")
        self.end = self.used = end

    def empty(self, size: int) -> None:
        """Overwrite the file with zeros, and shorten it to at most `size` bytes. Raises OSError."""
        self.used = min(size, os.fstat(self.descriptor).st_size)
        os.ftruncate(self.descriptor, self.used)
        self.write(0, b"")
