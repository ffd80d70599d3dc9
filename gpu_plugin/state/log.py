"""The state log: records of health, GPUs, devices and events in two files of allocated size. It outlives this process.

A record has a number, a kind and JSON. Of the records of a kind, the record with the greatest number is in force, except events:
the newest events all count. The log has these properties:

- A kill loses no record that `write` or `add_event` accepted. Both write to the active file and do not wait for the disk: bytes
  that were passed to the kernel outlive the process. An atomic and durable replacement of a file takes milliseconds or, with
  disk traffic of other programs, seconds.
- `sync` writes the active file to the disk, so that it outlives a power failure. It runs in the background.
- When the active file is full, the records in force are written to the other file, which is active from then on. A kill during
  that loses nothing: the former file is unchanged, and a reader combines the records of both files by number.
- On a full disk, both files have allocated space for the records in force and for more records about health. If they cannot grow,
  the oldest events are left out, and records of GPUs and devices that would take the space of health are refused.
- Each record has a CRC. Lines that were damaged, or whose write was interrupted, are left out. `load` logs their number. It
  empties a file with more than 1 MiB of them, and keeps a copy.
- Each file has space for the records in force and at most 1 MiB more. The events in force take at most `EVENT_BYTES`.
- If a file was removed, renamed, replaced or truncated, the next write creates or repairs it from the records in memory.
- Only one process may write, the owner of the state directory's lock. `release` ends the writes before a handover, and `load`
  reads what another process wrote.
"""

import errno
import logging
import os
import re
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from gpu_plugin.config.words import are, counted
from gpu_plugin.state.directory import MAX_BYTES, bounded, copy_aside, keep_aside
from gpu_plugin.state.log_file import LogFile

log = logging.getLogger(__name__)

FILES = ("state-a.log", "state-b.log")  # in the state directory

HEALTH, GPUS, DEVICES, EVENT = "health", "gpus", "devices", "event"  # the kinds of records

KEPT = 1000  # number of events in force
EVENT_BYTES = 2 * 1024 * 1024  # limit for the events in force; 1,000 usual events take 0.3 MiB
_SYNC = "sync"
PAGE = 4096
RESERVED = 64 * 1024  # bytes that are allocated for each file at the start; eight GPUs take 5 KiB without events
SPARE = 16 * 1024  # bytes of each file that only records of health may use
MAX_GROWTH = 1024 * 1024  # limit in bytes for the space beyond the records in force

# CRC-32 of the rest, number, kind, JSON. A page that a power failure lost has zeros, also in place of a record's line feed.
_LINE = re.compile(rb"[\n\0]([0-9a-f]{8}) (([0-9]{1,30}) ([a-z]+) [^\n\0]*)(?=[\n\0]|\Z)")
_PART = 1024 * 1024  # bytes that are searched for lines at a time
_SHAPE = bytes(10 if byte == 10 else 120 for byte in range(256))  # shows line feeds as they are, and other bytes as x


class Record(msgspec.Struct, frozen=True):
    """A record and its line in a file. The line begins and ends with a line feed, so that a cut line affects no other."""

    number: int
    kind: str
    line: bytes

    @property
    def content(self) -> bytes:
        """The JSON of the record."""
        return self.line.split(b" ", 3)[3][:-1]


def _record(number: int, kind: str, content: bytes) -> Record:
    rest = b"%d %b %b" % (number, kind.encode(), content)
    return Record(number, kind, b"\n%08x %b\n" % (zlib.crc32(rest), rest))


class Content(msgspec.Struct, frozen=True):
    """The content of both files.

    Attributes:
        latest: the record in force of each kind except events.
        events: the newest events, oldest first.
        unreadable: the number of lines that are left out.
        numbers: the numbers of the records in each file.
        ends: the end of each file's bytes that are not zero.
        garbage: the number of these bytes that are not in records.
        errors: files that cannot be read, by name.
    """

    latest: Mapping[str, Record]
    events: tuple[Record, ...]
    unreadable: int
    numbers: tuple[frozenset[int], ...]
    ends: tuple[int, ...]
    garbage: tuple[int, ...]
    errors: Mapping[str, OSError]


def read_log(state_dir: Path) -> Content:
    """Return the content of both files; a missing file is empty. Changes nothing. Blocks as long as the disk does."""
    found: dict[int, Record] = {}
    errors: dict[str, OSError] = {}
    numbers, ends, garbage, unreadable = [], [], [], 0
    for name in FILES:
        written = b""
        try:
            written = bounded(state_dir / name).rstrip(b"\0")
        except FileNotFoundError:
            pass
        except OSError as error:
            errors[name] = error
        records, strange = _parsed(written)
        found.update((record.number, record) for record in records)
        numbers.append(frozenset(record.number for record in records))
        ends.append(len(written))
        garbage.append(len(written) - _size(records))
        unreadable += strange
    ordered = [found[number] for number in sorted(found)]
    latest = {record.kind: record for record in ordered if record.kind != EVENT}
    events = [record for record in ordered if record.kind == EVENT]
    return Content(latest, tuple(events[-KEPT:]), unreadable, tuple(numbers), tuple(ends), tuple(garbage), errors)


def lost_lines(count: int) -> str:
    """Return a message for a number of lines that cannot be read."""
    return f"{counted(count, 'line')} of the state log cannot be read and {are(count)} left out"


def _parsed(written: bytes) -> tuple[list[Record], int]:
    """Return the records of a file, and the number of lines that are not records."""
    records = [
        Record(int(form[3]), form[4].decode(), b"\n%b\n" % form[0][1:])
        for form in _LINE.finditer(written)
        if zlib.crc32(form[2]) == int(form[1], 16)
    ]
    # In parts and without an object for each line: a damaged file may have 60 MiB and millions of lines.
    lines, last = 0, b"\n"
    for start in range(0, len(written), _PART):
        shape = last + written[start : start + _PART].translate(_SHAPE, b"\0")
        lines += shape.count(b"\nx")
        last = shape[-1:]
    return records, lines - len(records)


class StateLog:
    """Reads and writes the log. Safe for use by several threads. A call blocks no longer than a write to the kernel's cache.

    Only `load` and `sync` wait for the disk.
    """

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self._files = tuple(LogFile(state_dir / name) for name in FILES)
        self._active = 0
        self._latest: dict[str, Record] = {}
        self._events: deque[Record] = deque()
        self._number = 0
        self._room = RESERVED
        """Bytes of each file that may be used. They are allocated if the file system could allocate them."""
        self._allocated = False
        self._lost = False
        """True if the active file lacks records that are in memory."""
        self._unsynced = False
        """True if the kernel may have dropped a part of the active file, since `sync` failed."""
        self._released = False
        self._failing: set[str] = set()
        """The kinds of records whose last write failed, and `_SYNC`."""
        self._lock = threading.Lock()

    def load(self) -> Content:
        """Read both files and allocate their space. Log unreadable lines and files. Blocks as long as the disk does."""
        with self._lock:
            content = read_log(self.state_dir)
            for name, error in content.errors.items():
                path = self.state_dir / name
                # A file that stays could be read again later, and its records may have greater numbers than new records.
                log.error(
                    "%s cannot be read, so its content is lost%s: %s", path, keep_aside(path), error.strerror or error
                )
            if content.unreadable:
                lost = lost_lines(content.unreadable)
                log.warning(
                    "%s: %s: damaged, or a kill interrupted their write. Stored health, orders or events may be lost",
                    self.state_dir,
                    lost,
                )
            self._latest, self._events = dict(content.latest), deque(content.events)
            self._number = max((0, *content.numbers[0], *content.numbers[1]))
            for file, end in zip(self._files, content.ends, strict=True):
                file.close()
                file.end = file.used = end
            in_force = {record.number for record in (*self._latest.values(), *self._events)}
            self._active = 1 if len(in_force & content.numbers[1]) > len(in_force & content.numbers[0]) else 0
            spoiled = [place for place, size in enumerate(content.garbage) if size > MAX_GROWTH]
            self._room = max(
                [RESERVED, *(_pages(end) for place, end in enumerate(content.ends) if place not in spoiled)]
            )
            self._allocated = self._lost = self._released = False
            self._reserve()
            for record in content.latest.values():
                if record.number not in content.numbers[self._active]:  # the active file was damaged
                    with suppress(OSError):
                        self._place(record)
            for place in spoiled:
                self._replace(place, content)
        return content

    def latest(self, kind: str) -> bytes | None:
        """Return the JSON of the record in force; None if there is none."""
        record = self._latest.get(kind)
        return None if record is None else record.content

    def write(self, kind: str, content: object) -> bool:
        """Write a record that replaces the record of this kind. Return True if it outlives this process. Blocks."""
        text = msgspec.json.encode(content)
        with self._lock:
            former = self._latest.get(kind)
            if (
                former is not None
                and former.content == text
                and not self._lost
                and all(file.in_place for file in self._files)
            ):
                return True
            return self._add(kind, text)

    def add_event(self, content: object) -> bool:
        """Write an event. Return True if it outlives this process. Blocks."""
        text = msgspec.json.encode(content)
        with self._lock:
            return self._add(EVENT, text)

    def sync(self) -> bool:
        """Write the records to the disk, so that they outlive a power failure. Return True on success. Blocks.

        Also moves the records in force to the other file if the active file is nearly full: then both files are on the disk, and
        a power failure at any time leaves the records.
        """
        try:
            self._sync_active()
            with self._lock:
                moves = not self._released and (self._unsynced or self._nearly_full)
                if moves:
                    self._move()
            if moves:
                self._sync_active()
        except OSError as error:
            self._unsynced = True
            self._log_failure(_SYNC, error)
            return False
        self._unsynced = False
        self._failing.discard(_SYNC)
        return True

    def _sync_active(self) -> None:
        with self._lock:
            descriptor = os.dup(self._files[self._active].descriptor)
        try:
            os.fdatasync(descriptor)  # without the lock: writes go on
        finally:
            os.close(descriptor)

    @property
    def in_place(self) -> bool:
        """True if both files are unchanged since the last write. Also True while a write runs: it does not wait for the write."""
        if not self._lock.acquire(blocking=False):
            return True
        try:
            return all(file.descriptor < 0 or file.in_place for file in self._files)
        finally:
            self._lock.release()

    def release(self) -> bool:
        """Close the files and refuse all writes until `load`. Return False, and change nothing, if a write hangs."""
        if not self._lock.acquire(blocking=False):
            return False
        self._released = True
        for file in self._files:
            file.close()
        self._lock.release()
        return True

    @property
    def _nearly_full(self) -> bool:
        """True if more than half of the space beyond the records in force is used."""
        live = _size(self._in_force())
        return self._files[self._active].end - live > (self._room - live) // 2

    def _add(self, kind: str, text: bytes) -> bool:
        """Append a new record. Return True on success, else log the first error."""
        if self._released:
            return False
        self._number += 1
        record = _record(self._number, kind, text)
        try:
            self._open_all()
            self._append(record)
        except OSError as error:
            self._log_failure(kind, error)
            return False
        if kind in self._failing:
            self._failing.discard(kind)
            log.info("%s: records of %s can be written again", self._files[self._active].path, kind)
        return True

    def _log_failure(self, what: str, error: OSError) -> None:
        if what not in self._failing:
            self._failing.add(what)
            trouble = (
                "cannot be written to the disk, so new state would be lost at a power failure"
                if what == _SYNC
                else f"new records of {what} cannot be written and would be lost at a restart"
            )
            log.error("%s: %s: %s", self._files[self._active].path, trouble, error.strerror or error)

    def _reserve(self) -> None:
        """Open the files and allocate their space. Log a warning on failure."""
        try:
            self._open_all()
            self._grow(0)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            reason = "" if self._allocated else "the file system cannot do that"
        if reason:
            log.warning(
                "%s: no space could be allocated: %s. On a full disk, faults of GPUs and orders of operators would "
                "be lost at a restart",
                self._files[self._active].path,
                reason,
            )

    def _open_all(self) -> None:
        """Open the files that have the names now. Restore the active file if it has lost records. Raises OSError."""
        for place, file in enumerate(self._files):
            if not file.in_place:
                lost = file.open()
                self._lost = self._lost or (lost and place == self._active)
                self._allocated = False
        if not self._allocated:
            with suppress(OSError):  # the writes may succeed nevertheless
                self._grow(0)
        if self._lost:
            self._write_all(self._active)
            self._lost = False

    def _replace(self, place: int, content: Content) -> None:
        """Empty a file with many bytes that are not records, and keep a copy of them. First write its records to the other file.

        The file keeps its space: a full disk has none for a new file.
        """
        file = self._files[place]
        try:
            if place != self._active:
                for record in self._in_force():
                    if record.number not in content.numbers[self._active]:
                        self._place(record)
            if place == self._active:  # a full file may have made it the active file just now
                self._move()
            os.fdatasync(self._files[self._active].descriptor)
            kept = copy_aside(file.path)
            file.empty(self._room)
        except OSError as error:
            kept = f" (and the file cannot be replaced: {error.strerror or error})"
        log.error("%s has %d bytes that are not records and are left out%s", file.path, content.garbage[place], kept)

    def _append(self, record: Record) -> None:
        """Put a record in force and write it to a file. If that raises OSError, the former record stays in force."""
        former = self._latest.get(record.kind)
        if record.kind == EVENT:
            self._events.append(record)
        else:
            self._latest[record.kind] = record
        try:
            self._place(record)
        except OSError:
            if record.kind == EVENT:
                self._events.pop()
            elif former is not None:
                self._latest[record.kind] = former
            else:
                del self._latest[record.kind]
            raise
        while len(self._events) > KEPT:
            self._events.popleft()

    def _place(self, record: Record) -> None:
        """Write a record in force to the active file, or all records in force to the other file. Raises OSError."""
        needed = _size(self._latest.values()) + (0 if record.kind == HEALTH else SPARE)
        if needed > self._room and record.kind != EVENT:
            self._grow(needed)
        active = self._files[self._active]
        if active.end + len(record.line) <= self._room:
            active.write(active.end, record.line)
            return
        self._move()
        if record.kind == EVENT and record not in self._in_force():
            raise OSError(errno.ENOSPC, "the other records leave no space for an event")

    def _move(self) -> None:
        """Write the records in force to the other file, which is active from then on. Raises OSError."""
        target = 1 - self._active
        self._write_all(target)
        self._active = target

    def _write_all(self, place: int) -> None:
        """Replace the content of a file by the records in force. Raises OSError."""
        with suppress(OSError):  # without more room, the oldest events are left out
            self._grow(_size(self._latest.values()) + min(_size(self._events), EVENT_BYTES) + SPARE)
        records = sorted(self._in_force(), key=lambda record: record.number)
        self._files[place].write(0, b"".join(record.line for record in records))

    def _in_force(self) -> list[Record]:
        """Return the records in force that fit into a file: without the oldest events, if not all fit."""
        records = [*self._latest.values()]
        left = min(self._room - SPARE - _size(records), EVENT_BYTES)
        for event in reversed(self._events):
            left -= len(event.line)
            if left < 0:
                break
            records.append(event)
        return records

    def _grow(self, needed: int) -> None:
        """Allocate room for `needed` bytes of records in force, and for as many new bytes. Raises OSError if there is no room."""
        wanted = max(self._room, _pages(needed + min(needed, MAX_GROWTH)))
        if self._allocated and wanted == self._room:
            return
        if wanted > MAX_BYTES:
            raise OSError(errno.EFBIG, f"the state takes more than {MAX_BYTES} bytes")
        supported = [file.allocate(wanted) for file in self._files]
        self._room, self._allocated = wanted, all(supported)


def _size(records: Iterable[Record]) -> int:
    return sum(len(record.line) for record in records)


def _pages(size: int) -> int:
    """Round a size in bytes up to whole pages."""
    return -(-size // PAGE) * PAGE
