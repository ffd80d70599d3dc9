"""A monitor at work on a simulated node."""

from collections.abc import Callable
from contextlib import asynccontextmanager

import anyio

from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.health.observation import EventDelivery, Observation, Sample
from gpu_plugin.nvml.monitor import Monitor
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost

LONG = 15.0
NEVER = 3600.0
FOREVER = 3600.0


def remembered(name="hgx-h100"):
    """The GPUs of a node as an earlier process knew them."""
    return [
        Gpu(gpu.uuid, index, gpu.minor, gpu.pci_bus_id, gpu.name, numa_node=1)
        for index, gpu in enumerate(profile.load(name).gpus)
    ]


class Bench:
    """A monitor on a simulated node, and all that it said."""

    def __init__(
        self, name="hgx-h100", *, poll=0.01, timeout=LONG, remembered=(), driver=SimulatedDriver, node=None, **more
    ):
        self.node = node or SimulatedNode(profile.load(name))
        self.driver = driver(self.node)
        self.uuids = [gpu.uuid for gpu in self.node.profile.gpus]
        self.seen: list[tuple[str, Observation]] = []
        self.first: list[tuple[str, Observation]] = []
        self.event_deliveries: dict[str, list[str]] = {}
        """By GPU uuid, each trouble with the delivery of events that was reported, and "" for none."""
        self.nodes: list[Node] = []
        self.boots: list[str] = []
        self.meddle: Callable[[str, Observation], None] | None = None
        """Called with each observation before it is noted in `seen`."""
        self._news = anyio.Event()
        self.monitor = Monitor(
            self.driver,
            SimulatedHost(self.node),
            poll,
            timeout,
            remembered,
            self._observe,
            self._found,
            booted=self._booted,
            **more,
        )

    def _observe(self, uuid, observation):
        if isinstance(observation, EventDelivery):
            deliveries = self.event_deliveries.setdefault(uuid, [])
            deliveries.append(observation.trouble)
            if deliveries == [""]:
                return False  # nothing was wrong before
        if self.meddle is not None:
            self.meddle(uuid, observation)
        self.seen.append((uuid, observation))
        self._tell()
        return False

    def _found(self, node):
        self.nodes.append(node)
        self._tell()

    def _booted(self, boot_id):
        self.boots.append(boot_id)
        self._tell()

    def _tell(self):
        news, self._news = self._news, anyio.Event()
        news.set()

    @asynccontextmanager
    async def running(self):
        """A monitor that runs. What it saw as it was opened is in `first`, not in `seen`."""
        if not self.first:
            self.first, self.seen = self.seen, []
        async with anyio.create_task_group() as group:
            group.start_soon(self.monitor.run)
            yield
            group.cancel_scope.cancel()

    async def until(self, condition):
        with anyio.fail_after(LONG):
            while not condition():
                await self._news.wait()

    async def until_turned(self, condition):
        """Until that is so after a round, for what no observation tells."""
        with anyio.fail_after(LONG):
            while not condition():
                await self.monitor._turned.wait()

    async def turned(self, count):
        """Until so many more rounds are over, whether or not there is anything to look at."""
        until = self.monitor._rounds + count
        await self.until_turned(lambda: self.monitor._rounds >= until)

    def of(self, gpu, since=0):
        return [observation for uuid, observation in self.seen[since:] if uuid == self.uuids[gpu]]

    def samples(self, gpu, since=0):
        return [seen for seen in self.of(gpu, since) if isinstance(seen, Sample)]

    def faults(self, gpu, since=0):
        return [seen.fault for seen in self.samples(gpu, since)]

    def hangs(self, gpu):
        """Whether the last three looks found a hung call. On a busy machine a call may be slow once, and come back."""
        return self.faults(gpu)[-3:] == ["hung"] * 3

    async def rounds(self, count=1, gpus=None):
        """Until each GPU has been looked at so often from now on; gives where in `seen` that began."""
        since = len(self.seen)
        wanted = range(len(self.uuids)) if gpus is None else gpus
        await self.until(lambda: all(len(self.samples(gpu, since)) >= count for gpu in wanted))
        return since

    def unreadable(self, at=-1):
        return {gpu.uuid: gpu.unreadable for gpu in self.nodes[at].gpus if gpu.unreadable}
