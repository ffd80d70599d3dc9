"""The pages of the listener: what is known of the daemon when somebody asks, with calls of its own sockets.

Nothing here asks NVML or the file system. What costs something is kept for a second, so that it costs no more however
many ask.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
from anyio.lowlevel import checkpoint

from gpu_plugin.kubelet.self_call import PATIENCE, ShortageError, self_call
from gpu_plugin.telemetry.listener import checks
from gpu_plugin.telemetry.listener.answer import Answer, Page, Request
from gpu_plugin.telemetry.listener.checks import BEAT_INTERVAL, Facts, LoopLag
from gpu_plugin.telemetry.metrics.exposition import Format, wanted

FRESH = 1.0
"""Seconds for which an answer from our own sockets, and the text of the metrics, are good for others who ask."""

PIECE = 0.002
"""Seconds for which metrics are written at a stretch, and some lines more."""

LINES = 100
"""Lines that are made and written before anybody looks at the clock: 0.3 ms."""


class Probes:
    """Answers by path. Whom to ask may change: before the daemon is made, there is only what is waited for."""

    def __init__(self, facts: Callable[[], Facts]) -> None:
        self.facts = facts
        self.status: Callable[[], Awaitable[Mapping[str, Any]]] | None = None
        """Gives the daemon's status, as `NodeView.scraped` tells it; None before there is one."""
        self._beats = LoopLag()
        self._started_once = False
        self._called: tuple[float, Mapping[str, str], str] | None = None
        self._calling = anyio.Lock()
        self._told: dict[Format, tuple[float, Answer]] = {}
        self._telling = anyio.Lock()
        self._took: float | None = None

    @property
    def pages(self) -> Mapping[str, Page]:
        """The pages by path."""
        return {"/livez": self._live, "/readyz": self._ready, "/startupz": self._started, "/metrics": self._metrics}

    async def beat(self) -> None:
        """Notes that the event loop turns, and drops what is too old to be told again. Never returns."""
        while True:
            self._beats.beat(now := anyio.current_time())
            for form, (at, _) in list(self._told.items()):
                if now - at >= FRESH:
                    del self._told[form]  # megabytes, on a node with tens of thousands of devices
            await anyio.sleep(BEAT_INTERVAL)

    async def _live(self, _: Request) -> Answer:
        silent, unasked = await self._silent()
        now = anyio.current_time()
        return checks.live(self.facts(), now, silent, unasked, self._beats.longest(now))

    async def _ready(self, _: Request) -> Answer:
        return checks.ready(self.facts(), anyio.current_time())

    async def _started(self, _: Request) -> Answer:
        verdict = checks.started(self.facts(), self._started_once)
        self._started_once |= verdict.status == HTTPStatus.OK
        return verdict

    async def _metrics(self, request: Request) -> Answer:
        if self.status is None:
            return Answer(503, f"there are no metrics yet: {self.facts().awaited}\n")
        form = wanted(request.headers.get("accept", ""))
        async with self._telling:
            told = self._told.get(form)
            if told is None or anyio.current_time() - told[0] >= FRESH:
                status = {
                    **await self.status(),
                    "event_loop_lag": self._beats.lag.as_data(),
                    "scrape_seconds": self._took,
                }
                told = anyio.current_time(), Answer(200, await self._text(status, form), form.content_type)
                self._told[form] = told
            return told[1]

    async def _text(self, status: Mapping[str, Any], form: Format) -> str:
        """The metrics as text, made in pieces: between two of them the kubelet's calls are answered."""
        from gpu_plugin.telemetry.metrics.exposition import lines  # noqa: PLC0415
        from gpu_plugin.telemetry.metrics.families import families  # noqa: PLC0415 - who is not scraped does not pay for it

        pieces, took = [], 0.0
        began = time.perf_counter()
        for family in families(status):
            written = lines(family, form)
            while piece := list(islice(written, LINES)):
                pieces.append("\n".join(piece))
                if (now := time.perf_counter()) - began >= PIECE:
                    took += now - began
                    await checkpoint()
                    began = time.perf_counter()
        text = "\n".join((*pieces, form.end))
        self._took = took + time.perf_counter() - began
        return text

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
