"""The driver calls and the time of the monitor's rounds, and the cost of many Xids. In this process."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from bench.plan import PATIENCE, MeasurementError, Plan
from bench.process import PROFILE
from bench.quantiles import median, percentile
from bench.table import Row
from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.reported_errors import ReportedErrors
from gpu_plugin.devices.node import Node
from gpu_plugin.devices.nvml_h import EventType
from gpu_plugin.health.observation import Observation, Sample
from gpu_plugin.nvml import questions
from gpu_plugin.nvml.monitor import Monitor
from gpu_plugin.nvml.port import Event, EventSet
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost
from gpu_plugin.simulation.profile import load

STANDING = "wait"
"""nvmlEventSetWait_v2. A thread makes this call all the time, so it is not counted."""

SEVERAL = {"pcie_link": 2}
"""The number of NVML calls of a driver method, if it makes several."""

SIXTEEN = "dgx2-16"
SLOW = 0.1
"""The least number of seconds of each check on a node with slow GPUs."""

XID = 31
"""An Xid that applications cause, often many times a second."""

RATE = 100
"""Xids in each second."""

STORM = 10.0
"""The length of the storm of Xids in seconds."""


class TimedDriver(SimulatedDriver):
    """Measures the CPU time of its wait for events in seconds, which is Python here and a short C call in NVML."""

    waited = 0.0

    def wait(self, events: EventSet, timeout_ms: int) -> Event:
        """Wait like a simulated driver."""
        began = time.thread_time()
        try:
            return super().wait(events, timeout_ms)
        finally:
            self.waited += time.thread_time() - began


class Watched:
    """A monitor on a simulated node with the daemon's health watch. `samples` counts the samples of each GPU."""

    def __init__(self, profile: str, *, poll: float, latency: Mapping[str, float] | None = None) -> None:
        self.node = SimulatedNode(load(profile))
        self.driver = TimedDriver(self.node, latency=latency)
        self.health = HealthWatch(resolve({}, {}), self.node.boot_id, Pulse(), ReportedErrors())
        self.samples: dict[str, int] = {gpu.uuid: 0 for gpu in self.node.profile.gpus}
        self.news = asyncio.Event()
        self.others = 0
        host = SimulatedHost(self.node)
        self.monitor = Monitor(self.driver, host, poll, PATIENCE, (), self._observe, self._found, met=self.health.watch)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open the monitor and run it until the context ends."""
        await self.monitor.open()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.monitor.run)
            yield
            tasks.cancel_scope.cancel()

    async def looked(self, count: int) -> None:
        """Wait until each GPU has been checked this number of times."""
        with anyio.fail_after(PATIENCE):
            while min(self.samples.values()) < count:
                self.news.clear()
                await self.news.wait()

    def calls(self) -> int:
        """Return the number of NVML calls so far."""
        counted = self.driver.calls
        return sum(number * SEVERAL.get(call, 1) for call, number in counted.items() if call != STANDING)

    def _observe(self, uuid: str, seen: Observation) -> bool:
        if isinstance(seen, Sample):
            self.samples[uuid] += 1
        else:
            self.others += 1
        self.news.set()
        return self.health.observe(uuid, seen)

    def _found(self, node: Node) -> None:
        self.health.watch(node.gpus, node.driver_version)


def measure(plan: Plan, directory: Path) -> list[Row]:
    """Measure the three figures."""
    del directory
    steady = anyio.run(
        _steady, 2 * questions.TURNS
    )  # as the daemon runs, so that anyio knows its loop in every callback
    slow = anyio.run(_slow, plan.rounds)
    share, late, others = anyio.run(_storm)
    return [
        Row(
            "a steady round of 8 GPUs",
            "calls",
            len(steady),
            sum(steady) / len(steady),
            max(steady),
            60,
            note=f"p99 is the most; each slow question is asked in one look of {questions.TURNS}",
            series={"calls": steady},
        ),
        Row(
            f"a round of 16 GPUs, {SLOW:g} s a look",
            "ms",
            len(slow),
            median(slow),
            percentile(slow, 99),
            3000 * SLOW,
            note="100 ms of it pass before the round; one after the other, the looks take 1,600 ms",
            series={"ms": slow},
        ),
        Row(
            f"{RATE} Xids/s on one GPU",
            "% core",
            1,
            share,
            budget=2,
            note=f"{others} looks at other GPUs, {late:.1f} looks a second at its own",
        ),
    ]


async def _steady(rounds: int) -> list[float]:
    """Return the number of NVML calls of each round."""
    watched, counted = Watched(PROFILE, poll=0.001), []
    async with watched.running():
        await watched.looked(3)
        for _ in range(rounds):
            before = watched.calls()
            await watched.looked(min(watched.samples.values()) + 1)
            counted.append(float(watched.calls() - before))
    return counted


async def _slow(rounds: int) -> list[float]:
    """Return the milliseconds from the request to check every GPU to the last check, for each round."""
    watched, taken = Watched(SIXTEEN, poll=3600.0, latency={"temperature": SLOW}), []
    async with watched.running():
        await watched.looked(2)
        for _ in range(rounds):
            seen = max(watched.samples.values())
            await anyio.sleep(0.2)  # the rest of a round after the last check, and the gap before the next round
            began = time.perf_counter()
            watched.monitor.look_now()
            await watched.looked(seen + 1)
            taken.append((time.perf_counter() - began) * 1000)
    return taken


async def _storm() -> tuple[float, float, int]:
    """Return the share of a core during the storm in %, the checks of the GPU in each second, and the checks of other GPUs."""
    watched = Watched(PROFILE, poll=3600.0)
    own: list[float] = []

    def post() -> None:
        began = time.perf_counter()
        for number in range(int(RATE * STORM)):
            time.sleep(max(0.0, began + number / RATE - time.perf_counter()))
            watched.node.post(0, EventType.XID_CRITICAL, XID)
        own.append(time.thread_time())

    async with watched.running():
        await watched.looked(2)
        await anyio.sleep(0.2)
        before, events = dict(watched.samples), watched.others
        logging.getLogger("gpu_plugin").setLevel(logging.CRITICAL)  # the cost of a log line depends on its destination
        used, began = time.process_time() - watched.driver.waited, time.perf_counter()
        poster = threading.Thread(target=post)
        poster.start()
        await anyio.to_thread.run_sync(poster.join)
        used = time.process_time() - watched.driver.waited - used - own[0]
        took = time.perf_counter() - began
        if watched.others - events < 0.95 * RATE * STORM:
            raise MeasurementError(f"{watched.others - events} of {RATE * STORM:.0f} Xids were observed")
        first, *rest = (watched.samples[uuid] - seen for uuid, seen in before.items())
    return used / took * 100, first / took, sum(rest)
