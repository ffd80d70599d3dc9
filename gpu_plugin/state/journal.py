"""A file with the latest value of a record, which outlives a kill of this process. A write does not wait for the disk.

Bytes that were passed to the kernel outlive the process. An atomic and durable replacement of a file takes milliseconds and
waits for other programs' disk traffic, but the write of a line takes microseconds. So the newest content is written here first,
and soon after durably to another file. The space is allocated at the start, so that a write succeeds on a full disk.
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
"""Bytes that are allocated at the start, and again if the file was truncated: two lines about the GPUs of a node with eight."""

ALLOCATION_FACTOR = 4
"""Allocate this many times the length of the newest line, if that is more than `MIN_ALLOCATION`: later lines may be longer."""

MAX_BYTES = 4 * 1024 * 1024
"""Limit for the size of the file. A record usually takes some kilobytes."""

_LINE = re.compile(rb"([0-9]{1,18}) ([0-9a-f]{8}) (.*)", re.DOTALL)
"""Fields of a line: number, CRC-32 of number and content, content."""


class _Line(msgspec.Struct, frozen=True):
    """A complete line: its number, its position in the file, and its content."""

    number: int
    start: int
    end: int
    content: bytes


class Journal(Generic[T]):
    """A file of allocated size with lines of JSON. Each line has the whole record. Safe for use by two threads.

    Of the complete lines, the line with the greatest number is in force. A write never overwrites that line, so a kill at any
    moment leaves the old or the new record. Unused bytes are zero. `append` does not wait for the disk. `read` returns a T, whose
    fields may be undecoded JSON (msgspec.Raw).
    """

    def __init__(self, file: Path, kind: type[T]) -> None:
        self._file = file
        self._kind = kind
        self._descriptor: int | None = None
        self._appended: object = None
        self._number = 0
        self._kept: _Line | None = None
        """The line that must not be overwritten; None without a line, or if another file has its content."""
        self._used = 0
        """End of the bytes that may not be zero."""
        self._lock = threading.Lock()

    def reserve(self) -> bool:
        """Allocate the space, so that later writes succeed on a full disk. Return True on success, else log a warning. Blocks."""
        with self._lock:
            try:
                descriptor, size = self._opened()
                os.posix_fallocate(descriptor, 0, max(MIN_ALLOCATION, size))
            except OSError as error:
                self._close()
                log.warning(
                    "%s: no space could be allocated: %s. On a full disk, faults of GPUs and orders of operators would "
                    "be lost at a restart",
                    self._file,
                    error.strerror or error,
                )
                return False
        return True

    def read(self) -> T | None:
        """Return the last complete record; None without a record. Log a warning about unreadable bytes."""
        try:
            with open_file(self._file, links=False) as stream:
                written = stream.read(2 * MAX_BYTES)
        except OSError:
            return None
        lines, strange = _lines(written)
        if strange:
            log.warning(
                "%s: %d bytes cannot be read and are left out: they were damaged, or a kill interrupted their write",
                self._file,
                strange,
            )
        for line in lines:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                return msgspec.json.decode(line.content.decode(), type=self._kind)
        if lines:
            log.warning("%s: this version cannot decode its content, which is left out", self._file)
        return None

    def append(self, content: object) -> bool:
        """Write a new record, which then outlives this process. Return True on success."""
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
                # Overwrite the rest of older lines with zeros, before and after the new line: `read` would report them as damaged
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
        """Record that another file has this content durably. If it is the newest content, the next write may overwrite it."""
        with self._lock:
            if self._appended == content:
                self._kept = None

    @property
    def in_place(self) -> bool:
        """True if the last line is still in the file of this name, which may have been removed, renamed or truncated.

        Also True while `append` runs: this property does not wait for it.
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
        """Return the offset for a line of this length: in the half of the file without the line in force, if it fits there."""
        if self._kept is None or length <= self._kept.start:
            return 0
        return max(self._kept.end, min(size // 2, size - length))

    def _opened(self) -> tuple[int, int]:
        """Return a descriptor of the file that has the name now, and its size. The former file may have been removed or renamed.

        Raises:
            OSError: the file cannot be opened, or is not a regular file.
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
    """Enlarge the file to the first of the sizes `wanted` for which there is space. Ignore a failure: the write then fails.

    Allocates only the bytes after `size`: if a tmpfs has no space for a whole range, it frees the allocated part of the range.
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
    """Return the complete lines, newest first, and the number of other bytes that are not zero."""
    found, strange = [], 0
    for start, line in _split(written):
        form = _LINE.fullmatch(line)
        if form is not None and _check(form[1], form[3]) == int(form[2], 16):
            found.append(_Line(int(form[1]), start - 1, start + len(line) + 1, form[3]))
        else:
            strange += len(line)
    return sorted(found, key=lambda line: -line.number), strange


def _split(written: bytes) -> Iterator[tuple[int, bytes]]:
    """Return the offset and the text of each line, without the zeros before and after it."""
    for form in re.finditer(rb"[^\n\0][^\n]*", written):
        if line := form[0].rstrip(b"\0"):
            yield form.start(), line
