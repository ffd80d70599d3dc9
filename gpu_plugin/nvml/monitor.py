"""Keeps an eye on the node's GPUs: composes what finds them, looks at them, hears of them, and opens and closes the driver.

    Schedule ──whose turn──▶ Monitor ──▶ Poller ─Result─▶ Reports ──observations──▶ observe
    EventWaiter (thread) ──event──▶ Reports ──▶ observe, and the GPU's turn is next
    HostView, Reopening ──▶ DriverSession, Finder, EventSubscription         Monitor ──Node──▶ found

Decides nothing of their health: every look and every event goes to `observe`, every change of what is known of the hardware
to `found`. GPUs are looked at side by side: one that holds a call holds no other GPU, and no round for longer than a moment.
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
from gpu_plugin.nvml.finding import PROBE_PATIENCE, HostSight, see_host
from gpu_plugin.nvml.links import Links
from gpu_plugin.nvml.mig import with_caps
from gpu_plugin.nvml.polling import Poller
from gpu_plugin.nvml.port import Driver
from gpu_plugin.nvml.reopening import Reopening
from gpu_plugin.nvml.reports import Reports
from gpu_plugin.nvml.roster import PATIENCE, LookResult, Released, ReleaseError, Roster, Watched
from gpu_plugin.nvml.schedule import Schedule, Turn
from gpu_plugin.nvml.session import AS_BEFORE, DriverCalls, DriverSession, Opened
from gpu_plugin.nvml.subscription import EventSubscription
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.slow_call import SlowCall

log = logging.getLogger(__name__)

LOOK_PATIENCE = 1.0  # seconds a look at a GPU is waited for; it goes on after that

FIRST_LOOKS = 5.0
"""Seconds that the first looks, all at once, may take before the node is served without what they would have told."""

CONFIRM = 1.0  # seconds until the next look at most where the last one raised a suspicion that one look cannot settle

# Seconds between what brings a turn and the turn, and between two turns: first let the kubelet hear of it.
LOOK_GAP = 0.1


def longest_turn(timeout: float) -> float:
    """Seconds that a turn may take by the patience of everything in it, where the driver and each GPU use all of theirs.

    The driver is opened again in five times `timeout` seconds at most: for a closing that is still under way, for all attempts
    at opening it, for what it says of itself, and for closing it again where it says nothing. 60 s are for its end, the host,
    the GPUs (all at once) and their links, the event set and the wait for it.
    """
    return 60 + 5 * timeout


class Monitor:
    """Watches one node's GPUs.

    Attributes:
        poll: seconds between two turns of everyone.
        timeout: seconds after which a call is said to hang.
        retention: seconds for which a GPU that has vanished stays listed.
        judging: whether health is judged at all: else GPUs are asked only whether they answer, and how they are partitioned.
        turn_due: by when the turn under way, or the next one, is over if all is well, in event loop time; it is none while idle.
        trouble: why no GPU could be reached as of the last turn; empty where one could, and where all are released.
        boot_id: the boot that is known of; empty: whichever the host tells first.
        node: the node as it was passed on last.
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
        """Takes the driver, closed; the host; the GPUs `remembered` of this boot; the attributes; and who wants to know.

        `before` are GPUs that the node had in an earlier boot.

        `observe` takes in an observation and returns whether another soon would settle something; `found` gets the node whenever
        what is known of it changed; `met` gets GPUs before the first look at them; `booted` gets the id of the boot once the
        node was booted under us, as simulated ones are. `released` are the uuids of GPUs that are out for maintenance from the
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
        reports = self._reports = Reports(driver, calls, roster, observe, self._look_at)
        self._events = EventSubscription(driver, calls, reports.heard, self.look_now, reports.saw)
        self._poller = Poller(driver, host, calls, session, roster)
        self._links = Links(driver, host, calls)
        self._asking_host: SlowCall[HostSight] = SlowCall(calls.begin_unrelated)
        self._reopening = Reopening(driver, host, calls, roster, session, self._events, reports)
        self._schedule = Schedule()
        self._look, self._turned = Pulse(), Pulse()
        self._running = False
        self._over: float | None = None
        """When everyone's last turn was over; None while one is under way, and before the first."""
        self._share = 1.0
        self._rounds = 0

    async def open(self) -> Node:
        """Opens the driver and finds the GPUs. Where all those remembered are released, it is left alone until `resume`.

        Raises NvmlError where there is no driver, or it does not work, and TimeoutError where it does not answer.
        """
        roster = self._roster
        roster.gpus, roster.by_handle = [], {}
        self.turn_due = self._turn_end()
        try:
            await self._see_host(PROBE_PATIENCE)
            opened = await self._reopening.first(self.remembered, self._rounds, self.timeout)
            if not roster.gpus:
                await self._session.close(self.timeout)
                return self.node
            if self._session.is_open:  # before anyone is told of a GPU: from then on no event of it goes unheard
                await self._events.tend(roster.watched(), self.timeout)
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
        """Watches until cancelled: events from one thread, and a look at every GPU each `poll` seconds."""
        self._running, self._over = True, None
        self._schedule.poll_at(anyio.current_time())  # begun again, it does not wait for the next poll
        try:
            self._events.listen(self.timeout)
            while True:
                await anyio.sleep(LOOK_GAP)
                turn = self._schedule.take(anyio.current_time())
                if turn.whole:
                    self._over = None
                    # Begun again after a failure, it does not get more time for what is owed; and one may begin before its time.
                    self.turn_due = min(self.turn_due, self._turn_end())
                await self._turn(turn)
                self.trouble = self._unreached()
                self._turned.ring()
                if turn.whole:
                    # Spread, so that the nodes of a fleet do not all wake at the same moment; never later than told.
                    self._share = 0.9 + 0.1 * random.random()  # noqa: S311
                    self._over = anyio.current_time()
                    self._pause()
                while (wait := self._schedule.next() - anyio.current_time()) > 0:
                    await self._look.wait(wait)
        finally:
            self._running = False
            self.close()

    def close(self) -> None:
        """Lets the threads go that do nothing. For whoever does not `run`."""
        self._events.stop()
        self._calls.close()

    async def shut(self) -> bool:
        """Close the driver, for the next monitor of this process. Returns whether it is closed; waits a few seconds."""
        try:
            return not await self._reopening.shut(min(self.timeout, PATIENCE))
        finally:
            self.close()

    @property
    def restart_needed(self) -> str:
        """Why other GPUs cannot be found or released before the process is restarted, for people; empty if they can."""
        return self._reopening.restart_needed

    def look_now(self) -> None:
        """Has the GPUs looked at without waiting for their turn. From the event loop's thread."""
        # Where some GPUs' turn is over in the one under way, it is followed by another.
        self._schedule.everyone(-math.inf)
        self._look.ring()

    def retune(self, poll: float, timeout: float, retention: float, *, judging: bool) -> None:
        """Has other settings obeyed at once; see the attributes. From the event loop's thread."""
        longer = longest_turn(timeout) - longest_turn(self.timeout)
        other_judging = judging != self.judging
        self.poll, self.timeout, self.retention, self.judging = poll, timeout, retention, judging
        if not self._running:
            return
        if self._over is None:
            self.turn_due += max(0.0, longer)  # the turn under way may take as long as it wants by now
        else:
            self._pause()
        if other_judging:
            self._schedule.everyone(-math.inf)
        self._look.ring()

    def _pause(self) -> None:
        """Everyone's next turn comes a poll after the last one was over."""
        assert self._over is not None
        at = self._over + self.poll * self._share
        self._schedule.poll_at(at)
        self.turn_due = at + longest_turn(self.timeout)

    def unsupported(self) -> Mapping[str, frozenset[str]]:
        """By GPU uuid, the fields of a Sample that it never answers, as far as that is known; not of one never looked at."""
        return {each.gpu.uuid: each.unanswered for each in self._roster.gpus if each.unanswered is not None}

    async def release(self, uuids: frozenset[str] | None) -> None:
        """Drops the driver's handles of these GPUs, None: of all, and leaves them alone until `resume`. Waits a few seconds.

        Raises ReleaseError where something holds them; they are dropped as soon as it lets go.
        """
        roster = self._roster
        roster.wanted = roster.wanted.plus(uuids)
        if not await self._brought(lambda: self._reopening.released):
            words = self._reopening.blocked_by or self._reopening.holder or "the GPUs' turn has not come yet"
            raise ReleaseError(f"the driver's handles are not dropped yet, and are as soon as this is over: {words}")

    async def resume(self, uuids: frozenset[str] | None) -> None:
        """Has these GPUs, None: all, found and watched again, and waits a few seconds for the first look at them."""
        roster, before = self._roster, self._rounds
        roster.wanted = roster.wanted.minus(uuids, (watched.gpu.uuid for watched in roster.gpus))
        if self._running:  # else they are found when the driver is
            await self._brought(lambda: roster.untouched == roster.wanted and self._rounds > before)

    @property
    def no_gpu(self) -> str:
        """The reason why no GPU is to be expected on this node, for people; empty if there may be a GPU."""
        return no_gpu(self._pci_gpus, (*self._before.values(), *self.remembered), frozenset(self._device_roots))

    @property
    def former(self) -> tuple[Gpu, ...]:
        """GPUs that the node had before and that are not listed now: missing GPUs, and GPUs that others replaced."""
        listed = {watched.gpu.uuid for watched in self._roster.gpus}
        return tuple(gpu for uuid, gpu in self._before.items() if uuid not in listed)

    def dismiss(self, uuid: str) -> bool:
        """Drops a missing GPU from the memory of the node, as an operator ordered. Returns whether it was there."""
        if self._before.pop(uuid, None) is None:
            return False
        self._pass_on(AS_BEFORE)
        return True

    async def _brought(self, done: Callable[[], bool]) -> bool:
        """Waits until a round brought something about, for a few seconds. Returns whether one did."""
        self.look_now()
        with anyio.move_on_after(PATIENCE):
            while not done():
                await self._turned.wait()
        return done()

    def _look_at(self, uuid: str) -> None:
        """An event of that GPU was heard, or of one that is not known: its own answers tell more."""
        if not self._schedule.expects(uuid):
            self._schedule.heard(uuid, anyio.current_time())
            self._look.ring()

    def _turn_end(self) -> float:
        """By when a turn that begins now is over."""
        return anyio.current_time() + longest_turn(self.timeout)

    # A turn

    async def _turn(self, turn: Turn) -> None:
        """The host, the driver if it must be opened again, strange events, the GPUs whose turn it is, and the node."""
        roster = self._roster
        await self._see_host(LOOK_PATIENCE)
        if turn.whole and (opened := await self._reopening.again(self._rounds, self.timeout)) is not None:
            await self._publish(opened)
        self._events.collect()
        self._events.listen(self.timeout)
        await self._reports.resolve_unknown_events(LOOK_PATIENCE)
        gpus = [each for each in roster.watched() if turn.whole or each.gpu.uuid in (turn.full or ())]
        found = await self._look_at_all(gpus, turn.full, min(self.timeout, LOOK_PATIENCE))
        if self._session.is_open and await self._events.tend(roster.watched(), self.timeout, retry=turn.whole):
            self.look_now()  # what happened while the event set was made again was not heard
        self._events.report(watched.gpu.uuid for watched in roster.watched())
        self._events.listen(self.timeout)
        await self._keep_up(found)
        if turn.whole:
            self._count_round()

    async def _look_at_all(
        self, gpus: Sequence[Watched], full: frozenset[str] | None, patience: float
    ) -> list[LookResult]:
        """Looks at these GPUs at once, and passes on each sample as it comes. Returns what was found besides."""
        every: list[LookResult] = []

        async def one(watched: Watched) -> None:
            uuid = watched.gpu.uuid
            wholly = full is None or uuid in full
            found = await self._poller.look(watched, patience, self.timeout, full=wholly, judging=self.judging)
            if found.register_events:
                self._events.register_again(uuid)
            soon = found.sample is not None and self._reports.saw(uuid, found.sample)
            if soon or found.look_soon:
                self._schedule.one(watched.gpu.uuid, anyio.current_time() + CONFIRM)
            every.append(found)

        async with anyio.create_task_group() as group:
            for watched in gpus:
                group.start_soon(one, watched)
        return every

    async def _keep_up(self, found: Sequence[LookResult]) -> None:
        """What belongs to a turn beside the looks: what is gone for good, links that are owed, and the node."""
        roster, now = self._roster, anyio.current_time()
        for watched in tuple(roster.gpus):
            since = watched.vanished_since
            if since is not None and now - since >= self.retention and not roster.is_released(watched.gpu.uuid):
                ago = duration(now - since)
                log.warning("GPU %s vanished %s ago and is not listed any more", watched.gpu.uuid, ago)
                roster.gpus.remove(watched)
                self._before[watched.gpu.uuid] = watched.gpu
        if any(each.repartitioned for each in found):
            await self._see_host(LOOK_PATIENCE)  # new MIG devices have nodes of their own
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
        if opens or self._reopening.blocked_by or roster.bus.news(roster.gpus, self._rounds):
            self._schedule.everyone(anyio.current_time() + CONFIRM)

    def _unreached(self) -> str:
        """Why no GPU can be reached at the moment, however that came about; empty where one can or where none is to be."""
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
        """Has the links between the GPUs read again, and passes the node on."""
        await self._links.read(self._roster.gpus, min(self.timeout, PROBE_PATIENCE))
        await self._see_host(PROBE_PATIENCE)
        self._pass_on(opened)

    def _pass_on(self, opened: Opened) -> None:
        """Passes on the node as it is known, under the driver as it was `opened`, where that is news."""
        self._links.came()
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

    async def _see_host(self, patience: float) -> None:
        """Takes in what the host says now: nothing, where it cannot be asked or takes its time, and what was known stays."""
        roster = self._roster
        sliced = any(watched.gpu.mig_devices for watched in roster.gpus)
        try:
            seen = await self._asking_host.joined(
                partial(see_host, self.host, sliced=sliced), min(self.timeout, patience)
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, what is known of the host holds
            log.debug("the host cannot be asked: %r", error)
            return
        self._device_roots, self._pci_gpus = seen.device_roots, seen.pci_gpus
        roster.bus.bindings = roster.bus.bindings if seen.bindings is None else seen.bindings
        if seen.mig_minors is not None:
            for watched in roster.gpus:
                watched.gpu = with_caps(watched.gpu, seen.mig_minors)
        if seen.boot_id and seen.boot_id != self.boot_id:
            before, self.boot_id = self.boot_id, seen.boot_id
            if before:
                log.warning("the node was booted: every GPU was reset, and is looked for again")
                self._reopening.rebooted = True
                roster.wanted = Released()  # no maintenance outlives the boot it was begun in
                self._booted(seen.boot_id)
