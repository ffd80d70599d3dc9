"""The pages of the listener: what is known of the daemon when somebody asks, with calls of its own sockets.

Nothing here asks NVML or the file system. What costs something is kept for a second, so that it costs no more however
many ask.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from gpu_plugin.kubelet.self_call import PATIENCE, ShortageError, self_call
from gpu_plugin.listener import checks
from gpu_plugin.listener.answer import METRICS, Answer, Page, Request
from gpu_plugin.listener.checks import BEAT, Beats, Facts, Verdict
from gpu_plugin.telemetry.metrics import metrics

FRESH = 1.0
"""Seconds for which an answer from our own sockets, and the text of the metrics, are good for others who ask."""


class Probes:
    """Answers by path. Whom to ask may change: before the daemon is made, there is only what is waited for."""

    def __init__(self, facts: Callable[[], Facts]) -> None:
        self.facts = facts
        self.status: Callable[[], Mapping[str, Any]] | None = None
        """The daemon's status, as `gpu-plugin status` gets it; None before there is one."""
        self._beats = Beats()
        self._started_once = False
        self._called: tuple[float, Mapping[str, str], str] | None = None
        self._calling = anyio.Lock()
        self._told: tuple[float, Answer] | None = None

    @property
    def pages(self) -> Mapping[str, Page]:
        """The pages by path."""
        return {"/livez": self._live, "/readyz": self._ready, "/startupz": self._started, "/metrics": self._metrics}

    async def beat(self) -> None:
        """Notes that the event loop turns. Never returns."""
        while True:
            self._beats.beat(anyio.current_time())
            await anyio.sleep(BEAT)

    async def _live(self, _: Request) -> Answer:
        silent, unasked = await self._silent()
        now = anyio.current_time()
        return _told(checks.live(self.facts(), now, silent, unasked, self._beats.longest(now)))

    async def _ready(self, _: Request) -> Answer:
        return _told(checks.ready(self.facts(), anyio.current_time()))

    async def _started(self, _: Request) -> Answer:
        verdict = checks.started(self.facts(), self._started_once)
        self._started_once |= verdict.passed
        return _told(verdict)

    async def _metrics(self, _: Request) -> Answer:
        if self.status is None:
            return Answer(503, f"there are no metrics yet: {self.facts().awaited}\n")
        now = anyio.current_time()
        if self._told is None or now - self._told[0] >= FRESH:
            self._told = now, Answer(200, "\n".join(metrics(self.status())) + "\n", METRICS)
        return self._told[1]

    async def _silent(self) -> tuple[Mapping[str, str], str]:
        """Why our own sockets do not answer, by resource, and why some could not be asked.

        They are asked once for all who want to know within a second.
        """
        async with self._calling:
            if self._called is None or anyio.current_time() - self._called[0] >= FRESH:
                silent, unasked = await self._call_all()
                self._called = anyio.current_time(), silent, unasked
            return self._called[1:]

    async def _call_all(self) -> tuple[Mapping[str, str], str]:
        standings = self.facts().standings
        sockets = {name: standing.socket for name, standing in standings.items() if standing.socket is not None}
        found = dict.fromkeys(sockets, f"no answer within {PATIENCE:g} s")
        unasked = ""

        async def call(name: str, socket: Path) -> None:
            nonlocal unasked
            try:
                found[name] = await self_call(socket)
            except ShortageError as error:
                unasked, found[name] = str(error), ""

        with anyio.move_on_after(PATIENCE):
            async with anyio.create_task_group() as calls:
                for name, socket in sockets.items():
                    calls.start_soon(partial(call, name, socket))
        standings = self.facts().standings  # a socket that was given up meanwhile need not have answered
        there = {name for name, socket in sockets.items() if name in standings and standings[name].socket == socket}
        return {name: why for name, why in found.items() if why and name in there}, unasked


def _told(verdict: Verdict) -> Answer:
    return Answer(200 if verdict.passed else 503, verdict.text)
