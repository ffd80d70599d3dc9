"""Writes Kubernetes Events: whoever tells something never waits, and what is not written yet is bounded."""

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

MAX_WAITING: Final = 512
"""Events that wait to be written at most; of more, the oldest are let go."""

# Seconds until a server that cannot be asked is asked again: at first, and at most.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0

MAX_TRIES = 4
"""How often an Event is refused until it is let go: an API server that has just started refuses what it soon allows."""

MAX_TRIES_UNAVAILABLE = 20
"""How often it is tried where the server itself is in trouble, as a webhook may be that is asked about one namespace alone."""

UID_SECONDS = 600.0
"""Seconds for which the uid of a pod is taken for the same: another pod may have its name since."""

_TRANSIENT = frozenset({"connection", "name", "credentials", "answer", "length", "401", "408", "429"})
"""What goes away by itself; anything else may be of this one Event, such as a namespace that is being removed."""


class EventWriter:
    """Takes news in, puts together what is the same, and writes one Event after the other.

    Attributes:
        written: Events that were made or changed.
        dropped: Events that were let go, because they were too many or the API server refused them.
    """

    def __init__(
        self,
        api: NodeApi,
        clock: Callable[[], float] = time.monotonic,
        dice: Callable[[], float] = random.random,
    ) -> None:
        """Takes the API, a steady clock in seconds, and a throw of dice in [0, 1)."""
        self.written = 0
        self._troubles: dict[str, str] = {}
        self._lost = 0
        self._api = api
        self._clock = clock
        self._dice = dice
        self._correlator = Correlator()
        self._waiting: OrderedDict[str, EventRecord] = OrderedDict()
        self._made: OrderedDict[str, str] = OrderedDict()
        """Names of Events that were made, and the uids of what they are about."""
        self._uids: OrderedDict[Object, tuple[str, float]] = OrderedDict()
        self._refused: dict[str, tuple[int, int]] = {}
        """How often an Event was refused, and how many were written when that began."""
        self._bell = Pulse()

    @property
    def trouble(self) -> str:
        """Why the newest attempts failed, of each kind of object that Events are about; empty where they did not."""
        return "; ".join(dict.fromkeys(self._troubles.values()))

    @property
    def dropped(self) -> int:
        """Events that were let go."""
        return self._lost + self._correlator.dropped

    @property
    def waiting(self) -> int:
        """Events that are not written yet."""
        return len(self._waiting)

    def tell(self, news: EventContent) -> None:
        """Has these news written soon, or counted in the Event that has the same. From the event loop's thread."""
        told = self._correlator.judge(news, self._clock())
        if told is None:
            return
        self._waiting[told.name] = told  # what waits under this name is in it
        while len(self._waiting) > MAX_WAITING:
            name, _ = self._waiting.popitem(last=False)
            self._refused.pop(name, None)
            self._lost += 1
        self._bell.ring()

    async def run(self) -> None:
        """Writes what there is, the oldest first. Never returns."""
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
                    self._say("", str(error))
                await anyio.sleep(backoff.failed(self._clock(), self._dice()))

    async def _write_oldest(self) -> None:
        """Writes the oldest. Raises UnreachableError where the server cannot be asked, or this Event has tries left."""
        name, told = next(iter(self._waiting.items()))
        about = told.news.about.kind
        try:
            await self._write(told)
        except UnreachableError as error:
            self._say(about, str(error))
            if self._has_tries_left(name, error.kind):
                raise
            self._lost += 1
        else:
            if any(self._troubles.pop(each, "") for each in ("", about)) and not self._troubles:
                log.info("Kubernetes Events are written again")
        self._refused.pop(name, None)
        if self._waiting.get(name) is told:  # else there was more of it meanwhile
            del self._waiting[name]

    def _has_tries_left(self, name: str, kind: str) -> bool:
        """Whether the Event is tried again; what was in vain for long waits behind the others, which may fare better."""
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

    async def _write(self, told: EventRecord) -> None:
        uid = await self._uid(told.news.about)
        if uid is None:
            return
        if self._made.get(told.name, uid) != uid:
            self._correlator.forget(told.news.about)
            self.tell(told.news)
            return
        if told.name not in self._made or not await self._api.count_event(told.namespace, told.name, told.changes()):
            await self._api.create_event(told.namespace, told.document(self._api.node_name, uid))
            keep(self._made, told.name, uid)
        self.written += 1

    async def _uid(self, about: Object) -> str | None:
        """The uid of what an Event is about; None: it is a pod that is gone."""
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

    def _say(self, about: str, trouble: str) -> None:
        level = logging.DEBUG if about in self._troubles else logging.WARNING
        self._troubles[about] = trouble
        log.log(level, "Kubernetes Events cannot be written: %s", trouble)
