"""The newest events of this node: changes of health, registrations, configuration, orders, starts, stops.

`gpu-plugin events` shows them. The newest `KEPT` events are in memory and in the state log.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path

import anyio
import msgspec

from gpu_plugin.runtime.printable import printable
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import SlowCall
from gpu_plugin.state.log import KEPT, Record, StateLog, read_log

log = logging.getLogger(__name__)

LONGEST = 300  # limit in characters for each text of an event
LONGEST_WORD = 60  # a longer word is cut where a text is shortened, a shorter one is dropped; a uuid has 40 characters
PATIENCE = 10.0  # seconds until a write is abandoned
WRITTEN_SOON = 1.0  # seconds that the reply to an order waits until the order is written
RETRY = 5.0  # seconds between a failed write and the next attempt, if there is no event before

LATEST = 253_402_300_800.0  # Unix time of the year 10000: Python's datetime cannot represent later times


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
    """Return the events of the state log, oldest first, and the number of its unreadable lines. Blocks.

    Raises:
        OSError: the log does not exist or cannot be read.
    """
    content = read_log(state_dir)
    for error in content.errors.values():
        raise error
    if not any(content.ends):
        raise FileNotFoundError(f"{state_dir} has no state log")
    return _events(content.events), content.unreadable


def _events(records: Iterable[Record]) -> list[Event]:
    """Return the valid events."""
    return [event for record in records if (event := _parsed(record.content)) is not None]


def _parsed(content: bytes) -> Event | None:
    """Return the event of a record; None if it is invalid."""
    try:
        event = msgspec.json.decode(content.decode(), type=Event)  # msgspec ignores an unknown key with invalid UTF-8
    except (ValueError, RecursionError):
        return None
    return bounded(event) if 0 <= event.at < LATEST else None


class EventStore:
    """Stores events in memory. `run` writes them to the state log. Use it on the event loop's thread.

    Attributes:
        events: the newest events, oldest first.
        news: rings at each event.
    """

    def __init__(self, state_log: StateLog, clock: Callable[[], float]) -> None:
        """`clock` returns Unix time in seconds."""
        self.events: deque[Event] = deque(maxlen=KEPT)
        self.news = Pulse()
        self._log = state_log
        self._clock = clock
        self._added = 0
        self._written = 0
        """Number of events since the start (`_added`), and how many of them are in the log. A thread sets `_written`."""
        self._attempt_ended = Pulse()
        self._attempted = 0
        """Number of events since the start at the time of the last attempt to write them, successful or not."""
        self._refused = False
        self._running = False
        self._writing: SlowCall[bool] = SlowCall("events")

    def recall(self, records: Iterable[Record]) -> None:
        """Add the events of an earlier process before the events of this process."""
        self.events.extendleft(islice(reversed(_events(records)), KEPT - len(self.events)))

    def add(self, kind: str, text: str, **fields: object) -> None:
        """Add an event that happened now. `fields` are fields of `Event`."""
        event = bounded(Event(self._clock(), kind, text, **fields))  # type: ignore[arg-type] # checked when the log is read
        self.events.append(event)
        self._added += 1
        self.news.ring()

    @property
    def trouble(self) -> str:
        """A sentence if events cannot be written; empty otherwise."""
        return "events cannot be written: the latest would be lost at a restart" if self._refused else ""

    @property
    def writes(self) -> bool:
        """True while a write runs, even if it hangs."""
        return self._writing.under_way

    async def hanging_write(self) -> None:
        """Wait until a running write has returned."""
        await self._writing.wait()

    async def written(self, seconds: float = WRITTEN_SOON) -> bool:
        """Wait until all present events are written, for at most `seconds`, or until a write fails. Return True if they are."""
        added = self._added
        if self._running:
            with anyio.move_on_after(seconds):
                while self._attempted < added:
                    await self._attempt_ended.wait()
        return self._written >= added

    async def run(self) -> None:
        """Write new events to the log. Retry a failed write at the next event or after `RETRY`. Never returns."""
        self._running = True
        try:
            while True:
                if self._written >= self._added:
                    self._refused = False  # a write that took longer than its patience may have ended since
                    await self.news.wait()
                elif not await self._write(PATIENCE) and self._attempted == self._added:
                    await self.news.wait(RETRY)
        finally:
            self._running = False

    async def save_within(self, seconds: float) -> None:
        """Write the missing events at the end of the process. They are lost if the write takes longer than `seconds`."""
        if self._written < self._added and not await self._write(seconds):
            log.warning(
                "%s: the last events are lost: their write failed or took longer than %g s",
                self._log.state_dir,
                seconds,
            )

    async def _write(self, seconds: float) -> bool:
        """Write the missing events. Return True on success. While a write hangs, no other write begins."""
        added = self._added
        try:
            written = await self._writing.fresh(partial(self._append, tuple(self.events), added), seconds)
        except Exception as error:  # noqa: BLE001 - any error means that the events are not written
            if not self._refused:
                log.warning("events cannot be written to %s: %s", self._log.state_dir, error)
            written = False
        finally:
            self._attempted = added
            self._attempt_ended.ring()
        self._refused = not written
        return written

    def _append(self, events: tuple[Event, ...], added: int) -> bool:
        """Write those events that are not in the log yet. `added` is the number of the newest. Blocks."""
        for number, event in enumerate(events, added - len(events) + 1):
            if number > self._written:
                if not self._log.add_event(event):
                    return False
                self._written = number
        return True
