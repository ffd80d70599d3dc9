"""Monitors the node's GPUs: finds them, looks at them in turns, receives their events, and opens and closes the driver.

    Schedule ──whose turn──▶ Monitor ──▶ Poller ─Result─▶ Reports ──observations──▶ observe
    EventWaiter (thread) ──event──▶ Reports ──▶ observe, and the GPU's turn is next
    HostView, Reopening ──▶ DriverSession, Finder, EventSubscription         Monitor ──Node──▶ found

Does not judge health: it passes each look and event to `observe`, and each change of the known hardware to `found`. All GPUs
are looked at in parallel: a GPU whose call hangs delays no other GPU, and delays a round only briefly.
"""

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import anyio

from gpu_plugin.config.times import duration
from gpu_plugin.containers.host_view import HostView
from gpu_plugin.devices.absent import absent_gpus, no_gpu
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.health.observation import Observation
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.finding import PROBE_PATIENCE, HostState, read_host
from gpu_plugin.nvml.links import Links
from gpu_plugin.nvml.look_requests import LookRequests
from gpu_plugin.nvml.mig import with_caps
from gpu_plugin.nvml.polling import Poller
from gpu_plugin.nvml.port import Driver
from gpu_plugin.nvml.reopening import Reopening
from gpu_plugin.nvml.reports import Reports
from gpu_plugin.nvml.roster import PATIENCE, LookResult, Released, ReleaseError, Roster, Watched
from gpu_plugin.nvml.schedule import Schedule, Turn
from gpu_plugin.nvml.session import AS_BEFORE, DriverSession, Opened
from gpu_plugin.nvml.subscription import EventSubscription
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import SlowCall

log = logging.getLogger(__name__)

LOOK_PATIENCE = 1.0  # seconds to wait for a look at a GPU; a longer look continues in the background

# Seconds that all first looks together may take. After that the node is served without their results.
FIRST_LOOKS = 5.0

CONFIRM = 1.0  # longest time in seconds until the next look after a look that left a suspicion to be confirmed

# Seconds between the cause of a turn and the turn, and between two turns, so that the kubelet is informed before.
LOOK_GAP = 0.1


def longest_turn(timeout: float) -> float:
    """Return the longest duration of a turn in seconds, if the driver and the GPUs use up all timeouts.

    Opening the driver again takes up to five times `timeout` seconds: for a close that is still under way, all attempts to
    open it, the query of its version, and closing it again if that fails. The 60 s are for ending the use of the driver, the
    host, all GPUs in parallel, their links, the event set, and the wait for events.
    """
    return 60 + 5 * timeout


class Monitor:
    """Monitors one node's GPUs.

    Attributes:
        poll: seconds between two turns of all GPUs.
        timeout: seconds after which a call counts as hung.
        retention: seconds for which a vanished GPU stays listed.
        judging: whether health is judged; if not, looks read only core values and how the GPU is partitioned.
        turn_due: event loop time by which the current or next turn should be over; infinite while idle.
        trouble: why no GPU could be reached in the last turn; empty if a GPU could, and if all GPUs are released.
        boot_id: the id of the current boot; empty: not known yet, the host's first value is stored.
        node: the node as passed on last.
    """

    def __init__(
        self,
        driver: Driver,
        host: HostView,
        poll: float,
        timeout: float,
        remembered: Sequence[Gpu],
        observe: Callable[[str, Observation], bool],
        found: Callable[[Node], None],
        *,
        retention: float = 86400.0,
        judging: bool = True,
        released: frozenset[str] | None = frozenset(),
        booted: Callable[[str], object] = lambda _: None,
        met: Callable[[Sequence[Gpu]], object] = lambda _: None,
        boot_id: str = "",
        before: Sequence[Gpu] = (),
    ) -> None:
        """Store the driver (closed), the host, the GPUs `remembered` from this boot, the attributes, and the callbacks.

        `before` are GPUs that the node had in an earlier boot.

        `observe` processes an observation and returns whether another look soon would settle a question. `found` gets the
        node whenever it changes. `met` gets GPUs before the first look at them. `booted` gets the new boot id if the node was
        booted during this process, as simulated nodes are. `released` are the uuids of GPUs that are in maintenance from the
        start; None: all.
        """
        self.poll, self.timeout, self.retention, self.judging = poll, timeout, retention, judging
        self.host, self.remembered, self.boot_id = host, remembered, boot_id
        self.turn_due = math.inf
        self.trouble = ""
        self.node = Node()
        self._found, self._booted, self._met = found, booted, met
        self._device_roots: Mapping[str, str] = {}
        self._before = {gpu.uuid: gpu for gpu in before}
        self._pci_gpus: Mapping[str, str] | None = None
        calls = self._calls = DriverCalls()
        roster = self._roster = Roster(Released.of(released))
        session = self._session = DriverSession(driver, calls)
        self._schedule = Schedule()
        looks = self._looks = LookRequests(self._schedule)
        reports = self._reports = Reports(driver, calls, roster, observe, looks)
        self._events = EventSubscription(driver, calls, reports, looks)
        self._poller = Poller(driver, host, calls, session, roster)
        self._links = Links(driver, host, calls)
        self._reading_host: SlowCall[HostState] = SlowCall("host-state")
        self._reopening = Reopening(driver, host, calls, roster, session, self._events, reports)
        self._turned = Pulse()
        self._running = False
        self._over: float | None = None
        """The end of the last turn of all GPUs; None during such a turn, and before the first."""
        self._share = 1.0
        self._rounds = 0

    async def open(self) -> Node:
        """Open the driver and find the GPUs. If all remembered GPUs are released, the driver stays closed until `resume`.

        Raises NvmlError if there is no working driver, and TimeoutError if the driver does not answer.
        """
        roster = self._roster
        roster.gpus, roster.by_handle = [], {}
        self.turn_due = self._turn_end()
        try:
            await self._read_host(PROBE_PATIENCE)
            opened = await self._reopening.first(self.remembered, self._rounds, self.timeout)
            if not roster.gpus:
                await self._session.close(self.timeout)
                return self.node
            if self._session.is_open:  # subscribe before publishing the GPUs, so that no event is missed
                await self._events.update(roster.watched(), self.timeout)
                self._met([watched.gpu for watched in roster.gpus])
                self._events.report(watched.gpu.uuid for watched in roster.watched())
                with_handles = [each for each in roster.watched() if each.handle is not None]
                await self._look_at_all(with_handles, None, min(self.timeout, FIRST_LOOKS))
            await self._publish(opened or AS_BEFORE)
            self.trouble = self._unreached()
        finally:
            self.turn_due = math.inf  # until the next attempt, or `run`
            if not roster.gpus:
                self.close()
        return self.node

    async def run(self) -> None:
        """Monitor until cancelled: receive events from a thread, and look at all GPUs every `poll` seconds."""
        self._running, self._over = True, None
        self._schedule.poll_at(anyio.current_time())  # after a restart, poll at once
        try:
            self._events.listen(self.timeout)
            while True:
                await anyio.sleep(LOOK_GAP)
                turn = self._schedule.take(anyio.current_time())
                if turn.whole:
                    self._over = None
                    # A restart after a failure does not extend the deadline; a turn may also begin before its time.
                    self.turn_due = min(self.turn_due, self._turn_end())
                await self._turn(turn)
                self.trouble = self._unreached()
                self._turned.ring()
                if turn.whole:
                    # Random, so that the nodes of a fleet do not all wake at the same moment; never after `turn_due`.
                    self._share = 0.9 + 0.1 * random.random()  # noqa: S311
                    self._over = anyio.current_time()
                    self._pause()
                while (wait := self._schedule.next() - anyio.current_time()) > 0:
                    await self._looks.made.wait(wait)
        finally:
            self._running = False
            self.close()

    def close(self) -> None:
        """End idle threads. Call it if `run` was not called."""
        self._events.stop()
        self._calls.close()

    async def shut(self) -> bool:
        """Close the driver so that the next monitor of this process can open it. Return whether it is closed. Takes seconds."""
        try:
            return not await self._reopening.shut(min(self.timeout, PATIENCE))
        finally:
            self.close()

    @property
    def restart_needed(self) -> str:
        """The reason why only a restart of the process lets other GPUs be found or released, for people; else empty."""
        return self._reopening.restart_needed

    def look_now(self) -> None:
        """Look at all GPUs before their next turn. Call it on the event loop's thread."""
        self._looks.all_gpus()

    def retune(self, poll: float, timeout: float, retention: float, *, judging: bool) -> None:
        """Apply new settings at once; see the attributes. Call it on the event loop's thread."""
        longer = longest_turn(timeout) - longest_turn(self.timeout)
        other_judging = judging != self.judging
        self.poll, self.timeout, self.retention, self.judging = poll, timeout, retention, judging
        if not self._running:
            return
        if self._over is None:
            self.turn_due += max(0.0, longer)  # the turn under way may use the new, longer timeout
        else:
            self._pause()
        if other_judging:
            self._schedule.everyone(-math.inf)
        self._looks.made.ring()

    def _pause(self) -> None:
        """Schedule the next turn of all GPUs one poll period after the end of the last."""
        assert self._over is not None
        at = self._over + self.poll * self._share
        self._schedule.poll_at(at)
        self.turn_due = at + longest_turn(self.timeout)

    def unsupported(self) -> Mapping[str, frozenset[str]]:
        """Return, by GPU uuid, the Sample fields known to be unsupported. GPUs that had no look yet are not included."""
        return {each.gpu.uuid: each.unanswered for each in self._roster.gpus if each.unanswered is not None}

    async def release(self, uuids: frozenset[str] | None) -> None:
        """Close the driver's handles of these GPUs (None: all) and leave the GPUs alone until `resume`. Waits a few seconds.

        Raises ReleaseError if a call keeps the handles open; they are closed as soon as that call returns.
        """
        roster = self._roster
        roster.wanted = roster.wanted.plus(uuids)
        if not await self._wait_until(lambda: self._reopening.released):
            words = self._reopening.blocked_by or self._reopening.holder or "the GPUs' turn has not come yet"
            raise ReleaseError(
                f"the driver's handles are not closed yet; they will be closed when this is over: {words}"
            )

    async def resume(self, uuids: frozenset[str] | None) -> None:
        """Find and monitor these GPUs (None: all) again, and wait a few seconds for the first look at them."""
        roster, before = self._roster, self._rounds
        roster.wanted = roster.wanted.minus(uuids, (watched.gpu.uuid for watched in roster.gpus))
        if self._running:  # else they are found when the driver is opened
            await self._wait_until(lambda: roster.untouched == roster.wanted and self._rounds > before)

    @property
    def no_gpu(self) -> str:
        """The reason why this node has no GPU, for people; empty if it may have a GPU."""
        return no_gpu(self._pci_gpus, (*self._before.values(), *self.remembered), frozenset(self._device_roots))

    @property
    def former(self) -> tuple[Gpu, ...]:
        """GPUs that the node had before and that are not listed now: missing GPUs, and replaced GPUs."""
        listed = {watched.gpu.uuid for watched in self._roster.gpus}
        return tuple(gpu for uuid, gpu in self._before.items() if uuid not in listed)

    def dismiss(self, uuid: str) -> bool:
        """Drop a missing GPU from the record of the node, as an operator ordered. Return whether the record had it."""
        if self._before.pop(uuid, None) is None:
            return False
        self._pass_on(AS_BEFORE)
        return True

    async def _wait_until(self, done: Callable[[], bool]) -> bool:
        """Wait a few seconds for turns until `done` is true. Return whether it is."""
        self.look_now()
        with anyio.move_on_after(PATIENCE):
            while not done():
                await self._turned.wait()
        return done()

    def _turn_end(self) -> float:
        """Return the time by which a turn that begins now should be over."""
        return anyio.current_time() + longest_turn(self.timeout)

    # A turn

    async def _turn(self, turn: Turn) -> None:
        """Do one turn: read the host, open the driver again if needed, resolve unknown events, look at GPUs, pass on the node."""
        roster = self._roster
        await self._read_host(LOOK_PATIENCE)
        if turn.whole and (opened := await self._reopening.again(self._rounds, self.timeout)) is not None:
            await self._publish(opened)
        self._events.collect()
        self._events.listen(self.timeout)
        await self._reports.resolve_unknown_events(LOOK_PATIENCE)
        gpus = [each for each in roster.watched() if turn.whole or each.gpu.uuid in (turn.full or ())]
        found = await self._look_at_all(gpus, turn.full, min(self.timeout, LOOK_PATIENCE))
        if self._session.is_open and await self._events.update(roster.watched(), self.timeout, retry=turn.whole):
            self.look_now()  # events were lost while the event set was replaced
        self._events.report(watched.gpu.uuid for watched in roster.watched())
        self._events.listen(self.timeout)
        await self._keep_up(found)
        if turn.whole:
            self._count_round()

    async def _look_at_all(
        self, gpus: Sequence[Watched], full: frozenset[str] | None, patience: float
    ) -> list[LookResult]:
        """Look at these GPUs in parallel, and pass on each sample when it arrives. Return all results."""
        every: list[LookResult] = []

        async def one(watched: Watched) -> None:
            uuid = watched.gpu.uuid
            wholly = full is None or uuid in full
            found = await self._poller.look(watched, patience, self.timeout, full=wholly, judging=self.judging)
            if found.register_events:
                self._events.register_again(uuid)
            soon = found.sample is not None and self._reports.observe(uuid, found.sample)
            if soon or found.look_soon:
                self._schedule.one(watched.gpu.uuid, anyio.current_time() + CONFIRM)
            every.append(found)

        async with anyio.create_task_group() as group:
            for watched in gpus:
                group.start_soon(one, watched)
        return every

    async def _keep_up(self, found: Sequence[LookResult]) -> None:
        """Finish a turn: drop GPUs that vanished for good, read links if that is due, and pass on the node."""
        roster, now = self._roster, anyio.current_time()
        for watched in tuple(roster.gpus):
            since = watched.vanished_since
            if since is not None and now - since >= self.retention and not roster.is_released(watched.gpu.uuid):
                ago = duration(now - since)
                log.warning("GPU %s vanished %s ago and is not listed any more", watched.gpu.uuid, ago)
                roster.gpus.remove(watched)
                self._before[watched.gpu.uuid] = watched.gpu
        if any(each.repartitioned for each in found):
            await self._read_host(LOOK_PATIENCE)  # new MIG devices have nodes of their own
        if any(each.links_changed for each in found) or self._links.due(roster.gpus):
            await self._publish(AS_BEFORE)
        else:
            self._pass_on(AS_BEFORE)

    def _count_round(self) -> None:
        roster = self._roster
        self._rounds += 1
        asked = [each for each in roster.watched() if not roster.bus.vanished(each)]
        out = all(watched.handle is None and watched.pending is None for watched in asked)
        out = out and bool(asked or not roster.gpus) and roster.untouched.leaves(each.gpu for each in roster.gpus)
        self._reopening.answered(anyone=not out)
        opens = self._session.opens(self.timeout)
        if opens or self._reopening.blocked_by or roster.bus.due_bus_ids(roster.gpus, self._rounds):
            self._schedule.everyone(anyio.current_time() + CONFIRM)

    def _unreached(self) -> str:
        """Return why no GPU can be reached now, for any reason; empty if a GPU can be reached or none should be."""
        roster = self._roster
        gpus = [watched.gpu for watched in roster.gpus]
        if not roster.untouched.leaves(gpus) or (gpus and not roster.in_use):
            return ""
        if not self._session.is_open:
            return f"the NVIDIA driver cannot be used: {self._session.trouble or 'it is not open'}"
        asked = roster.watched()
        there = [watched for watched in asked if not roster.bus.vanished(watched)]
        if not there:
            return "" if len(asked) < len(gpus) else "the NVIDIA driver finds no GPU on this node any more"
        now = anyio.current_time()
        if any(watched.reached(now, self.timeout) for watched in there):
            return ""
        return f"none of the {len(there)} GPUs answers" if len(there) > 1 else "the only GPU does not answer"

    async def _publish(self, opened: Opened) -> None:
        """Read the links between the GPUs again and pass on the node."""
        await self._links.read(self._roster.gpus, min(self.timeout, PROBE_PATIENCE))
        await self._read_host(PROBE_PATIENCE)
        self._pass_on(opened)

    def _pass_on(self, opened: Opened) -> None:
        """Pass on the node if it differs from the last. `opened` has the driver's version, or no new values."""
        self._links.store_finished()
        gpus = tuple(watched.gpu for watched in self._roster.gpus)
        uuids = [gpu.uuid for gpu in gpus]
        links, cliques = self._links.between(uuids), self._links.cliques(uuids)
        version = opened.version or self.node.driver_version
        cuda = opened.cuda or self.node.cuda_version
        absent = absent_gpus(self._pci_gpus, self._before.values(), gpus)
        elsewhere = {path: root for path, root in self._device_roots.items() if root}
        node = Node(gpus, links, version, frozenset(self._device_roots), cliques, cuda, absent, elsewhere)
        if node != self.node:
            self.node = node
            self._found(node)

    async def _read_host(self, patience: float) -> None:
        """Update the host's state. If the host cannot be read in time, the last state is kept."""
        roster = self._roster
        sliced = any(watched.gpu.mig_devices for watched in roster.gpus)
        try:
            seen = await self._reading_host.joined(
                partial(read_host, self.host, sliced=sliced), min(self.timeout, patience)
            )
        except Exception as error:  # noqa: BLE001 - after any error, the last state of the host is kept
            log.debug("the host's state cannot be read: %r", error)
            return
        self._device_roots, self._pci_gpus = seen.device_roots, seen.pci_gpus
        roster.bus.bindings = roster.bus.bindings if seen.bindings is None else seen.bindings
        if seen.mig_minors is not None:
            for watched in roster.gpus:
                watched.gpu = with_caps(watched.gpu, seen.mig_minors)
        if seen.boot_id and seen.boot_id != self.boot_id:
            before, self.boot_id = self.boot_id, seen.boot_id
            if before:
                log.warning("the node was booted: all GPUs were reset; finding them again")
                self._reopening.rebooted = True
                roster.wanted = Released()  # maintenance ends with the boot in which it began
                self._booted(seen.boot_id)
