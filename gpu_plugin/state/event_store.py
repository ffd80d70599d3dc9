"""The newest events of this node: changes of health, registrations, configuration, orders, starts, stops.

`gpu-plugin events` shows them. The newest `KEPT` events are in memory and in a file of the state directory, with one JSON object
per line, oldest first. A thread appends to the file. When the file has 2 * `KEPT` lines, it is replaced by the newest events.
"""

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path

import anyio
import msgspec

from gpu_plugin.config.words import are, counted
from gpu_plugin.runtime.printable import printable
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.regular_file import open_file, replace_file
from gpu_plugin.runtime.threads import SlowCall, begin
from gpu_plugin.state.directory import MODE, Identity, identity, keep_aside, open_own

log = logging.getLogger(__name__)

FILE = "events.jsonl"  # in the state directory
KEPT = 1000  # number of events in memory
LONGEST = 300  # limit in characters for each text of an event
LONGEST_WORD = 60  # a longer word is cut where a text is shortened, a shorter one is dropped; a uuid has 40 characters
MAX_BYTES = 4 * 1024 * 1024  # limit for the size of the file, and for the bytes that are read
WHOLE_BYTES = 3 * 1024 * 1024  # limit for the size of the file after it was replaced; 1,000 long events take 2 MiB
PATIENCE = 10.0  # seconds until a write is abandoned
WRITTEN_SOON = 1.0  # seconds that the reply to an order waits until the order is written
RETRY = 5.0  # seconds between a failed write and the next attempt, if there is no event before

LATEST = 253_402_300_800.0
"""Unix time in seconds of the year 10000. Events after it are invalid: Python's datetime cannot represent them."""


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event.

    Attributes:
        at: Unix time in seconds.
        kind: one of `KINDS`.
        text: a sentence that describes the event.
        uuid, index, bus_id: the GPU of the event.
        device: the MIG device of the event.
        signal, verdict, xid: the signal, verdict and Xid of a change of health.
        resource: the resource of a registration.
        by: the user that gave an order.
        reason: the reason that the user gave with the order.
    """

    at: float
    kind: str
    text: str
    uuid: str = ""
    index: int | None = None
    bus_id: str = ""
    device: str = ""
    signal: str = ""
    verdict: str = ""
    xid: int | None = None
    resource: str = ""
    by: str = ""
    reason: str = ""


KINDS = ("health", "registration", "configuration", "order", "daemon")


def bounded(event: Event) -> Event:
    """Return the event with printable texts of at most `LONGEST` characters."""
    texts = {name: text for name in event.__struct_fields__ if isinstance(text := getattr(event, name), str)}
    shown = {name: _shortened(printable(text[: LONGEST + 1])) for name, text in texts.items()}
    return msgspec.structs.replace(event, **shown) if shown != texts else event


def _shortened(text: str) -> str:
    """Return the text or, if it is too long, its beginning and `...`. Cut at a blank if there is one near the end."""
    if len(text) <= LONGEST:
        return text
    kept = text[: LONGEST - 3]
    blank = kept.rfind(" ", LONGEST - LONGEST_WORD)
    return f"{kept if blank < 0 else kept[:blank]}..."


def recollect(state_dir: Path) -> tuple[list[Event], int]:
    """Return the newest `KEPT` events of the file, oldest first, and the number of unreadable lines. Blocks.

    Raises:
        OSError: the file does not exist or cannot be read.
    """
    with open_file(state_dir / FILE, links=False) as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - MAX_BYTES))
        lines = stream.read(MAX_BYTES).split(b"\n")
    made = [_parsed(line) for line in lines if line]
    found = [event for event in made if event is not None]
    return found[-KEPT:], len(made) - len(found)


def lost_lines(count: int) -> str:
    """Return a message for a number of lines of the file that cannot be read."""
    return f"{counted(count, 'line')} of it cannot be read and {are(count)} left out"


def _parsed(line: bytes) -> Event | None:
    """Return the event of a line; None if the line was cut by a kill or is otherwise invalid."""
    try:
        event = msgspec.json.decode(line.decode(), type=Event)  # msgspec ignores an unknown key with invalid UTF-8
    except (ValueError, RecursionError):
        return None
    return bounded(event) if 0 <= event.at < LATEST else None


class EventStore:
    """Stores events in memory. `run` writes them to the file. Use it on the event loop's thread.

    Attributes:
        events: the newest events, oldest first.
    """

    def __init__(self, state_dir: Path, clock: Callable[[], float]) -> None:
        """`clock` returns Unix time in seconds."""
        self.events: deque[Event] = deque(maxlen=KEPT)
        self._state_dir = state_dir
        self._clock = clock
        self._added = 0
        self._written = 0
        """Number of events since the start (`_added`), and how many of them are in the file."""
        self._lines = KEPT * 2
        """Number of lines in the file. The first value makes the first write replace the file."""
        self.news = Pulse()
        """Rings at each event."""
        self._attempt_ended = Pulse()
        self._attempted = 0
        """Number of events since the start at the time of the last attempt to write them, successful or not."""
        self._refused = False
        self._running = False
        self._lost = False
        """True if the file that was written last was removed, renamed or replaced."""
        self._file: Identity | None = None
        self._writing: SlowCall[tuple[Identity | None, bool]] = SlowCall("events")

    @property
    def _unwritten(self) -> int:
        """Number of the newest events that are not in the file yet."""
        return min(self._added - self._written, len(self.events))

    def recall(self) -> None:
        """Add the events of an earlier process before the events of this process. Blocks as long as the file system does.

        A file with unreadable lines is moved aside, and its readable events are written again.
        """
        file = self._state_dir / FILE
        try:
            events, unreadable = recollect(self._state_dir)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read, so earlier events are missing: %s", file, error)
            return
        self.events.extendleft(islice(reversed(events), KEPT - len(self.events)))
        if unreadable:
            log.warning("%s: %s%s", file, lost_lines(unreadable), keep_aside(file))
            self._lost = True
            self.save()

    def add(self, kind: str, text: str, **fields: object) -> None:
        """Add an event that happened now. `fields` are fields of `Event`."""
        event = bounded(Event(self._clock(), kind, text, **fields))  # type: ignore[arg-type] # checked when the file is read
        self.events.append(event)
        self._added += 1
        self.news.ring()

    @property
    def trouble(self) -> str:
        """A sentence if events cannot be written; empty otherwise."""
        return "events cannot be written: the latest would be lost at a restart" if self._refused else ""

    def look(self) -> None:
        """Write all events again if the file was removed, renamed or replaced. Call on the event loop's thread."""
        if self._file is not None and not self._writing.begun and identity(self._state_dir / FILE) != self._file:
            self._lost = True
            self.news.ring()

    async def written(self, seconds: float = WRITTEN_SOON) -> bool:
        """Wait until all present events are written, for at most `seconds`, or until a write fails. Return True if they are."""
        added = self._added
        if self._written < added and self._running:
            self.news.ring()
            with anyio.move_on_after(seconds):
                while self._attempted < added:
                    await self._attempt_ended.wait()
        return self._written >= added

    async def run(self) -> None:
        """Write new events to the file. Retry a failed write at the next event or after `RETRY`. Never returns."""
        self._running = True
        try:
            while True:
                if not self._unwritten and not self._lost:
                    await self.news.wait()
                    continue
                if not await self._write():
                    await self.news.wait(RETRY)
        finally:
            self._running = False

    def _pending(self) -> Callable[[], tuple[Identity | None, bool]]:
        """Return the call that writes the missing events. It replaces the file if the file may be incomplete."""
        count = self._unwritten
        unwritten = list(islice(self.events, len(self.events) - count, None))
        append = not self._lost and self._lines + count <= KEPT * 2
        return partial(_write_down, self._state_dir, list(self.events), unwritten, append=append)

    async def _write(self) -> bool:
        """Write the missing events. Return True on success.

        While a write hangs, no other write begins. The result of a hanging write is unknown, so the next write replaces the file.
        """
        count, added = self._unwritten, self._added
        try:
            self._file, appended = await self._writing.fresh(self._pending(), PATIENCE)
        except (OSError, TimeoutError) as error:
            if not self._refused:
                file = self._state_dir / FILE
                log.warning("%s cannot be written, so these events would be lost at a restart: %s", file, error)
            self._refused = True
            self._lines = KEPT * 2  # makes the next write replace the file
            return False
        finally:
            self._attempted = added
            self._attempt_ended.ring()
        self._refused = self._lost = False
        self._lines = self._lines + count if appended else min(KEPT, len(self.events))
        self._written = added
        return True

    async def save_within(self, seconds: float) -> None:
        """Write the missing events at the end of the process. They are lost if the write takes longer than `seconds`."""
        if not await begin(self.save, "last-events").wait(seconds):
            log.warning(
                "%s: the last events are lost: the write took longer than %g s", self._state_dir / FILE, seconds
            )

    def save(self) -> None:
        """Write the missing events now. Events are lost if the write fails. Blocks, and never raises."""
        count, added = self._unwritten, self._added
        if not count and not self._lost:
            return
        try:
            self._file, _ = self._pending()()
        except Exception as error:  # noqa: BLE001 - the process ends, and its last steps must still run
            lost = len(self.events) if self._lost else count
            log.warning("%s cannot be written; %d events are lost: %s", self._state_dir / FILE, lost, error)
        else:
            self._written, self._lost = added, False


def _line(event: Event) -> bytes:
    return msgspec.json.encode(event) + b"\n"


def _write_down(
    state_dir: Path, events: Iterable[Event], unwritten: Iterable[Event], *, append: bool
) -> tuple[Identity | None, bool]:
    """Append the `unwritten` events to the file. Without `append`, or if the file would be too large, replace it by all events.

    Returns the file's identity, and True if the events were appended. Raises OSError.
    """
    appended = append and _append(state_dir, unwritten)
    if not appended:
        _replace(state_dir, events)
    return identity(state_dir / FILE), appended


def _append(state_dir: Path, events: Iterable[Event]) -> bool:
    """Append the events. Return False, with the file unchanged, if the file would be too large. Raises OSError."""
    descriptor = open_own(state_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        content = b"".join(map(_line, events))
        if os.fstat(descriptor).st_size + len(content) > MAX_BYTES:
            return False
        if os.write(descriptor, content) != len(content):
            os.write(descriptor, b"\n")  # ends the incomplete line, which readers ignore
            raise OSError(errno.ENOSPC, "the write was incomplete")
    finally:
        os.close(descriptor)
    return True


def _replace(state_dir: Path, events: Iterable[Event]) -> None:
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines: deque[bytes] = deque()
    size = 0
    for line in map(_line, reversed([*events])):
        size += len(line)
        if size > WHOLE_BYTES:
            break
        lines.appendleft(line)
    replace_file(state_dir / FILE, b"".join(lines), MODE)
