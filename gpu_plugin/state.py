"""What outlives this process: small files in the state directory, each written whole or not at all.

A directory that cannot be written or a file that cannot be read is said once and costs nothing but memory of the past.
"""

import errno
import logging
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from gpu_plugin.atomic import replace_file

T = TypeVar("T")

log = logging.getLogger(__name__)

MODE = 0o600

CORRUPT = ".corrupt"
"""Ends the name under which a file that cannot be understood is kept."""

MAX_BYTES = 64 * 1024 * 1024
"""More than any of the files ever is: 60,000 devices take 16 MiB."""


class StateDirectory:
    """Reads and writes JSON files below one directory. Every call blocks for as long as the disk does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._refused: set[str] = set()
        self._unreadable: set[str] = set()

    def read(self, name: str, kind: type[T]) -> T | None:
        """What `write` wrote under this name; None where there is nothing, or nothing that can be read."""
        file = self.path / name
        try:
            content = msgspec.json.decode(_bounded(file), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            kept = "" if isinstance(error, OSError) else _keep_aside(file)
            if name not in self._unreadable:
                self._unreadable.add(name)
                log.error("%s cannot be read, what it remembered is lost%s: %s", file, kept, error)  # noqa: TRY400
            return None
        self._unreadable.discard(name)
        return content

    def write(self, name: str, content: object) -> bool:
        """Replaces the file's content atomically and durably, mode 0600. Returns whether that worked."""
        file = self.path / name
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
            replace_file(file, text, MODE, durable=True)
        except OSError as error:
            if name not in self._refused:
                self._refused.add(name)
                log.error("%s cannot be written; a restart will not remember what is known now: %s", file, error)  # noqa: TRY400
            return False
        if name in self._refused:
            self._refused.discard(name)
            log.info("%s can be written again", file)
        return True


def _keep_aside(file: Path) -> str:
    """Puts a file that makes no sense where the next write does not replace it, for people to look at. Says where."""
    aside = file.with_name(file.name + CORRUPT)
    try:
        file.replace(aside)
    except OSError:
        return ""
    return f" (kept as {aside})"


def _bounded(file: Path) -> bytes:
    """The content of a regular file of sensible size. Raises OSError for anything else."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file")
        if status.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"is larger than {MAX_BYTES} bytes")
        return stream.read(MAX_BYTES)
