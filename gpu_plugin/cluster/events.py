"""Writes Kubernetes Events: whoever tells something never waits, and what is not written yet is bounded."""

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import anyio

from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.correlation import REMEMBERED, Correlator, News, Told
from gpu_plugin.cluster.node_api import NodeApi
from gpu_plugin.pulse import Pulse

log = logging.getLogger(__name__)

MOST: Final = 256
"""Events that wait to be written at most; of more, the oldest are let go."""

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds until a server that cannot be asked is asked again: at first, and at most."""

TRIES = 4
"""How often an Event is refused until it is let go: an API server that has just started refuses what it soon allows."""

_LATER = frozenset({"connection", "name", "credentials", "answer", "length", "401", "408", "429"})
"""What goes away by itself; anything else may be of this one Event, such as a namespace that is being removed."""


class EventWriter:
    """Takes news in, puts together what is the same, and writes one Event after the other.

    Attributes:
        trouble: why the newest attempt failed; empty where it did not.
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
        self.trouble = ""
        self.written = 0
        self._lost = 0
        self._api = api
        self._clock = clock
        self._dice = dice
        self._correlator = Correlator()
        self._waiting: OrderedDict[str, Told] = OrderedDict()
        self._made: OrderedDict[str, None] = OrderedDict()
        self._refused: dict[str, int] = {}
        self._bell = Pulse()

    @property
    def dropped(self) -> int:
        """Events that were let go."""
        return self._lost + self._correlator.dropped

    @property
    def waiting(self) -> int:
        """Events that are not written yet."""
        return len(self._waiting)

    def tell(self, news: News) -> None:
        """Has these news written soon, or counted in the Event that has the same. From the event loop's thread."""
        told = self._correlator.judge(news, self._clock())
        if told is None:
            return
        self._waiting[told.name] = told  # what waits under this name is in it
        while len(self._waiting) > MOST:
            self._waiting.popitem(last=False)
            self._lost += 1
        self._bell.ring()

    async def run(self) -> None:
        """Writes what there is, the oldest first. Never returns."""
        failures = 0
        while True:
            if not self._waiting:
                await self._bell.wait()
                continue
            try:
                async with self._api.session():
                    while self._waiting:
                        await self._write_oldest()
                        failures = 0
            except UnreachableError as error:
                failures += 1
                self._say(str(error))
                pause = min(FIRST_PAUSE * 2.0 ** min(failures - 1, 16), LONGEST_PAUSE)
                await anyio.sleep(pause * (1 + self._dice() / 2))

    async def _write_oldest(self) -> None:
        """Writes the oldest. Raises UnreachableError where the server cannot be asked; then it still waits."""
        name, told = next(iter(self._waiting.items()))
        try:
            await self._write(told)
        except UnreachableError as error:
            if error.kind in _LATER or error.kind.startswith("5"):
                raise
            self._refused = {name: self._refused.get(name, 0) + 1}
            if self._refused[name] < TRIES:
                raise
            self._lost += 1
            self._say(str(error))
        else:
            self.written += 1
            if self.trouble:
                log.info("Kubernetes Events are written again")
            self.trouble = ""
        if self._waiting.get(name) is told:  # else there was more of it meanwhile
            del self._waiting[name]

    async def _write(self, told: Told) -> None:
        if told.name in self._made and await self._api.count_event(told.namespace, told.name, told.changes()):
            return
        await self._api.create_event(told.namespace, told.document(self._api.node_name))
        self._made[told.name] = None
        while len(self._made) > REMEMBERED:
            self._made.popitem(last=False)

    def _say(self, trouble: str) -> None:
        level = logging.DEBUG if self.trouble else logging.WARNING
        self.trouble = trouble
        log.log(level, "Kubernetes Events cannot be written: %s", trouble)
