"""The newest word on something, where a kill of this process cannot unsay it: in a file at once, without the disk.

What was handed to the kernel outlives the process. A file that is replaced atomically and durably takes milliseconds of
other people's disk traffic; writing a line takes microseconds. So the newest content is written here first, and durably
elsewhere soon after. Room for it is allocated at the start: a full disk still takes it.
"""

import logging
import os
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from gpu_plugin.runtime.regular_file import open_file
from gpu_plugin.state.directory import is_named, open_own

T = TypeVar("T")

log = logging.getLogger(__name__)

PAGE = 4096

MIN_ALLOCATION = 8 * PAGE
"""Bytes that are allocated at the start, and again should they be taken away: two lines about the GPUs of a node of eight."""

ALLOCATION_FACTOR = 4
"""How many times the newest line the allocated room is, once that is more than `MIN_ALLOCATION`: the next line may be longer."""

MAX_BYTES = 4 * 1024 * 1024
"""Bytes that the file may grow to; a content takes some kilobytes."""

_LINE = re.compile(rb"([0-9]{1,18}) ([0-9a-f]{8}) (.*)", re.DOTALL)
"""Number, CRC-32 of number and content, content."""


class _Line(msgspec.Struct, frozen=True):
    """A line that was written whole: its number, where it stands in the file, and its content."""

    number: int
    start: int
    end: int
    content: bytes


class Journal(Generic[T]):
    """A file of allocated size with lines of JSON, each the whole content. Safe between two threads; `append` waits for no disk.

    Of the lines that were written whole the one of the greatest number is in force. None is ever written over that one, so a
    kill at any moment leaves one of the two. What no line needs is zeros. What is read is a T: the same JSON as was appended, as
    far as it is understood at once.
    """

    def __init__(self, file: Path, kind: type[T]) -> None:
        self._file = file
        self._kind = kind
        self._descriptor: int | None = None
        self._appended: object = None
        self._number = 0
        self._kept: _Line | None = None
        """The line that must not be written over; None where there is none, or another file has what it says."""
        self._used = 0
        """Where the last byte is that may not be zero."""
        self._lock = threading.Lock()

    def reserve(self) -> bool:
        """Allocates the room that a full disk must not take away. Returns whether that worked; says why it did not. Blocks."""
        with self._lock:
            try:
                descriptor, size = self._opened()
                os.posix_fallocate(descriptor, 0, max(MIN_ALLOCATION, size))
            except OSError as error:
                self._close()
                log.warning(
                    "%s: no room could be allocated: %s. On a full disk, what happens to GPUs and what operators order would not "
                    "outlive a restart",
                    self._file,
                    error.strerror or error,
                )
                return False
        return True

    def read(self) -> T | None:
        """The last content that was appended whole; None where there is none. What cannot be read is said and left out."""
        try:
            with open_file(self._file, links=False) as stream:
                written = stream.read(2 * MAX_BYTES)
        except OSError:
            return None
        lines, strange = _lines(written)
        if strange:
            log.warning(
                "%s: %d bytes cannot be read and are left out: they were damaged, or a kill cut them short",
                self._file,
                strange,
            )
        for line in lines:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return msgspec.json.decode(line.content.decode(), type=self._kind)
        if lines:
            log.warning("%s: its content is not understood by this version and is left out", self._file)
        return None

    def append(self, content: object) -> bool:
        """Makes this content the last. Returns whether that worked; it outlives this process from then on."""
        text = msgspec.json.encode(content)
        with self._lock:
            try:
                descriptor, size = self._opened()
                number = self._number + 1
                line = b"\n%d %08x %b\n" % (number, _check(b"%d" % number, text), text)
                start = self._place(len(line), size)
                end = start + len(line)
                if end > MAX_BYTES:
                    return False
                _allocate(descriptor, size, max(MIN_ALLOCATION, ALLOCATION_FACTOR * len(line)), end)
                until = self._used if self._kept is None or start else self._kept.start
                # Nothing of an older line is left to be taken for a damaged one, before the new line or behind it
                begin = self._kept.end if self._kept is not None and start else 0
                padded = bytes(start - begin) + line + bytes(max(0, until - end))
                self._used = max(self._used, begin + len(padded))
                if (written := os.pwrite(descriptor, padded, begin)) < len(padded):
                    log.debug("%s: %d of %d bytes were written", self._file, written, len(padded))
                    return False
            except OSError as error:
                log.debug("%s cannot be written: %s", self._file, error)
                self._close()
                return False
            self._number, self._kept, self._appended = number, _Line(number, start, end, text), content
            return True

    def settle(self, content: object) -> None:
        """Notes that this content is written durably elsewhere, so the next may be written over it, unless a newer one came."""
        with self._lock:
            if self._appended == content:
                self._kept = None

    @property
    def in_place(self) -> bool:
        """Whether what was appended last is under the file's name still: it may have been removed, renamed or cut short.

        While something is being appended it counts as there: nobody waits for that.
        """
        if not self._lock.acquire(blocking=False):
            return True
        try:
            there = None if self._descriptor is None else os.fstat(self._descriptor)
            return there is not None and there.st_size >= self._used and is_named(self._file, there)
        except OSError:
            return False
        finally:
            self._lock.release()

    def _place(self, length: int, size: int) -> int:
        """Where a line of this length begins in a file of this size: in the half where the line in force is not, if it fits."""
        if self._kept is None or length <= self._kept.start:
            return 0
        return max(self._kept.end, min(size // 2, size - length))

    def _opened(self) -> tuple[int, int]:
        """A descriptor of the file that bears its name now, and its size: the former may have been removed or renamed.

        Raises:
            OSError: it cannot be opened, or something else stands there.
        """
        if self._descriptor is not None:
            there = os.fstat(self._descriptor)
            if is_named(self._file, there):
                return self._descriptor, there.st_size
            self._close()
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = open_own(self._file, os.O_RDWR | os.O_CREAT)
        written = os.pread(self._descriptor, 2 * MAX_BYTES, 0)
        lines, _ = _lines(written)
        self._kept = lines[0] if lines else None
        self._number = max(self._number, lines[0].number if lines else 0)
        self._used = len(written.rstrip(b"\0"))
        return self._descriptor, len(written)

    def _close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _allocate(descriptor: int, size: int, *wanted: int) -> None:
    """Makes the file as large as the first of these that there is room for; where there is none, writing finds out.

    What is allocated already is left out: a tmpfs that has no room for all of a range takes back what there was of it.
    """
    for length in wanted:
        missing = min(-(-length // PAGE) * PAGE, MAX_BYTES) - size
        if missing <= 0:
            return
        with suppress(OSError):
            os.posix_fallocate(descriptor, size, missing)
            return


def _check(number: bytes, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(number))


def _lines(written: bytes) -> tuple[list[_Line], int]:
    """The lines that were written whole, the newest first, and how many bytes are neither those nor zeros."""
    found, strange = [], 0
    for start, line in _split(written):
        form = _LINE.fullmatch(line)
        if form is not None and _check(form[1], form[3]) == int(form[2], 16):
            found.append(_Line(int(form[1]), start - 1, start + len(line) + 1, form[3]))
        else:
            strange += len(line)
    return sorted(found, key=lambda line: -line.number), strange


def _split(written: bytes) -> Iterator[tuple[int, bytes]]:
    """Each stretch between newlines, without the zeros around it, and where it begins."""
    for form in re.finditer(rb"[^\n\0][^\n]*", written):
        if line := form[0].rstrip(b"\0"):
            yield form.start(), line
