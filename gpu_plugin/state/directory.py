"""Small files in the state directory, which outlive this process. Each write replaces the whole file or changes nothing.

If the directory cannot be written or a file cannot be read, the error is logged once, and only stored state is lost. Anything
under a file's name that is not a valid file is moved aside, so that the next write produces a readable file.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.runtime.regular_file import UnfitFileError, kind, leftovers, read_file, replace_file

T = TypeVar("T")

log = logging.getLogger(__name__)

MODE = 0o600

CORRUPT = (".corrupt", *(f".corrupt.{number}" for number in range(1, 10)))  # suffixes for the name of an invalid file
MAX_BYTES = 64 * 1024 * 1024  # limit for a file; 60,000 devices take 16 MiB


def require_directory(path: Path) -> None:
    """Raise ConfigError if the path, or a directory above it, exists and is not a directory. Blocks."""
    for each in (path, *path.parents):
        try:
            if not stat.S_ISDIR(each.stat().st_mode):
                where = "" if each == path else f"{each} "
                raise ConfigError(
                    f"--state-dir: {path}: {where}is not a directory, so no file can be stored there: name another directory"
                )
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # the error is logged where the directory is used
            pass
        return


def require_apart(path: Path, socket_dir: Path) -> None:
    """Raise ConfigError if the state directory is the device plugin directory, also under another path. Blocks."""
    same = os.path.realpath(path) == os.path.realpath(socket_dir)
    with suppress(OSError):  # a directory does not exist yet
        same = same or path.samefile(socket_dir)
    if same:
        raise ConfigError(
            f"--state-dir: {path} is the device plugin directory, from which the kubelet removes all files when it starts: "
            "name another directory"
        )


class StateDirectory:
    """Reads and writes JSON files in one directory. Every call blocks as long as the disk does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._refused: set[str] = set()
        self._unreadable: set[str] = set()

    def tidy(self, names: Sequence[str]) -> None:
        """Prepare the files of these names before the first read or write. Only the daemon that locked the directory may call it.

        Removes unfinished copies of a killed process. Moves aside a link, a pipe or a directory. Replaces a file with more
        hard links by a copy, so that writes do not change the other names' file. Logs a warning if users other than the owner
        can write in the directory.
        """
        try:
            _check_owner_and_mode(self.path)
            for leftover in leftovers(self.path, names):
                leftover.unlink(missing_ok=True)
                log.debug("%s: removed the unfinished copy of a killed process", leftover)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be listed: %s", self.path, error)
        for name in names:
            file = self.path / name
            try:
                _require_own_file(file)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._log_unreadable(file, error, keep_aside(file))

    def read(self, name: str, shape: type[T]) -> T | None:
        """Return the content that `write` wrote under this name; None if there is no file or it cannot be read."""
        file = self.path / name
        try:
            # Decode UTF-8 first: msgspec ignores unknown keys, even keys with invalid UTF-8.
            content = msgspec.json.decode(bounded(file).decode(), type=shape)
        except FileNotFoundError:
            return None
        except (UnfitFileError, ValueError, RecursionError) as error:  # invalid UTF-8 or invalid JSON
            self._log_unreadable(file, error, keep_aside(file))
            return None
        except OSError as error:
            self._log_unreadable(file, error, "")
            return None
        self._unreadable.discard(name)
        return content

    def _log_unreadable(self, file: Path, error: Exception, kept: str) -> None:
        if file.name not in self._unreadable:
            self._unreadable.add(file.name)
            reason = error.strerror if isinstance(error, OSError) else error
            log.error("%s cannot be read, so its content is lost%s: %s", file, kept, reason)

    def write(self, name: str, content: object) -> bool:
        """Replace the file's content atomically and durably, with mode 0600. Return True on success."""
        file = self.path / name
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
            replace_file(file, text, MODE, durable=True)
        except (OSError, UnicodeError) as error:  # JSON cannot contain a path with invalid UTF-8
            if name not in self._refused:
                self._refused.add(name)
                log.error("%s cannot be written, so its new content would be lost at a restart: %s", file, error)  # noqa: TRY400
            return False
        if name in self._refused:
            self._refused.discard(name)
            log.info("%s can be written again", file)
        return True


Identity = tuple[int, int, int, int]
"""Identifies a file and its last write: device, inode, size in bytes, and modification time in ns."""


def identity(file: Path) -> Identity | None:
    """Return the identity of the file; None if it does not exist or stat() fails. Blocks as long as the disk does."""
    try:
        there = os.stat(file, follow_symlinks=False)  # noqa: PTH116 - cheaper than Path.stat
    except OSError:
        return None
    return there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns


def is_named(path: Path, there: os.stat_result) -> bool:
    """Return True if the path still refers to the opened file `there`, which may have been removed or renamed since."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), there)  # noqa: PTH116 - cheaper than Path.stat
    except OSError:
        return False


def open_own(file: Path, flags: int) -> int:
    """Open a file of this plugin with `flags` (O_*) and return the descriptor, which the caller closes.

    Does not wait for the other end of a pipe. Raises OSError if the file cannot be opened or is not a regular file.
    """
    descriptor = os.open(file, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, MODE)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UnfitFileError(errno.EINVAL, kind(mode))
    return descriptor


def set_aside(file: Path, fits: Callable[[int], bool] = stat.S_ISREG) -> None:
    """Move aside a file of the wrong type, such as a link, a pipe or a directory, and log a warning. Blocks.

    `fits` returns True for the mode of the right type.
    """
    try:
        mode = file.lstat().st_mode
    except OSError:
        return
    if not fits(mode) and (kept := keep_aside(file)):
        log.warning("%s %s and not a file of this plugin%s", file, kind(mode), kept)


def _check_owner_and_mode(directory: Path) -> None:
    """Log a warning if other users can write in the directory, or own it. Raises OSError if stat() fails."""
    there = directory.stat()
    mode = stat.S_IMODE(there.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        log.warning(
            "%s has the mode %04o: users other than its owner can change the stored state of GPUs, including cordons, and "
            "replace the socket for orders to this plugin; remove that right with chmod go-w %s, or set another --state-dir",
            directory,
            mode,
            directory,
        )
    elif there.st_uid not in {0, os.geteuid()}:
        log.warning(
            "%s belongs to uid %d, who can change the stored state of GPUs; it should belong to uid %d",
            directory,
            there.st_uid,
            os.geteuid(),
        )


def _require_own_file(file: Path) -> None:
    """Replace a file with more hard links by a copy. Raises OSError if it is not a regular file or cannot be replaced."""
    there = file.lstat()
    if not stat.S_ISREG(there.st_mode):
        raise UnfitFileError(errno.EINVAL, kind(there.st_mode))
    if there.st_nlink > 1:
        replace_file(file, bounded(file), MODE, durable=True)
        log.warning("%s had %d hard links; it is now a separate file", file, there.st_nlink)


def keep_aside(file: Path) -> str:
    """Rename an invalid file, so that the next write does not replace it. Return a text with the new name; empty on failure.

    The new name has the first suffix of `CORRUPT` to which the file can be renamed.
    """
    for end in CORRUPT:
        aside = file.with_name(file.name + end)
        try:
            file.replace(aside)
        except OSError:  # for example, because a directory has this name
            continue
        return f" (kept as {aside})"
    return ""


def copy_aside(file: Path) -> str:
    """Copy an invalid file to the first name of `keep_aside`. Return a text with that name, or with the reason without a copy."""
    aside = file.with_name(file.name + CORRUPT[0])
    try:
        replace_file(aside, bounded(file), MODE)
    except OSError as error:
        return f" (without a copy: {error.strerror or error})"
    return f" (kept as {aside})"


def bounded(file: Path) -> bytes:
    """Return the content of a file. Blocks. Raises UnfitFileError if it is not a regular file, and OSError if that fails."""
    return read_file(file, MAX_BYTES, links=False)
