"""A monitor on a simulated node."""

from collections.abc import Callable
from contextlib import asynccontextmanager

import anyio

from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.devices.nvml_h import EventType
from gpu_plugin.health.observation import EventDelivery, Observation, Sample, XidEvent
from gpu_plugin.nvml.monitor import Monitor
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost

LONG = 15.0  # seconds in which any condition of a test must come true
NEVER = FOREVER = 3600.0


def remembered(name="hgx-h100"):
    """Return the GPUs of a node as an earlier process knew them."""
    return [
        Gpu(gpu.uuid, index, gpu.minor, gpu.pci_bus_id, gpu.name, numa_node=1)
        for index, gpu in enumerate(profile.load(name).gpus)
    ]


def but(*left_out):
    """Return the indices of eight GPUs without these."""
    return [gpu for gpu in range(8) if gpu not in left_out]


class Bench:
    """A monitor on a simulated node.

    `first` are its observations while it opened, `seen` those since, `nodes` the nodes and `boots` the boots that it published.
    `event_deliveries` has, by GPU uuid, each trouble with the delivery of events, and "" for none. `meddle` is called with
    each observation before it is in `seen`.
    """

    def __init__(
        self, name="hgx-h100", *, poll=0.01, timeout=LONG, remembered=(), driver=SimulatedDriver, node=None, **more
    ):
        self.node = node or SimulatedNode(profile.load(name))
        self.driver = driver(self.node)
        self.uuids = [gpu.uuid for gpu in self.node.profile.gpus]
        self.seen: list[tuple[str, Observation]] = []
        self.first: list[tuple[str, Observation]] = []
        self.event_deliveries: dict[str, list[str]] = {}
        self.nodes: list[Node] = []
        self.boots: list[str] = []
        self.meddle: Callable[[str, Observation], None] | None = None
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
        self._wake()
        return False

    def _found(self, node):
        self.nodes.append(node)
        self._wake()

    def _booted(self, boot_id):
        self.boots.append(boot_id)
        self._wake()

    def _wake(self):
        news, self._news = self._news, anyio.Event()
        news.set()

    @asynccontextmanager
    async def running(self):
        """Run the open monitor."""
        if not self.first:
            self.first, self.seen = self.seen, []
        async with anyio.create_task_group() as group:
            group.start_soon(self.monitor.run)
            yield
            group.cancel_scope.cancel()

    @asynccontextmanager
    async def watching(self, rounds=1):
        """Open the monitor, run it, and wait for this many looks at each GPU."""
        await self.monitor.open()
        async with self.running():
            await self.rounds(rounds)
            yield self

    async def opened(self):
        """Open the monitor, close it, and return the node."""
        node = await self.monitor.open()
        self.monitor.close()
        return node

    async def until(self, condition):
        with anyio.fail_after(LONG):
            while not condition():
                await self._news.wait()

    async def until_turned(self, condition):
        """Wait until this is so after a turn, for conditions that no observation shows."""
        with anyio.fail_after(LONG):
            while not condition():
                await self.monitor._turned.wait()

    async def turned(self, count):
        """Wait for `count` more turns, also if they look at no GPU."""
        until = self.monitor._rounds + count
        await self.until_turned(lambda: self.monitor._rounds >= until)

    async def rounds(self, count=1, gpus=None):
        """Wait for `count` more looks at each GPU. Return the position in `seen` at which they began."""
        since = len(self.seen)
        wanted = range(len(self.uuids)) if gpus is None else gpus
        await self.until(lambda: all(len(self.samples(gpu, since)) >= count for gpu in wanted))
        return since

    # Faults of a GPU, until the monitor has seen them

    async def lose(self, gpu):
        self.node.lose(gpu)
        await self.until(lambda: "lost" in self.faults(gpu))

    async def hang(self, gpu, looks=1):
        """Let calls about the GPU hang until the last `looks` looks found it. A slow machine may cause a single one."""
        self.node.hang(gpu, FOREVER)
        await self.until(lambda: self.faults(gpu)[-looks:] == ["hung"] * looks)

    async def heal(self, gpu):
        self.node.heal(gpu)
        await self.until(lambda: self.faults(gpu)[-1:] == [""])

    async def vanish(self, gpu):
        self.node.vanish(gpu)
        await self.until(lambda: "vanished" in self.faults(gpu))

    async def bring_back(self, gpu):
        self.node.bring_back(gpu)
        await self.until(lambda: self.faults(gpu)[-1] == "")

    async def xid(self, gpu, xid):
        """Post an event, which must arrive."""
        since = len(self.seen)
        assert self.node.post(gpu, EventType.XID_CRITICAL, xid) == 1
        await self.until(lambda: XidEvent(xid) in self.of(gpu, since))

    # What the monitor observed

    def of(self, gpu, since=0):
        return [observation for uuid, observation in self.seen[since:] if uuid == self.uuids[gpu]]

    def samples(self, gpu, since=0):
        return [seen for seen in self.of(gpu, since) if isinstance(seen, Sample)]

    def faults(self, gpu, since=0):
        return [seen.fault for seen in self.samples(gpu, since)]

    def good(self, gpus=None):
        """Return True if every look at these GPUs was good."""
        wanted = range(len(self.uuids)) if gpus is None else gpus
        return {fault for gpu in wanted for fault in self.faults(gpu)} == {""}

    def deliveries(self, gpu, since=0):
        """Return the troubles with the delivery of the GPU's events."""
        return [seen.trouble for seen in self.of(gpu, since) if isinstance(seen, EventDelivery)]

    def unreadable(self, at=-1):
        return {gpu.uuid: gpu.unreadable for gpu in self.nodes[at].gpus if gpu.unreadable}
