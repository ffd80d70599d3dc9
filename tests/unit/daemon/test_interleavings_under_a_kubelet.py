"""Kubelet restarts, our own, MIG partitions, names, sharing, and pods that come and go, in any order, with everything real.

The offering, the holders, the inventory and the endpoints run as the daemon has them, over sockets and files, under the
stand-in kubelet, on a loop that waits for nothing. `test_interleavings` has many more, of the decisions alone.
"""

import asyncio
import dataclasses
import logging
import os
import random
import sys
from collections.abc import Callable
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from demo.stand_in_kubelet import AdmissionError, Container, StandInKubelet
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.daemon.offering import Offering
from gpu_plugin.devices.device import Resource
from gpu_plugin.health.latch import Health
from gpu_plugin.kubelet import checkpoint, endpoint, holders
from gpu_plugin.kubelet.directory import watch
from gpu_plugin.kubelet.endpoint import Endpoints, Shared
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.service import DevicePluginService
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import Job
from tests.unit.daemon.calling_pulse import CallingPulse
from tests.unit.daemon.skipping_loop import SkippingLoop
from tests.unit.kubelet.changing_node import (
    LAYOUTS,
    NAMES,
    SHARED,
    Situation,
    as_remembered,
    held_twice,
    offered,
    overfull,
)

SEEDS = int(os.environ.get("GPU_PLUGIN_SEEDS", "16"))
"""How many lives are tried; a thousand take minutes."""

BATCHES = 4
STEPS = 30

BACK = 30.0
"""Seconds after the last pod's end within which all capacity must be back."""

UNREADABLE = 4.0
"""Seconds for which the checkpoint cannot be read at most: after more, a daemon begins without it."""

SLOW = ((0.0, 0.0), (0.0, 0.0), (0.0, 0.7), (0.7, 0.0))
"""Seconds that a reading of the checkpoint may take before the file is read and after."""


class OnTheLoop:
    """Begins calls on the event loop: on a loop that skips time, a thread's work would seem to take no time.

    Some of it takes its time before it is done, some after.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, call: Callable[[], object], _name: str) -> Job[object]:
        job = Job(call, asyncio.get_running_loop())
        task = asyncio.get_running_loop().create_task(self._work(job, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    async def _work(self, job: Job[object], call: Callable[[], object]) -> None:
        before, after = random.choice(SLOW)
        await anyio.sleep(before)
        try:
            read = call()
        except checkpoint.CheckpointError as error:
            await anyio.sleep(after)
            job.settle(None, error)
        else:
            await anyio.sleep(after)
            job.done.set_result(read)


class Life:
    """A node: one kubelet, and one process of ours after the other."""

    def __init__(self, seed: int, directory) -> None:
        self.dice = random.Random(seed)
        self.kubelet = StandInKubelet(directory, clock=anyio.current_time, seed=seed)
        self.kubelet._pod_resources._clock = anyio.current_time  # limits the rate of calls
        # A list that is sent again may have no effect while the checkpoint cannot be read. This is not tested here.
        self.kubelet._checkpoint.wants_list = lambda tables: True  # type: ignore[method-assign]
        socket = self.kubelet.pod_resources_socket
        self.settings = resolve({"device_plugin_dir": str(directory), "pod_resources_socket": str(socket)}, {})
        self.situation = Situation()
        self.remembered: tuple[tuple[Resource, ...], tuple[Resource, ...]] = ((), ())
        self.lost = False
        self.unreadable_until = -UNREADABLE
        self.trace: list[str] = []
        self.pods = 0

    async def run(self) -> None:
        async with self.kubelet, anyio.create_task_group() as tasks:
            self.tasks = tasks
            self.begin()
            for _ in range(STEPS):
                await anyio.sleep(self.dice.choice([0.0, 0.0, 0.1, 2.0, 4.0]))
                await self.step()
                self.check()
            await self.all_back()
            await self.end()
        await anyio.sleep(1)  # closed sockets notify the loop

    def begin(self) -> None:
        """A new process of the plugin, with the stored state of the former process."""
        store, look = SnapshotStore(), Pulse()
        self.inventory = Inventory(store, lambda _gpu, _visible: Health())
        self.inventory.remember(*(tuple(map(as_remembered, known)) for known in self.remembered))
        registrations = Registrations()
        self.offering = Offering(
            self.inventory, SettingsStore(self.settings), CallingPulse(self.published), registrations
        )
        endpoints = Endpoints(
            Shared(store, self.kubelet.socket, self.kubelet.directory, look, registrations=registrations)
        )
        self.offering.publish(offered(self.situation))
        self.over, self.ended = anyio.CancelScope(), anyio.Event()

        async def live() -> None:
            with self.over:
                async with anyio.create_task_group() as parts:
                    parts.start_soon(self.offering.settle)
                    parts.start_soon(endpoints.run)
                    parts.start_soon(watch, self.kubelet.directory, look)
            self.ended.set()

        self.tasks.start_soon(live)

    async def end(self) -> None:
        self.over.cancel()
        await self.ended.wait()

    def published(self) -> None:
        if self.dice.random() < 0.9:  # or it is killed before this write
            self.remembered = self.inventory.listed, self.inventory.foreign

    async def step(self) -> None:
        dice = self.dice
        what = dice.choice(
            ["admit"] * 5
            + ["end"] * 3
            + ["cut", "cut", "cut", "rename", "rename", "share"]
            + ["kubelet", "kill", "lose", "drop", "unreadable", "wait", "wait"]
        )
        self.trace.append(f"{anyio.current_time():g} {what}")
        match what:
            case "admit":
                await self.admit(meanwhile=dice.choice([None, None, self.cut, self.rename]))
            case "end" if self.kubelet.pods:
                self.kubelet.release(dice.choice(sorted(self.kubelet.pods)))
            case "cut":
                self.cut()
            case "rename":
                self.rename()
            case "share":
                self.take(shared=dice.choice(sorted(SHARED)))
            case "kubelet":
                await self.kubelet.restart(
                    orderly=dice.random() < 0.5,
                    pause=dice.choice([0.0, 1.0]),
                    runtime_ready=dice.choice([0.0, 2.5]),
                    sources_ready=dice.choice([0.0, 0.5, 6.0]),
                )
            case "kill":
                await self.end()
                self.lost = self.lost or self.remembered != (self.inventory.listed, self.inventory.foreign)
                await anyio.sleep(dice.choice([0.0, 3.0]))
                self.begin()
            case "lose":
                await self.end()
                self.remembered, self.lost = ((), ()), True
                self.begin()
            case "drop":
                if streaming := [name for name, table in self.kubelet.resources.items() if table.allocatable]:
                    await self.kubelet.drop_stream(dice.choice(sorted(streaming)), dice.choice(["goaway", "close"]))
            case "unreadable" if anyio.current_time() > self.unreadable_until + 1:
                self.unreadable_until = anyio.current_time() + dice.uniform(0.5, UNREADABLE)
            case "wait":
                await anyio.sleep(6)

    async def admit(self, meanwhile: Callable[[], None] | None) -> None:
        """A pod with devices of its own, of a plain init container, or both; it may be refused."""
        free = sorted(name for name, table in self.kubelet.resources.items() if table.allocatable and table.free)
        if not free:
            return
        self.pods += 1
        name, resource, count = f"pod-{self.pods}", self.dice.choice(free), self.dice.randint(1, 2)
        shape = self.dice.choice(["app", "init", "init and app"])
        containers = [Container("app", {resource: 1 if shape == "init and app" else count} if shape != "init" else {})]
        if shape != "app":
            containers.insert(0, Container("init", {resource: count}, "init"))
        self.trace[-1] += f" {name} {resource} {count} {shape}"

        async def ask() -> None:
            try:
                await self.kubelet.admit(name, containers=containers)
            except AdmissionError as error:
                self.trace.append(f"refused: {error}")
            else:
                self.check_admitted(name)

        async with anyio.create_task_group() as both:
            both.start_soon(ask)
            if meanwhile is not None:
                await anyio.lowlevel.checkpoint()
                meanwhile()

    def cut(self) -> None:
        at, layouts = self.dice.randrange(2), list(self.situation.layouts)
        layouts[at] = (self.dice.choice(sorted(LAYOUTS)), layouts[at][1] + self.dice.randrange(2))
        self.take(layouts=tuple(layouts))

    def rename(self) -> None:
        self.take(names=self.dice.choice(sorted(NAMES)))

    def take(self, **changes) -> None:
        self.situation = dataclasses.replace(self.situation, **changes)
        self.trace.append(f"{self.situation}")
        self.offering.publish(offered(self.situation))

    def check_admitted(self, pod: str) -> None:
        """No hardware has more holders after an admission than the settings in force give it out to."""
        held = self.held()
        devices = {(r.name, d.id): d for r in self.inventory.listed for d in r.devices}
        for name, resource, identifier in held:
            if name == pod:
                holders = {(pod, identifier) for pod, _, identifier in held}
                assert not overfull(holders, devices[resource, identifier]), self.trace

    def held(self) -> set[tuple[str, str, str]]:
        """(pod, resource, device id) of all that pods hold in truth."""
        return {
            (name, resource, identifier)
            for name, pod in self.kubelet.pods.items()
            for by_resource in pod.allocated.values()
            for resource, allocation in by_resource.items()
            for identifier in allocation.ids
        }

    def check(self) -> None:
        self.kubelet.check()
        held = self.held()
        assert not held_twice((pod, identifier) for pod, _, identifier in held), self.trace
        if self.inventory.unpublished:
            return
        listed = {(r.name, d.id) for r in self.inventory.listed for d in r.devices}
        names = {name for name, _ in listed}  # without stored state, all other names are foreign to a process
        kept = {(name, one) for _, name, one in held if not self.lost or name in names}
        assert kept <= listed, self.trace

    async def all_back(self) -> None:
        """All pods end; within `BACK` seconds all there is must be offered, and nothing else listed."""
        for pod in tuple(self.kubelet.pods):
            self.kubelet.release(pod)
        wanted = {r.name: {d.id for d in r.devices} for r in offered(self.situation).plan.resources}
        until = anyio.current_time() + BACK

        def healthy() -> dict[str, set[str]]:
            return {name: set(table.healthy) for name, table in self.kubelet.resources.items() if table.healthy}

        while healthy() != wanted or self.inventory.judged.retirement.since:
            assert anyio.current_time() < until, (wanted, healthy(), self.inventory.judged.retirement.since, self.trace)
            await anyio.sleep(0.5)
        self.check()


@pytest.fixture
def in_one_process(monkeypatch, caplog):
    """Threads, and clocks other than the loop's clock, are replaced."""
    caplog.set_level(logging.CRITICAL, "gpu_plugin")
    monkeypatch.setattr(holders, "begin", OnTheLoop().begin)
    monkeypatch.setattr(endpoint, "DevicePluginService", partial(DevicePluginService, clock=anyio.current_time))
    if "sniffio" in sys.modules:  # anyio asks it first, and by itself it knows tasks alone
        monkeypatch.setattr(sys.modules["sniffio"].thread_local, "name", "asyncio")


@pytest.mark.timeout(60 + SEEDS)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_hardware_is_held_twice_no_held_id_is_lost_and_all_capacity_comes_back(
    batch, in_one_process, monkeypatch, short_path
):
    read = checkpoint.read
    for seed in range(batch, SEEDS, BATCHES):
        directory = short_path / str(seed) / "device-plugins"
        directory.mkdir(parents=True)

        async def live(seed=seed, directory=directory) -> None:
            life = Life(seed, directory)

            def read_or_not(directory):
                if anyio.current_time() < life.unreadable_until:
                    raise checkpoint.CheckpointError("its disk does not answer")
                return read(directory)

            monkeypatch.setattr(checkpoint, "read", read_or_not)
            try:
                await life.run()
            except BaseException:
                print(f"seed {seed}:", *life.trace, sep="\n  ")
                raise

        random.seed(seed)  # spread of retries, and duration of reads
        with asyncio.Runner(loop_factory=SkippingLoop) as runner:
            runner.run(live())
