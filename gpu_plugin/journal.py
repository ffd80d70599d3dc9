"""The newest word on something, where a kill of this process cannot unsay it: appended to a file at once, without the disk.

What was handed to the kernel outlives the process. A file that is replaced atomically and durably takes milliseconds of
other people's disk traffic; appending a line takes microseconds. So the newest content is appended here first, and written
durably elsewhere soon after, when the journal is emptied again.
"""

import logging
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)

MODE = 0o600

MAX_BYTES = 4 * 1024 * 1024
"""What it may grow to while nothing is written durably; a content takes some kilobytes."""


class Journal(Generic[T, R]):
    """Lines of JSON, each the whole content, the last one in force. Safe between two threads; `append` waits for no disk.

    What is appended is a T, what is read an R: the same JSON, as far as it is understood at once.
    """

    def __init__(self, file: Path, kind: type[R]) -> None:
        self._file = file
        self._kind = kind
        self._descriptor: int | None = None
        self._last: object = None
        self._lock = threading.Lock()

    def read(self) -> R | None:
        """The last content that was appended whole; None where there is none. One cut short by a kill is left out."""
        try:
            descriptor = os.open(self._file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            written = os.read(descriptor, 2 * MAX_BYTES) if regular else b""
        except OSError:
            return None
        finally:
            os.close(descriptor)
        for line in reversed(written.split(b"\n")):
            if line:
                with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    return msgspec.json.decode(line, type=self._kind)
        return None

    def append(self, content: T) -> bool:
        """Makes this content the last. Returns whether that worked; it outlives this process from then on.

        A line begins with a newline of its own: what another process left of a line that the disk had no room for, or what
        cannot be taken back here, is then a line apart.
        """
        line = b"\n" + msgspec.json.encode(content) + b"\n"
        with self._lock:
            try:
                descriptor = self._opened()
                size = os.fstat(descriptor).st_size
                if size + len(line) > MAX_BYTES:
                    return False
                written = os.write(descriptor, line)
                if written < len(line):
                    log.debug("%s: %d of %d bytes were written", self._file, written, len(line))
                    os.ftruncate(descriptor, size)
                    return False
            except OSError as error:
                log.debug("%s cannot be written: %s", self._file, error)
                self._close()
                return False
            self._last = content
            return True

    def settle(self, content: T) -> None:
        """This content is written durably elsewhere: empties the journal, unless a newer one was appended meanwhile."""
        with self._lock:
            if self._last == content and self._descriptor is not None:
                try:
                    os.ftruncate(self._descriptor, 0)
                except OSError as error:
                    log.debug("%s cannot be emptied: %s", self._file, error)
                    self._close()

    def close(self) -> None:
        """Lets go of the file."""
        with self._lock:
            self._close()

    def _opened(self) -> int:
        """A descriptor of the file that bears its name now: it may have been removed with its directory."""
        if self._descriptor is not None and not os.fstat(self._descriptor).st_nlink:
            self._close()
        if self._descriptor is None:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._descriptor = os.open(self._file, flags, MODE)
        return self._descriptor

    def _close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
