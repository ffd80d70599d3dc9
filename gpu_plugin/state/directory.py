"""What outlives this process: small files in the state directory, each written whole or not at all.

A directory that cannot be written or a file that cannot be read is said once and costs nothing but memory of the past. What
stands under a file's name and cannot be that file is set aside, so that the next write can be read again.
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

CORRUPT = (".corrupt", *(f".corrupt.{number}" for number in range(1, 10)))
"""Endings of the name under which a file that cannot be understood is kept: the first that is not in the way itself."""

MAX_BYTES = 64 * 1024 * 1024
"""More than any of the files ever is: 60,000 devices take 16 MiB."""


def require_directory(path: Path) -> None:
    """Raises ConfigError where no state directory can be made: something else bears its name, or that of one above it. Blocks."""
    for each in (path, *path.parents):
        try:
            if not stat.S_ISDIR(each.stat().st_mode):
                where = "" if each == path else f"{each} "
                raise ConfigError(
                    f"--state-dir: {path}: {where}is not a directory, and nothing can be kept there: name another one"
                )
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # that it cannot be used is said where it is
            pass
        return


def require_apart(path: Path, socket_dir: Path) -> None:
    """Raises ConfigError where the state directory is the device plugin directory, by whatever name. Blocks."""
    same = os.path.realpath(path) == os.path.realpath(socket_dir)
    with suppress(OSError):  # one of them is still to be made
        same = same or path.samefile(socket_dir)
    if same:
        raise ConfigError(
            f"--state-dir: {path} is the device plugin directory, from which the kubelet removes all files when it starts: "
            "name another one"
        )


class StateDirectory:
    """Reads and writes JSON files below one directory. Every call blocks for as long as the disk does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._refused: set[str] = set()
        self._unreadable: set[str] = set()

    def tidy(self, names: Sequence[str]) -> None:
        """Puts right what is there under these names before anything is read or written. Only who owns the directory may.

        Copies that a killed process had not finished are removed. A link, a pipe or a directory is set aside. A file with
        further hard links is replaced by a copy of its own, so that no write goes through to what it is linked to. That
        others than the owner may write in the directory is said.
        """
        try:
            _check_owner_and_mode(self.path)
            for leftover in leftovers(self.path, names):
                leftover.unlink(missing_ok=True)
                log.debug("%s: the unfinished copy of a process that was killed is removed", leftover)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be looked through: %s", self.path, error)
        for name in names:
            file = self.path / name
            try:
                _require_own_file(file)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._log_unreadable(file, error, keep_aside(file))

    def read(self, name: str, shape: type[T]) -> T | None:
        """The content that `write` wrote under this name; None where there is nothing, or nothing that can be read."""
        file = self.path / name
        try:
            # As text, since msgspec passes over keys it does not know, even such as are no text.
            content = msgspec.json.decode(bounded(file).decode(), type=shape)
        except FileNotFoundError:
            return None
        except (UnfitFileError, ValueError, RecursionError) as error:  # text that is no UTF-8, or no such JSON
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
            log.error("%s cannot be read, what it remembered is lost%s: %s", file, kept, reason)

    def write(self, name: str, content: object) -> bool:
        """Replaces the file's content atomically and durably, mode 0600. Returns whether that worked."""
        file = self.path / name
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
            replace_file(file, text, MODE, durable=True)
        except (OSError, UnicodeError) as error:  # a path that is no UTF-8 is not text for JSON
            if name not in self._refused:
                self._refused.add(name)
                log.error("%s cannot be written; a restart will not remember what is known now: %s", file, error)  # noqa: TRY400
            return False
        if name in self._refused:
            self._refused.discard(name)
            log.info("%s can be written again", file)
        return True


Identity = tuple[int, int, int, int]
"""What tells a file, and each time it was written, from any other: device, inode, bytes, and when it was written, in ns."""


def identity(file: Path) -> Identity | None:
    """The identity of the file of this name; None where there is none, or it cannot be read. Blocks as long as the disk does."""
    try:
        there = os.stat(file, follow_symlinks=False)  # noqa: PTH116 - as cheap as can be
    except OSError:
        return None
    return there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns


def is_named(path: Path, there: os.stat_result) -> bool:
    """Whether the path still means what was opened there: it may have been removed or renamed since."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), there)  # noqa: PTH116 - as cheap as can be
    except OSError:
        return False


def open_own(file: Path, flags: int) -> int:
    """A descriptor of a file of ours, to be written as `flags` (O_*) say; whoever asked closes it. Never waits for a pipe.

    Raises OSError where it cannot be opened, or is no regular file.
    """
    descriptor = os.open(file, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, MODE)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UnfitFileError(errno.EINVAL, kind(mode))
    return descriptor


def set_aside(file: Path, fits: Callable[[int], bool] = stat.S_ISREG) -> None:
    """Puts what stands under a file's name and is none, such as a link, a pipe or a directory, aside, and says so. Blocks.

    `fits` says whether a mode is that of what should stand there.
    """
    try:
        mode = file.lstat().st_mode
    except OSError:
        return
    if not fits(mode) and (kept := keep_aside(file)):
        log.warning("%s %s and no file of this plugin%s", file, kind(mode), kept)


def _check_owner_and_mode(directory: Path) -> None:
    """Says where others may write in the directory. Raises OSError where it cannot be looked at."""
    there = directory.stat()
    mode = stat.S_IMODE(there.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        log.warning(
            "%s has the mode %04o: others than its owner can change what this plugin remembers of GPUs, cordons included, and "
            "whose orders it takes; remove that right with chmod go-w %s, or name another --state-dir",
            directory,
            mode,
            directory,
        )
    elif there.st_uid not in {0, os.geteuid()}:
        log.warning(
            "%s belongs to uid %d, who can change what this plugin remembers of GPUs; it should belong to uid %d",
            directory,
            there.st_uid,
            os.geteuid(),
        )


def _require_own_file(file: Path) -> None:
    """Makes sure that nothing else is written with this file. Raises OSError where it is none, or cannot be one's own."""
    there = file.lstat()
    if not stat.S_ISREG(there.st_mode):
        raise UnfitFileError(errno.EINVAL, kind(there.st_mode))
    if there.st_nlink > 1:
        replace_file(file, bounded(file), MODE, durable=True)
        log.warning("%s had %d hard links; it is now a separate file", file, there.st_nlink)


def keep_aside(file: Path) -> str:
    """Puts a file that makes no sense where the next write does not replace it, for people to look at. Says where."""
    for end in CORRUPT:
        aside = file.with_name(file.name + end)
        try:
            file.replace(aside)
        except OSError:  # a directory has that name, say
            continue
        return f" (kept as {aside})"
    return ""


def bounded(file: Path) -> bytes:
    """The content of one of these files. Blocks. Raises UnfitFileError where it is none, and OSError where it cannot be read."""
    return read_file(file, MAX_BYTES, links=False)
