"""Regular files: replace our files atomically, and read files of other programs with a bound on size and kind."""

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}

_NULL = os.makedev(1, 3)  # the device number of /dev/null (Linux, Documentation/admin-guide/devices.txt)


class UnfitFileError(OSError):
    """The path names no regular file or a too large file; `strerror` has the reason, as in "is a directory"."""


def kind(mode: int) -> str:
    """The kind of a file by its mode (st_mode), in words, as in "is a directory"."""
    return f"is {_KINDS.get(stat.S_IFMT(mode), 'not a regular file')}"


def open_file(path: str | Path, *, links: bool = True, null: bool = False) -> BinaryIO:
    """Open a regular file for reading. Blocks, but never for the writer of a pipe.

    Args:
        path: its name.
        links: whether the last part of the name may be a symbolic link.
        null: whether /dev/null counts as an empty file.

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
    """The rest of an open file, up to `most` bytes. Raises UnfitFileError if there is more."""
    # st_size proves nothing: the file may grow, and files of /proc and /sys have the size 0.
    read = stream.read(most + 1)
    if len(read) > most:
        raise _too_large(most)
    return read


def read_file(path: str | Path, most: int, *, links: bool = True) -> bytes:
    """The content of a regular file of up to `most` bytes. Blocks, but never for the writer of a pipe.

    Raises:
        UnfitFileError: it is another kind of file, or larger.
        OSError: it cannot be read.
    """
    with open_file(path, links=links) as stream:
        return content(stream, most)


def require_file(path: Path, most: int) -> None:
    """Raises as `read_file` does, without reading the file; OSError if there is no file."""
    there = path.stat()
    if not stat.S_ISREG(there.st_mode):
        raise UnfitFileError(errno.EINVAL, kind(there.st_mode))
    if there.st_size > most:
        raise _too_large(most)


def _too_large(most: int) -> UnfitFileError:
    return UnfitFileError(errno.EFBIG, f"is larger than {most} bytes, the most that such a file has")


def replace_file(file: Path, content: bytes, mode: int, *, durable: bool = False) -> None:
    """Replace a file atomically: a reader gets all of the former content or all of the new content. Blocks.

    The new content is first written to another file in the directory. Its name is a dot, the name of the file, and a random
    ending.
    `durable`: the content is on disk when this returns.

    Raises:
        OSError: the file cannot be written. The former file stays, and the new file is removed.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            if durable:
                os.fsync(stream.fileno())
        Path(temporary).replace(file)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise


def leftovers(directory: Path, names: Iterable[str]) -> Iterator[Path]:
    """The temporary files of processes that were killed while they replaced files of these names. Blocks.

    If a process replaces a file now, the results include its temporary file.

    Raises:
        OSError: the directory cannot be read.
    """
    temporary = re.compile(rf"\.({'|'.join(map(re.escape, names))})\.[a-z0-9_]{{8}}")  # as tempfile makes names
    with os.scandir(directory) as entries:
        for entry in entries:
            if temporary.fullmatch(entry.name) and stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                yield Path(entry.path)
