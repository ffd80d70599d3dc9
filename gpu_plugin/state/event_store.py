"""Events of this node, remembered within a bound: changes of health, registrations, configuration, orders, starts, stops.

`gpu-plugin events` asks for it. The newest `KEPT` events are kept in memory and in a file of the state directory, a JSON object
a line, oldest first. The file is appended to on a thread, and replaced by what is kept once it has twice as many lines.
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
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import Workers, begin, settled
from gpu_plugin.state.directory import MODE, Identity, identity, keep_aside, open_own

log = logging.getLogger(__name__)

FILE = "events.jsonl"  # in the state directory
KEPT = 1000  # events that are remembered
LONGEST = 300  # characters of each text of an event
LONGEST_WORD = 60  # characters of a word that is left out whole where a text is cut: a uuid has 40
MAX_BYTES = 4 * 1024 * 1024  # that the file holds at most, and that are read of it
WHOLE_BYTES = 3 * 1024 * 1024  # that it holds once it was replaced; a thousand events with long texts take 2 MiB
PATIENCE = 10.0  # seconds that the disk may take before its thread is given up on
WRITTEN_SOON = 1.0  # seconds that who gave an order is kept waiting until it is written down
RETRY = 5.0  # seconds until what could not be written is tried again, where no event comes before

LATEST = 253_402_300_800.0
"""Unix time in seconds of the year 10000, which no event of ours reaches and no calendar here can show."""


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that happened.

    `at` is Unix time in seconds, `kind` one of `KINDS`, `text` the sentence. `uuid`, `index` and `bus_id` are those of the GPU
    that it is about, `device` of a MIG device; `signal`, `verdict` and `xid` those of a change of health. `resource` is what was
    registered. `by` is who gave an order, and `reason` the reason that was given with it.
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
    """The event with each of its texts printable and within `LONGEST` characters."""
    texts = {name: text for name in event.__struct_fields__ if isinstance(text := getattr(event, name), str)}
    shown = {name: _shortened(printable(text[: LONGEST + 1])) for name, text in texts.items()}
    return msgspec.structs.replace(event, **shown) if shown != texts else event


def _shortened(text: str) -> str:
    """The text, of one that is too long its beginning: up to the last blank, where that is near the end, and `...` after it."""
    if len(text) <= LONGEST:
        return text
    kept = text[: LONGEST - 3]
    blank = kept.rfind(" ", LONGEST - LONGEST_WORD)
    return f"{kept if blank < 0 else kept[:blank]}..."


def recollect(state_dir: Path) -> tuple[list[Event], int]:
    """The newest `KEPT` events of the file, oldest first, and how many of its lines make no sense and are left out. Blocks.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    with open_file(state_dir / FILE, links=False) as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - MAX_BYTES))
        lines = stream.read(MAX_BYTES).split(b"\n")
    made = [_parsed(line) for line in lines if line]
    found = [event for event in made if event is not None]
    return found[-KEPT:], len(made) - len(found)


def lost_lines(count: int) -> str:
    """Words for so many lines of the file that cannot be read."""
    return f"{counted(count, 'line')} of it cannot be read and {are(count)} left out"


def _parsed(line: bytes) -> Event | None:
    """The event of a line; None where a kill cut it short, or it was never ours."""
    try:
        event = msgspec.json.decode(line.decode(), type=Event)  # msgspec passes over a key that is not text
    except (ValueError, RecursionError):
        return None
    return bounded(event) if 0 <= event.at < LATEST else None


class EventStore:
    """Takes events in on the event loop and keeps them; `run` writes them down.

    Attributes:
        events: those that are remembered, oldest first.
    """

    def __init__(self, state_dir: Path, clock: Callable[[], float]) -> None:
        """`clock` gives Unix time in seconds."""
        self.events: deque[Event] = deque(maxlen=KEPT)
        self._state_dir = state_dir
        self._clock = clock
        self._added = 0
        self._written = 0
        """How many events came since the start, and how many of them are in the file."""
        self._lines = KEPT * 2
        """Lines of the file; before it was read, so many that it is replaced first."""
        self.news = Pulse()
        """Rings at each event."""
        self._attempt_ended = Pulse()
        self._attempted = 0
        """How many events had come at the last attempt to write them, whatever came of it."""
        self._refused = False
        self._running = False
        self._lost = False
        """Whether the file is not the one that was written last: it was removed, renamed or replaced."""
        self._file: Identity | None = None
        self._threads = Workers("events")
        self._writing: SlowCall[tuple[Identity | None, bool]] = SlowCall(self._threads.begin)

    @property
    def _unwritten(self) -> int:
        """How many of the newest events are not in the file yet."""
        return min(self._added - self._written, len(self.events))

    def recall(self) -> None:
        """Takes in what an earlier process wrote down, before the events of this one. Blocks for as long as the file system does.

        A file with lines that cannot be read is set aside, and what could be read of it written down again.
        """
        file = self._state_dir / FILE
        try:
            events, unreadable = recollect(self._state_dir)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s cannot be read: earlier events are not known: %s", file, error)
            return
        self.events.extendleft(islice(reversed(events), KEPT - len(self.events)))
        if unreadable:
            log.warning("%s: %s%s", file, lost_lines(unreadable), keep_aside(file))
            self._lost = True
            self.save()

    def add(self, kind: str, text: str, **fields: object) -> None:
        """Takes in something that happened just now; `fields` are those of `Event`."""
        event = bounded(Event(self._clock(), kind, text, **fields))  # type: ignore[arg-type] # checked where they are read
        self.events.append(event)
        self._added += 1
        self.news.ring()

    @property
    def trouble(self) -> str:
        """What a restart would not remember, in a sentence; empty while all is written down."""
        return "events cannot be written down: a restart would not remember the latest" if self._refused else ""

    def look(self) -> None:
        """Has all that is remembered written down again where the file is gone. From the event loop's thread."""
        if self._file is not None and not self._writing.begun and identity(self._state_dir / FILE) != self._file:
            self._lost = True
            self.news.ring()

    async def written(self, seconds: float = WRITTEN_SOON) -> bool:
        """Whether all events of until now outlive this process; waits `seconds` at most, less where they cannot be written."""
        added = self._added
        if self._written < added and self._running:
            self.news.ring()
            with anyio.move_on_after(seconds):
                while self._attempted < added:
                    await self._attempt_ended.wait()
        return self._written >= added

    async def run(self) -> None:
        """Writes new events down as they come. What cannot be written is tried again with the next one, or after `RETRY`.

        Never returns.
        """
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
            self._threads.close()

    def _pending(self) -> Callable[[], tuple[Identity | None, bool]]:
        """The call that writes what is not in the file yet: a file that may have only a part of what it should is replaced."""
        count = self._unwritten
        news = list(islice(self.events, len(self.events) - count, None))
        append = not self._lost and self._lines + count <= KEPT * 2
        return partial(_write_down, self._state_dir, list(self.events), news, append=append)

    async def _write(self) -> bool:
        """Writes what is not written yet. Returns whether that worked.

        While one write hangs no other is begun; what became of it is not known, so the file is replaced next.
        """
        count, added = self._unwritten, self._added
        try:
            self._file, appended = await self._writing.fresh(self._pending(), PATIENCE)
        except (OSError, TimeoutError) as error:
            if not self._refused:
                file = self._state_dir / FILE
                log.warning("%s cannot be written; a restart will not remember these events: %s", file, error)
            self._refused = True
            self._lines = KEPT * 2  # whatever is there now, it is replaced next
            return False
        finally:
            self._attempted = added
            self._attempt_ended.ring()
        self._refused = self._lost = False
        self._lines = self._lines + count if appended else min(KEPT, len(self.events))
        self._written = added
        return True

    async def save_within(self, seconds: float) -> None:
        """Write the events that are not in the file yet, for the end of the process. They are lost if it takes longer."""
        if not await settled(begin(self.save, "last-events"), seconds):
            log.warning("%s: the last events are lost: not written within %g s", self._state_dir / FILE, seconds)

    def save(self) -> None:
        """Writes down at once what is not in the file yet. Blocks, and never raises.

        What cannot be written is lost.
        """
        count, added = self._unwritten, self._added
        if not count and not self._lost:
            return
        try:
            self._file, _ = self._pending()()
        except Exception as error:  # noqa: BLE001 - the process ends, and what comes after this must be done all the same
            lost = len(self.events) if self._lost else count
            log.warning("%s cannot be written; %d events are lost: %s", self._state_dir / FILE, lost, error)
        else:
            self._written, self._lost = added, False


def _line(event: Event) -> bytes:
    return msgspec.json.encode(event) + b"\n"


def _write_down(
    state_dir: Path, events: Iterable[Event], news: Iterable[Event], *, append: bool
) -> tuple[Identity | None, bool]:
    """Appends the news to the file or, where that is not wanted or it would grow too large, replaces it by all events.

    Returns which file it is then, and whether it was appended to. Raises OSError.
    """
    appended = append and _append(state_dir, news)
    if not appended:
        _replace(state_dir, events)
    return identity(state_dir / FILE), appended


def _append(state_dir: Path, events: Iterable[Event]) -> bool:
    """Returns whether there was room for them. Raises OSError."""
    descriptor = open_own(state_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        content = b"".join(map(_line, events))
        if os.fstat(descriptor).st_size + len(content) > MAX_BYTES:
            return False
        if os.write(descriptor, content) != len(content):
            os.write(descriptor, b"\n")  # what was cut short is a line of its own, that nobody reads
            raise OSError(errno.ENOSPC, "not all of it could be written")
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
