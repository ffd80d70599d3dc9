"""Keeps an eye on the node's GPUs: finds them, looks at each in turn, and passes on what the driver reports.

Decides nothing: every look and every event goes to `observe`, every change of what is known of the hardware to `found`.
A GPU that holds a call holds no other GPU: its call is left on its own thread until it comes back.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import anyio

from gpu_plugin.devices.node import Gpu, Link, Node, Pair
from gpu_plugin.health.observation import Observation, Sample, XidEvent
from gpu_plugin.nvml import probe
from gpu_plugin.nvml.mig import with_caps
from gpu_plugin.nvml.port import Driver, Event, EventType, Handle, HostView, NvmlError
from gpu_plugin.nvml.sample import Look, fault, look
from gpu_plugin.nvml.subscription import EventSubscription
from gpu_plugin.nvml.watched import PLACEHOLDER, Watched
from gpu_plugin.pulse import Pulse
from gpu_plugin.threads import DaemonThreads, Job

log = logging.getLogger(__name__)

PROBE_PATIENCE = 5.0
"""Seconds a GPU may take to describe itself before the node is served without it; the first contact wakes a sleeping one."""

LOOK_PATIENCE = 1.0
"""Seconds one GPU may take to be looked at before the others' turn."""

CONFIRM = 1.0
"""Seconds until the next round at most where the last one raised a suspicion that one look cannot settle."""

LOOK_GAP = 0.1
"""Seconds between an event and the round it brings, and between two rounds: a storm of events is no storm of looks."""

REOPEN_AFTER = 6
"""Rounds in a row without an answer from any GPU after which the driver is opened anew; if in vain, more rarely."""


@dataclass(slots=True)
class Monitor:
    """Watches one node's GPUs. `poll` and `timeout` are in seconds; `remembered` are GPUs that this boot has seen before."""

    driver: Driver
    host: HostView
    poll: float
    timeout: float
    remembered: Sequence[Gpu]
    observe: Callable[[str, Observation], bool]
    """Takes in an observation; returns whether another soon would settle something."""
    found: Callable[[Node], None]
    node: Node = field(default_factory=Node)
    _watched: list[Watched] = field(default_factory=list)
    _by_handle: dict[Handle, str] = field(default_factory=dict)
    _threads: DaemonThreads = field(default_factory=DaemonThreads)
    _look: Pulse = field(default_factory=Pulse)
    _due: bool = False
    _soon: bool = False
    _out_of_reach: int = 0
    _closed: bool = False
    _opening: "Job[None] | None" = None
    _linking: "Job[dict[Pair, Link]] | None" = None
    _events: EventSubscription = field(init=False)

    def __post_init__(self) -> None:
        self._events = EventSubscription(self.driver, self._threads)

    async def open(self) -> Node:
        """Opens the driver and finds the GPUs.

        Raises:
            NvmlError: there is no driver, or it does not work.
            TimeoutError: it does not answer.
        """
        try:
            version, count = await self._open_driver()
            self._watched = self._distinct(await self._probe_all(count))
            self._add_remembered()
            if self._watched:
                # Before anyone is told of a GPU: from then on no event of it goes unheard.
                await self._events.begin(self._watched, self.timeout)
                await self._publish(version)
            else:
                await self._close()
        finally:
            if not self._watched:
                self._threads.close()
        return self.node

    async def run(self) -> None:
        """Watches until cancelled: events from one thread, and a look at every GPU each `poll` seconds."""
        try:
            while True:
                self._due = self._soon = False
                self._events.listen(self._deliver, self.look_now)
                for watched in self._watched:
                    await self._look_at(watched)
                await self._keep_up()
                if not self._due:
                    # Spread, so that the nodes of a fleet do not all wake at the same moment.
                    pause = self.poll * (0.95 + 0.1 * random.random())  # noqa: S311
                    await self._look.wait(min(pause, CONFIRM) if self._soon else pause)
                await anyio.sleep(LOOK_GAP)  # first let the kubelet hear of the event that may have brought this round
        finally:
            self._events.stop()
            self._threads.close()

    async def _open_driver(self) -> tuple[str, int]:
        """Opens the driver: its version, and how many GPUs it counts. One attempt at a time, however long it hangs."""
        if self._opening is None:
            self._opening = await self._threads.submit(self.driver.open, self.timeout)
        else:
            with anyio.move_on_after(self.timeout):
                await asyncio.wait([self._opening.done])
        if not self._opening.done.done():
            raise TimeoutError(f"no answer for {self.timeout:g} s")
        opened, self._opening = self._opening, None
        opened.done.result()
        try:
            version = await self._threads.run(self.driver.driver_version, self.timeout)
            return version, await self._threads.run(self.driver.device_count, self.timeout)
        except NvmlError:
            await self._close()
            raise

    async def _keep_up(self) -> None:
        """What belongs to a round beside the looks: events still refused, links still owed, what is new, a lost driver."""
        if self._events.owed:
            await self._events.begin(self._watched, self.timeout)
        if self._linking is not None and self._linking.done.done():
            await self._publish("")
        else:
            device_nodes = await self._see_host(LOOK_PATIENCE)
            node = replace(self.node, gpus=tuple(w.gpu for w in self._watched), device_nodes=device_nodes)
            if node != self.node:
                self.node = node
                self.found(node)
        out = all(w.handle is None and w.pending is None for w in self._watched)
        self._out_of_reach = self._out_of_reach + 1 if out else 0
        times, between = divmod(self._out_of_reach, REOPEN_AFTER)
        if times and not between and (self._closed or times in (1, 2, 4) or times % 8 == 0):
            await self._reopen()

    async def _reopen(self) -> None:
        """Begins anew with the driver: it counts GPUs when it is opened, and a reloaded one knows no handle of before."""
        log.warning("no GPU has answered for %d rounds; opening the driver anew", self._out_of_reach)
        if not await self._events.leave():
            log.warning("the driver holds the wait for its events; it cannot be opened anew now")
            return
        await self._close()
        self._closed = True
        try:
            version, count = await self._open_driver()
        except (NvmlError, TimeoutError) as error:
            log.warning("the driver cannot be opened: %s", error)
            return
        self._closed = False
        by_uuid = {watched.gpu.uuid: watched for watched in self._watched}
        for probed in self._distinct(await self._probe_all(count)):
            known = by_uuid.get(probed.gpu.uuid)
            if probed.handle is None or probed.gpu.unreadable:
                continue
            if known is None:
                self._watched.append(probed)
            else:
                known.gpu, known.handle, known.events = probed.gpu, probed.handle, False
        self._watched.sort(key=lambda w: (w.gpu.index, w.gpu.uuid))
        await self._events.begin(self._watched, self.timeout)
        await self._publish(version)

    @staticmethod
    def _distinct(probed: "list[Watched]") -> "list[Watched]":
        """GPUs that claim another's uuid are listed under a name of their own, and never handed out."""
        seen: set[str] = set()
        for watched in probed:
            if watched.gpu.uuid in seen:
                why = f"it claims the uuid of another GPU, {watched.gpu.uuid}"
                log.error("GPU %d: %s; it is not handed out", watched.gpu.index, why)
                name = f"{PLACEHOLDER}{watched.gpu.index}"
                watched.gpu, watched.handle = replace(watched.gpu, uuid=name, unreadable=why), None
            seen.add(watched.gpu.uuid)
        return probed

    def look_now(self) -> None:
        """Has the GPUs looked at without waiting for their turn. From the event loop's thread."""
        self._due = True  # in a round under way some GPUs' turn is over: it is followed by another
        self._look.ring()

    async def _close(self) -> None:
        """Closes the driver, which counts GPUs when it is opened: a later attempt then finds what has come since."""
        with suppress(NvmlError, TimeoutError):
            await self._threads.run(self.driver.close, self.timeout)

    async def _probe_all(self, count: int) -> list[Watched]:
        """Every GPU, all at once: the first contact with one may take seconds."""
        probed: dict[int, Watched] = {}

        async def one(index: int) -> None:
            probed[index] = await self._probe(index)

        async with anyio.create_task_group() as group:
            for index in range(count):
                group.start_soon(one, index)
        return [probed[index] for index in range(count)]

    async def _probe(self, index: int) -> Watched:
        """One GPU as the driver describes it, or what is known of it if it does not."""
        patience = min(self.timeout, PROBE_PATIENCE)
        threads = DaemonThreads()
        try:
            job = await threads.submit(lambda: probe.probe_gpu(self.driver, self.host, index), patience)
        finally:
            threads.close()
        placeholder = Gpu(uuid=f"{PLACEHOLDER}{index}", index=index)
        if not job.done.done():
            why = f"the driver has not described it within {patience:g} s"
            log.error("GPU %d: %s; it is not handed out", index, why)
            return Watched(replace(placeholder, unreadable=why), None, job)
        error = job.done.exception()
        if error is not None:
            why = _failed(error).detail
            log.error("GPU %d cannot be read and is not handed out: %s", index, why)
            return Watched(replace(placeholder, unreadable=why), None)
        handle, gpu = job.done.result()
        self._by_handle[handle] = gpu.uuid
        return Watched(gpu, handle)

    def _add_remembered(self) -> None:
        """Gives GPUs that the driver cannot name their remembered names, and lists those that it no longer has."""
        present = {watched.gpu.uuid: watched for watched in self._watched}
        for gpu in self.remembered:
            lost = present.get(gpu.uuid)
            if lost is not None and lost.gpu.unreadable:  # midway: the driver gave no more than its name
                lost.gpu = replace(gpu, index=lost.gpu.index, unreadable=lost.gpu.unreadable)
        missing = {gpu.index: gpu for gpu in self.remembered if gpu.uuid not in present}
        for watched in self._watched:
            known = missing.pop(watched.gpu.index, None) if watched.handle is None else None
            if known is not None:
                watched.gpu = replace(known, unreadable=watched.gpu.unreadable)
        for gpu in missing.values():
            why = "the driver does not find it any more"
            log.error("GPU %s: %s; it stays listed and is not handed out", gpu.uuid, why)
            self._watched.append(Watched(replace(gpu, unreadable=why), None))
        self._watched.sort(key=lambda w: (w.gpu.index, w.gpu.uuid))

    async def _publish(self, version: str) -> None:
        """Makes the node of what is known and passes it on."""
        links = dict(self.node.links)
        job = self._linking
        if job is None or job.done.done():
            job = await self._read_links()
        if job is not None and job.done.done() and job.done.exception() is None:
            links |= job.done.result()  # what was known of GPUs that are out of reach now still holds
        elif job is not None:
            log.error("the links between GPUs cannot be read; pods get GPUs without regard to what is unknown")
        self._linking = job if job is not None and not job.done.done() else None
        device_nodes = await self._see_host(PROBE_PATIENCE)
        self.node = Node(tuple(w.gpu for w in self._watched), links, version or self.node.driver_version, device_nodes)
        self.found(self.node)

    async def _see_host(self, patience: float) -> frozenset[str]:
        """The device nodes that the host has now, else those it had; MIG devices get the capability minors it says."""
        sliced = any(watched.gpu.mig_devices for watched in self._watched)
        job = await self._threads.submit(
            lambda: (self.host.device_nodes(), self.host.mig_minors() if sliced else {}), min(self.timeout, patience)
        )
        if not job.done.done() or job.done.exception() is not None:
            return self.node.device_nodes
        device_nodes, minors = job.done.result()
        for watched in self._watched:
            watched.gpu = with_caps(watched.gpu, minors)
        return device_nodes

    async def _read_links(self) -> "Job[dict[Pair, Link]] | None":
        """Asks for the links between all GPUs that answer; None where there are not two of them."""
        answering = [w for w in self._watched if w.pending is None and not w.gpu.unreadable]
        readable = {w.gpu.uuid: w.handle for w in answering if w.handle is not None}
        gpus = [w.gpu for w in self._watched if w.gpu.uuid in readable]
        if len(gpus) < 2:
            return None
        return await self._threads.submit(
            lambda: probe.probe_links(self.driver, readable, gpus), min(self.timeout, PROBE_PATIENCE)
        )

    def _deliver(self, event: Event) -> None:
        """Passes an event on; runs on the event loop."""
        uuid = self._by_handle.get(event.handle)
        if uuid is None:
            log.warning("an event (type %#x, data %d) came from no GPU known here", event.kind, event.data)
        elif event.kind == EventType.XID_CRITICAL:
            self._saw(uuid, XidEvent(event.data))
        else:
            log.info("GPU %s: driver event of type %#x, data %d", uuid, event.kind, event.data)
        self.look_now()  # whatever it was, the GPU's own answers tell more

    async def _look_at(self, watched: Watched) -> None:
        """One look, unless an earlier one is still under way."""
        patience = min(self.timeout, LOOK_PATIENCE)
        if watched.pending is None:
            handle, gpu, divisible = watched.handle, watched.gpu, watched.divisible
            if gpu.unreadable:
                index, known = gpu.index, "" if gpu.uuid.startswith(PLACEHOLDER) else gpu.uuid
                watched.pending = await self._threads.submit(
                    lambda: probe.probe_gpu(self.driver, self.host, index, known), patience
                )
            elif handle is None:
                watched.pending = await self._threads.submit(lambda: self._reach(gpu), patience)
            else:
                watched.pending = await self._threads.submit(
                    lambda: look(self.driver, handle, gpu, divisible=divisible), patience
                )
        job = watched.pending
        if not job.done.done():
            age = anyio.current_time() - job.started
            if age >= self.timeout:
                why = f"the driver has not answered for over {self.timeout:g} s"
                self._saw(watched.gpu.uuid, Sample(fault="hung", detail=why))
            return
        watched.pending = None
        error = job.done.exception()
        if error is not None:
            watched.handle = None
            self._saw(watched.gpu.uuid, _failed(error))
            return
        await self._take(watched, job.done.result())

    async def _take(self, watched: Watched, result: object) -> None:
        """Takes in what a look brought."""
        if isinstance(result, Look):
            if watched.handle is None:
                watched.events = False  # a registration does not survive the reset that a new handle may come from
            # Handles from before a reset are worth nothing: after a fault, ask for a new one next time.
            watched.handle = None if result.sample.fault else result.handle
            if watched.handle is not None:
                self._by_handle[watched.handle] = watched.gpu.uuid
                self._soon |= watched.recut(result)
                if not watched.events:
                    await self._events.ask(watched)
            self._saw(watched.gpu.uuid, result.sample)
        elif isinstance(result, tuple):
            await self._take_probed(watched, *result)
        elif isinstance(result, str):  # a registration for events that took its time
            self._events.settled(watched, result)

    async def _take_probed(self, watched: Watched, handle: Handle, gpu: Gpu) -> None:
        """A GPU that could not be read was probed again."""
        if gpu.unreadable or any(other.gpu.uuid == gpu.uuid for other in self._watched if other is not watched):
            self._saw(watched.gpu.uuid, Sample(fault="error", detail=gpu.unreadable or "another GPU answers for it"))
            return
        log.info("GPU %d (%s) can be read now", gpu.index, gpu.uuid)
        watched.gpu, watched.handle = gpu, handle
        self._by_handle[handle] = gpu.uuid
        await self._publish("")
        await self._events.ask(watched)

    def _saw(self, uuid: str, seen: Observation) -> None:
        if self.observe(uuid, seen):
            self._soon = True

    def _reach(self, gpu: Gpu) -> Look:
        """A new handle and a look through it. Blocks."""
        return look(self.driver, self.driver.handle_by_uuid(gpu.uuid), gpu)


def _failed(error: BaseException) -> Sample:
    """The sample that a failed call is."""
    return fault(error) if isinstance(error, NvmlError) else Sample(fault="error", detail=repr(error))
