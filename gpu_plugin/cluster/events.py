"""Writes Kubernetes Events from a bounded queue. A caller that reports an Event never waits."""

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import anyio

from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.correlation import Correlator, EventContent, EventRecord, Object, keep
from gpu_plugin.cluster.node_api import NodeApi
from gpu_plugin.runtime.backoff import IN_CLUSTER, Backoff
from gpu_plugin.runtime.pulse import Pulse

log = logging.getLogger(__name__)

MAX_WAITING: Final = 512  # Events in the queue; the oldest Events above it are dropped

# Seconds until the next attempt while the server cannot be reached: at first, and at most.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0

# Refusals after which an Event is dropped. A single refusal means little: a new API server refuses valid requests at first.
MAX_TRIES = 4
MAX_TRIES_UNAVAILABLE = 20  # if the server itself fails (HTTP 5xx), for example a webhook for one namespace

UID_SECONDS = 600.0  # until a pod's uid is read again: a new pod may have the same name

# Kinds of errors that end without a change to the Event. Any other error may concern only this Event, such as a namespace
# under deletion.
_TRANSIENT = frozenset({"connection", "name", "credentials", "answer", "length", "401", "408", "429"})


class EventWriter:
    """Accepts reports, combines equal reports, and writes one Event after the other.

    Attributes:
        written: the number of Events that were created or changed.
        dropped: the number of Events that were dropped because of a limit or because the API server refused them.
    """

    def __init__(
        self,
        api: NodeApi,
        clock: Callable[[], float] = time.monotonic,
        dice: Callable[[], float] = random.random,
    ) -> None:
        """`clock` returns seconds of a monotonic clock, `dice` a random number in [0, 1)."""
        self.written = 0
        self.dropped = 0
        self._troubles: dict[str, str] = {}  # by the kind of the object
        self._api = api
        self._clock = clock
        self._dice = dice
        self._correlator = Correlator()
        self._waiting: OrderedDict[str, EventRecord] = OrderedDict()  # by the Event's name
        self._created: OrderedDict[str, str] = OrderedDict()  # the uid of the object, by the name of its created Event
        self._uids: OrderedDict[Object, tuple[str, float]] = OrderedDict()  # and the time of the reading
        # For each refused Event: the number of refusals, and the value of `written` at the first refusal.
        self._refused: dict[str, tuple[int, int]] = {}
        self._bell = Pulse()

    @property
    def trouble(self) -> str:
        """Why the newest attempt failed, for each kind of object; empty if no attempt failed."""
        return "; ".join(dict.fromkeys(self._troubles.values()))

    @property
    def waiting(self) -> int:
        """The number of Events that are not written yet."""
        return len(self._waiting)

    def tell(self, news: EventContent) -> None:
        """Queue a report as a new Event or as a count of an equal Event. Call it from the event loop's thread."""
        record = self._correlator.judge(news, self._clock())
        if record is None:
            self.dropped += 1
            return
        self._waiting[record.name] = record  # its count includes a queued record of the same name
        while len(self._waiting) > MAX_WAITING:
            name, _ = self._waiting.popitem(last=False)
            self._refused.pop(name, None)
            self.dropped += 1
        self._bell.ring()

    async def run(self) -> None:
        """Write the queued Events, the oldest first. Never returns."""
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, IN_CLUSTER)
        while True:
            if not self._waiting:
                await self._bell.wait()
                continue
            try:
                async with self._api.session():
                    while self._waiting:
                        await self._write_oldest()
                        backoff.succeeded()
            except UnreachableError as error:
                if not self._troubles:
                    self._log_trouble("", str(error))
                await anyio.sleep(backoff.failed(self._clock(), self._dice()))

    async def _write_oldest(self) -> None:
        """Write the oldest Event. Raises UnreachableError if writing failed and the Event has tries left."""
        name, record = next(iter(self._waiting.items()))
        about = record.news.about.kind
        try:
            await self._write(record)
        except UnreachableError as error:
            self._log_trouble(about, str(error))
            if self._has_tries_left(name, error.kind):
                raise
            self.dropped += 1
        else:
            if any(self._troubles.pop(each, "") for each in ("", about)) and not self._troubles:
                log.info("Kubernetes Events are written again")
        self._refused.pop(name, None)
        if self._waiting.get(name) is record:  # else a newer report replaced it while this request ran
            del self._waiting[name]

    def _has_tries_left(self, name: str, kind: str) -> bool:
        """Whether to try this Event again. After MAX_TRIES server errors (HTTP 5xx) it moves to the end of the queue."""
        if kind in _TRANSIENT:
            return True
        tries, written = self._refused.get(name, (0, self.written))
        tries += 1
        self._refused[name] = tries, written
        if not kind.startswith("5"):
            return tries < MAX_TRIES
        if tries >= MAX_TRIES:
            self._waiting.move_to_end(name)
        its_own = kind == str(HTTPStatus.INTERNAL_SERVER_ERROR.value) or self.written > written
        return tries < MAX_TRIES_UNAVAILABLE or not its_own

    async def _write(self, record: EventRecord) -> None:
        uid = await self._uid(record.news.about)
        if uid is None:
            return
        if self._created.get(record.name, uid) != uid:
            self._correlator.reset(record.news.about)
            self.tell(record.news)
            return
        exists = record.name in self._created
        if not exists or not await self._api.count_event(record.namespace, record.name, record.changes()):
            await self._api.create_event(record.namespace, record.document(self._api.node_name, uid))
            keep(self._created, record.name, uid)
        self.written += 1

    async def _uid(self, about: Object) -> str | None:
        """Return the uid of an Event's object; None if it is a pod and is gone."""
        if about.uid:
            return about.uid
        now = self._clock()
        known = self._uids.get(about)
        if known is not None and now - known[1] < UID_SECONDS:
            return known[0]
        uid = await self._api.pod_uid(about.namespace, about.name)
        self._uids.pop(about, None)
        if uid is not None:
            keep(self._uids, about, (uid, now))
        return uid

    def _log_trouble(self, about: str, trouble: str) -> None:
        level = logging.DEBUG if about in self._troubles else logging.WARNING
        self._troubles[about] = trouble
        log.log(level, "Kubernetes Events cannot be written: %s", trouble)
