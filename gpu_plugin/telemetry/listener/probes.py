"""The pages for probes and metrics: answers from the daemon's present state, with calls to its own sockets.

Nothing here calls NVML or reads files. Expensive results are kept for a second, so that more requests do not cost more.
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint

from gpu_plugin.kubelet.self_call import PATIENCE, ShortageError, self_call
from gpu_plugin.telemetry.listener import checks
from gpu_plugin.telemetry.listener.answer import Answer, Page, Request
from gpu_plugin.telemetry.listener.checks import BEAT_INTERVAL, Facts, LoopLag
from gpu_plugin.telemetry.metrics.exposition import Format, wanted

if TYPE_CHECKING:
    from gpu_plugin.status.model import Status
    from gpu_plugin.telemetry.metrics.families import Held

FRESH = 1.0  # seconds for which the results of calls to our own sockets, and the text of the metrics, are reused
PIECE = 0.002  # seconds for which metrics are written without a pause, apart from a few lines
LINES = 100  # number of lines that are written between two checks of the clock: 0.3 ms


class Probes:
    """Answers by path. The sources may change: before the daemon is made, only the awaited configuration is known."""

    def __init__(self, facts: Callable[[], Facts]) -> None:
        self.facts = facts
        # Returns the daemon's status and the devices that containers hold; None before there is a daemon.
        self.status: Callable[[], Awaitable[tuple[Status, Iterable[Held]]]] | None = None
        self._beats = LoopLag()
        self._started_once = False
        self._called: tuple[float, Mapping[str, str], str] | None = None
        self._calling = anyio.Lock()
        self._rendered: dict[Format, tuple[float, Answer]] = {}
        self._rendering = anyio.Lock()
        self._scrape_seconds: float | None = None

    @property
    def pages(self) -> Mapping[str, Page]:
        """The pages by path."""
        return {"/livez": self._live, "/readyz": self._ready, "/startupz": self._started, "/metrics": self._metrics}

    async def beat(self) -> None:
        """Record beats of the event loop, and drop outdated texts of metrics. Never returns."""
        while True:
            self._beats.beat(now := anyio.current_time())
            for form, (at, _) in list(self._rendered.items()):
                if now - at >= FRESH:
                    del self._rendered[form]  # megabytes on a node with tens of thousands of devices
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
        async with self._rendering:
            answer = self._rendered.get(form)
            if answer is None or anyio.current_time() - answer[0] >= FRESH:
                status, held = await self.status()
                answer = anyio.current_time(), Answer(200, await self._text(status, held, form), form.content_type)
                self._rendered[form] = answer
            return answer[1]

    async def _text(self, status: "Status", held: "Iterable[Held]", form: Format) -> str:
        """Return the metrics as text. It is made in pieces, between which the kubelet's calls are answered."""
        from gpu_plugin.telemetry.metrics.exposition import lines  # noqa: PLC0415
        from gpu_plugin.telemetry.metrics.families import families  # noqa: PLC0415 - imported only if used

        pieces, took = [], 0.0
        began = time.perf_counter()
        for family in families(status, held, self._beats.lag.as_data(), self._scrape_seconds):
            written = lines(family, form)
            while piece := list(islice(written, LINES)):
                pieces.append("\n".join(piece))
                if (now := time.perf_counter()) - began >= PIECE:
                    took += now - began
                    await checkpoint()
                    began = time.perf_counter()
        text = "\n".join((*pieces, form.end))
        self._scrape_seconds = took + time.perf_counter() - began
        return text

    async def _silent(self) -> tuple[Mapping[str, str], str]:
        """Return why our own sockets do not answer, by resource, and why some could not be called.

        The result of one call is used for all requests within a second.
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
        standings = self.facts().standings  # ignore sockets that were closed during the calls
        there = {name for name, socket in sockets.items() if name in standings and standings[name].socket == socket}
        return {name: why for name, why in found.items() if why and name in there}, unasked
