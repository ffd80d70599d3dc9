"""Keeps an eye on the node's GPUs: finds them, looks at each in turn, and passes on what the driver and the host report.

Decides nothing of their health: every look and every event goes to `observe`, every change of what is known of the hardware
to `found`. A GPU that holds a call holds no other GPU: its call is left on its own thread until it comes back.
"""

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import anyio

from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.health.observation import Fault, Observation, Sample
from gpu_plugin.nvml.calls import DriverCalls, DriverSession
from gpu_plugin.nvml.finding import Finder, HostSight, at_rest, in_order, merged, see, with_remembered
from gpu_plugin.nvml.links import Links
from gpu_plugin.nvml.looks import Looks
from gpu_plugin.nvml.mig import with_caps
from gpu_plugin.nvml.port import Driver, Event, HostView, NvmlError
from gpu_plugin.nvml.release import PATIENCE, Released, ReleaseError
from gpu_plugin.nvml.reports import Reports
from gpu_plugin.nvml.roster import Roster
from gpu_plugin.nvml.subscription import EventSubscription
from gpu_plugin.nvml.watched import Watched
from gpu_plugin.pulse import Pulse
from gpu_plugin.threads import Job

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


FIRST_LOOKS = 5.0
"""Seconds that the first looks may take together before the node is served, with those not looked at yet held back."""


MANY = 16
"""GPUs that a node is taken to have while it is not known how many there are."""


def longest_turn(timeout: float, gpus: int) -> float:
    """Seconds that a turn may take by the patience of everything in it, where the driver and each GPU use all of theirs.

    The driver is opened anew by six calls at most, of `timeout` seconds each; a GPU is looked at, its links included, and
    asked for its events in less than 4 s; 30 s are for the host, the links of all GPUs together, and the wait for events.
    """
    return 30 + 6 * timeout + 4 * gpus


def _unheard(_: object) -> None:
    """Nobody wants to know."""


@dataclass(slots=True)
class Monitor:
    """Watches one node's GPUs.

    `poll`, `timeout` and `retention` are in seconds, the last one for a GPU that has vanished; `remembered` are GPUs that
    this boot has seen before, and `released` the uuids of those that are out for maintenance from the start (None: all).
    """

    driver: Driver
    host: HostView
    poll: float
    timeout: float
    remembered: Sequence[Gpu]
    observe: Callable[[str, Observation], bool]
    """Takes in an observation; returns whether another soon would settle something."""
    found: Callable[[Node], None]
    node: Node = field(default_factory=Node)
    retention: float = field(default=86400.0, kw_only=True)
    released: InitVar[frozenset[str] | None] = field(default=frozenset(), kw_only=True)
    booted: Callable[[str], None] = field(default=_unheard, kw_only=True)
    """Told the id of the boot once the node was booted under us, as simulated ones are."""
    met: Callable[[Sequence[Gpu]], None] = field(default=_unheard, kw_only=True)
    """Told of GPUs before they are looked at for the first time, which is before `found` is."""
    boot_id: str = field(default="", kw_only=True)
    """The boot that is known of; empty: whichever the host tells first."""
    turn_due: float = field(default=math.inf, init=False)
    """By when the turn under way, or the next one, is over if all is well, in event loop time; it is none while idle."""
    trouble: str = field(default="", init=False)
    """Why no GPU could be reached as of the last turn; empty where one could, and where all are released."""
    _threads: DriverCalls = field(default_factory=DriverCalls)
    _look: Pulse = field(default_factory=Pulse)
    _turned: Pulse = field(default_factory=Pulse)
    _due: bool = False
    _running: bool = False
    _rounds: int = 0
    _out_of_reach: int = 0
    _rebooted: bool = False
    _held: str = ""
    _device_nodes: frozenset[str] = frozenset()
    _seeing: "Job[HostSight] | None" = None
    _roster: Roster = field(init=False)
    _session: DriverSession = field(init=False)
    _finder: Finder = field(init=False)
    _reports: Reports = field(init=False)
    _events: EventSubscription = field(init=False)
    _links: Links = field(init=False)
    _looks: Looks = field(init=False)

    def __post_init__(self, released: frozenset[str] | None) -> None:
        driver, host, calls = self.driver, self.host, self._threads
        roster = self._roster = Roster(Released.of(released))
        session = self._session = DriverSession(driver, calls)
        reports = self._reports = Reports(driver, calls, roster, self._saw)
        events = self._events = EventSubscription(driver, calls, reports.deaf)
        self._finder = Finder(driver, host, calls)
        self._links = Links(driver, host, calls)
        self._looks = Looks(driver, host, calls, session, roster, reports, events)

    async def open(self) -> Node:
        """Opens the driver and finds the GPUs. Where all those remembered are released, it is left alone until `resume`.

        Raises:
            NvmlError: there is no driver, or it does not work.
            TimeoutError: it does not answer.
        """
        roster = self._roster
        roster.gpus, roster.by_handle = [], {}
        self._expect_turn(0)
        try:
            await self._see_host(PROBE_PATIENCE)
            # Of GPUs that nobody remembers it is not known where they are: they are found first, and released then.
            roster.untouched = roster.wanted if self.remembered else Released()
            version, self._rebooted = "", False  # whatever is found now is of this boot
            if roster.untouched.leaves(self.remembered):
                version, count = await self._session.open(self.timeout)
                roster.gpus = await self._first(count)
                roster.bus.opened(roster.gpus, self._rounds)
            else:
                roster.gpus = in_order(at_rest(self.remembered, roster.untouched))
            roster.know_handles()
            if not roster.gpus:
                await self._session.close(self.timeout)
                return self.node
            if self._session.is_open:  # before anyone is told of a GPU: from then on no event of it goes unheard
                await self._events.begin(roster.gpus, self.timeout)
                await self._first_looks()
            await self._publish(version)
            self.trouble = self._unreached()
        finally:
            self.turn_due = math.inf  # until the next attempt, or `run`
            if not roster.gpus:
                self._threads.close()
        return self.node

    async def run(self) -> None:
        """Watches until cancelled: events from one thread, and a look at every GPU each `poll` seconds."""
        self._running = True
        try:
            while True:
                self._due = self._reports.soon = False
                owed = self.turn_due  # begun again after a failure, it does not get more time for the turn that is owed
                self._expect_turn(0)  # and one may begin before its time
                self.turn_due = min(self.turn_due, owed)
                await self._round()
                self.trouble = self._unreached()
                self._turned.ring()
                # Spread, so that the nodes of a fleet do not all wake at the same moment.
                pause = self.poll * (0.95 + 0.1 * random.random())  # noqa: S311
                self._expect_turn(pause)
                if not self._due:
                    await self._look.wait(min(pause, CONFIRM) if self._reports.soon else pause)
                await anyio.sleep(LOOK_GAP)  # first let the kubelet hear of the event that may have brought this round
        finally:
            self._running = False
            self._events.stop()
            self._threads.close()

    def _expect_turn(self, pause: float) -> None:
        gpus = len(self._roster.gpus) or len(self.remembered) or MANY
        self.turn_due = anyio.current_time() + pause + longest_turn(self.timeout, gpus)

    def look_now(self) -> None:
        """Has the GPUs looked at without waiting for their turn. From the event loop's thread."""
        self._due = True  # in a round under way some GPUs' turn is over: it is followed by another
        self._look.ring()

    def unsupported(self) -> Mapping[str, frozenset[str]]:
        """By GPU uuid, the fields of a Sample that it never answers, as far as that has been learnt."""
        return {watched.gpu.uuid: watched.unsupported for watched in self._roster.gpus}

    async def release(self, uuids: frozenset[str] | None) -> None:
        """Drops the driver's handles of these GPUs, None: of all, and leaves them alone until `resume`. Waits a few seconds.

        Raises:
            ReleaseError: something holds them; they are dropped as soon as it lets go.
        """
        roster = self._roster
        roster.wanted = roster.wanted.plus(uuids)
        if not await self._brought(self._let_go):
            held = self._held or self._holder() or "the GPUs' turn has not come yet"
            raise ReleaseError(f"the driver's handles are not dropped yet, and are as soon as this is over: {held}")

    async def resume(self, uuids: frozenset[str] | None) -> None:
        """Has these GPUs, None: all, found and watched again, and waits a few seconds for the first look at them."""
        roster, before = self._roster, self._rounds
        roster.wanted = roster.wanted.minus(uuids, (watched.gpu.uuid for watched in roster.gpus))
        if self._running:  # else they are found when the driver is
            await self._brought(lambda: roster.untouched == roster.wanted and self._rounds > before)

    def _let_go(self) -> bool:
        """Whether the driver has no handle of what is released."""
        roster = self._roster
        return not self._session.holds or (roster.in_use and roster.untouched.covers(roster.wanted))

    async def _brought(self, done: Callable[[], bool]) -> bool:
        """Waits until a round brought something about, for a few seconds. Returns whether one did."""
        self.look_now()
        with anyio.move_on_after(PATIENCE):
            while not done():
                await self._turned.wait()
        return done()

    async def _first(self, count: int) -> list[Watched]:
        """Every GPU that may be touched, found for the first time, and what is remembered beside."""
        untouched, patience = self._roster.untouched, min(self.timeout, PROBE_PATIENCE)
        if not untouched:
            found = await self._finder.by_index(count, patience)
            return with_remembered(found, self.remembered, self._roster.bus.told)
        reached = [gpu for gpu in self.remembered if gpu.uuid not in untouched]
        return in_order([*at_rest(self.remembered, untouched), *await self._finder.by_bus_id(reached, patience)])

    async def _first_looks(self) -> None:
        """A look at every GPU before anyone is told of it: what has not been seen at work is not handed out."""
        roster = self._roster
        self.met([watched.gpu for watched in roster.gpus])
        asked = [each for each in roster.gpus if each.handle is not None and not roster.at_rest(each.gpu.uuid)]
        with anyio.move_on_after(FIRST_LOOKS):
            for watched in asked:
                await self._looks.turn(watched, min(self.timeout, LOOK_PATIENCE), self.timeout)
        for watched in asked:
            if watched.pending is not None or watched.handle is None:
                self._saw(watched.gpu.uuid, Sample(fault=Fault.UNSEEN, detail="there has been no good look at it yet"))

    async def _round(self) -> None:
        """Everything once: the host, the driver if it must be opened anew, strange events, every GPU, the node."""
        await self._see_host(LOOK_PATIENCE)
        await self._mend()
        self._events.listen(self._deliver, self.look_now, self.timeout)
        await self._reports.name_strays(LOOK_PATIENCE)
        for watched in tuple(self._roster.gpus):
            if not self._roster.at_rest(watched.gpu.uuid):
                await self._looks.turn(watched, min(self.timeout, LOOK_PATIENCE), self.timeout)
        await self._keep_up()
        self._rounds += 1

    def _saw(self, uuid: str, seen: Observation) -> bool:
        return self.observe(uuid, seen)

    def _deliver(self, event: Event) -> None:
        self._reports.heard(event)
        self.look_now()  # whatever it was, the GPUs' own answers tell more

    async def _mend(self) -> None:
        """Opens the driver anew where that is asked for or may help, unless a call to it is under way."""
        roster = self._roster
        news = roster.bus.news(roster.gpus, self._rounds)
        times, between = divmod(self._out_of_reach, REOPEN_AFTER)
        lost = times and not between and (not self._session.is_open or times in (1, 2, 4) or times % 8 == 0)
        in_use, held_before = roster.in_use, self._session.holds
        if self._rebooted:
            why = "the node was booted"
        elif not in_use and (held_before or roster.untouched != roster.wanted):
            every = all(watched.gpu.uuid in roster.wanted for watched in roster.gpus)
            why = f"all GPUs{'' if every else ' that can be reached alone'} are released"
        elif roster.untouched != roster.wanted:
            why = "GPUs were released or resumed"
        elif self._session.answered_late:
            why = "it answers at last"
        elif news and self._session.is_open:
            why = f"it was bound to {', '.join(news)}"
        elif lost:
            why = f"no GPU has answered for {self._out_of_reach} rounds"
        else:
            return
        held = self._holder()
        # One that answers at last is taken as it is, unless it was opened for others than are to be touched now.
        late = self._session.answered_late and in_use and roster.untouched == roster.wanted
        if not held and not late:
            held = await self._shut()
        if held and held != self._held:
            able = "opened anew" if in_use else "closed"
            log.warning("the driver cannot be %s now: %s; will be tried again; wanted because %s", able, held, why)
        self._held = held
        if held:
            self._reports.soon = True
            return
        if in_use or held_before:
            doing = "opening the driver anew" if in_use else "closing the driver"
            log.log(logging.WARNING if lost else logging.INFO, "%s: %s", doing, why)
        self._rebooted = False
        roster.forget()
        self._reports.forget()
        await self._reopen()

    def _holder(self) -> str:
        """What keeps the driver from being closed: a call that has not come back. Empty if nothing does."""
        if not self._threads.under_way:
            return ""
        pending = [each.gpu.uuid for each in self._roster.gpus if each.pending and not each.pending.done.done()]
        return self._session.held or f"a call to it has not come back{f', about GPU {pending[0]}' if pending else ''}"

    async def _shut(self) -> str:
        """Leaves the events and closes the driver. Returns what holds it; empty once it is closed."""
        if not await self._events.leave():
            return "it holds the wait for its events"
        return "" if await self._session.close(min(self.timeout, PROBE_PATIENCE)) else "it does not close"

    async def _reopen(self) -> None:
        """Begins anew with the driver: it counts GPUs when it is opened, and a reloaded one knows no handle of before."""
        roster, version = self._roster, ""
        gpus = [watched.gpu for watched in roster.gpus]
        if roster.untouched.leaves(gpus):
            try:
                version, count = await self._session.open(self.timeout)
            except (NvmlError, TimeoutError) as error:
                log.warning("the driver cannot be opened: %s", error)
                return
            patience = min(self.timeout, PROBE_PATIENCE)
            if roster.untouched:
                reachable = [gpu for gpu in gpus if gpu.pci_bus_id and gpu.uuid not in roster.untouched]
                probed = await self._finder.by_bus_id(reachable, patience)
            else:
                there = [watched.gpu for watched in roster.gpus if watched.vanished_since is None]
                probed = await self._finder.by_index(count, patience, there)
            roster.gpus = merged(roster.gpus, probed, every=not roster.untouched)
            roster.bus.opened(roster.gpus, self._rounds)
            roster.know_handles()
            await self._events.begin(roster.gpus, self.timeout)
        await self._publish(version)

    async def _keep_up(self) -> None:
        """What belongs to a round beside the looks: events still refused, links still owed, what is new, what is gone."""
        roster, looks = self._roster, self._looks
        if self._events.owed and self._session.is_open:
            await self._events.begin(roster.gpus, self.timeout)
        now = anyio.current_time()
        for watched in tuple(roster.gpus):
            since = watched.vanished_since
            if since is not None and now - since >= self.retention and not roster.at_rest(watched.gpu.uuid):
                log.warning("GPU %s vanished %.0f s ago and is not listed any more", watched.gpu.uuid, now - since)
                roster.gpus.remove(watched)
        if looks.recut:
            await self._see_host(LOOK_PATIENCE)  # new MIG devices have nodes of their own
        if looks.relinked or self._links.due(roster.gpus):
            await self._publish("")
        else:
            self._links.came()
            self._tell(self._known())
        looks.recut = False
        self._reports.soon |= bool(roster.bus.news(roster.gpus, self._rounds + 1))
        asked = [each for each in roster.gpus if not roster.at_rest(each.gpu.uuid) and not roster.bus.vanished(each)]
        out = all(watched.handle is None and watched.pending is None for watched in asked)
        out = out and bool(asked or not roster.gpus) and roster.untouched.leaves(each.gpu for each in roster.gpus)
        self._out_of_reach = self._out_of_reach + 1 if out else 0

    def _unreached(self) -> str:
        """Why no GPU can be reached at the moment, however that came about; empty where one can or where none is to be."""
        roster = self._roster
        gpus = [watched.gpu for watched in roster.gpus]
        if not roster.untouched.leaves(gpus) or (gpus and not roster.in_use):
            return ""
        if not self._session.is_open:
            return f"the NVIDIA driver cannot be used: {self._session.trouble or 'it is not open'}"
        asked = [watched for watched in roster.gpus if not roster.at_rest(watched.gpu.uuid)]
        there = [watched for watched in asked if not roster.bus.vanished(watched)]
        if not there:
            return "" if len(asked) < len(gpus) else "the NVIDIA driver finds no GPU on this node any more"
        now = anyio.current_time()
        if any(watched.reached(now, self.timeout) for watched in there):
            return ""
        return f"none of the {len(there)} GPUs answers" if len(there) > 1 else "the only GPU does not answer"

    async def _publish(self, version: str) -> None:
        """Makes the node of what is known, the links between its GPUs read anew, and passes it on."""
        self._looks.relinked = False  # what made it so is found now
        await self._links.read(self._roster.gpus, min(self.timeout, PROBE_PATIENCE))
        await self._see_host(PROBE_PATIENCE)
        self._tell(self._known(version))

    def _known(self, version: str = "") -> Node:
        gpus = tuple(watched.gpu for watched in self._roster.gpus)
        uuids = [gpu.uuid for gpu in gpus]
        links, cliques = self._links.between(uuids), self._links.cliques(uuids)
        return Node(gpus, links, version or self.node.driver_version, self._device_nodes, cliques)

    def _tell(self, node: Node) -> None:
        if node != self.node:
            self.node = node
            self.found(node)

    async def _see_host(self, patience: float) -> None:
        """Takes in what the host says now: nothing, where it cannot be asked or takes its time, and what was known stays."""
        roster = self._roster
        if self._seeing is None:
            sliced = any(watched.gpu.mig_devices for watched in roster.gpus)
            patience = min(self.timeout, patience)
            self._seeing = await self._threads.aside(lambda: see(self.host, sliced=sliced), patience)
        job = self._seeing
        if not job.done.done():
            return
        self._seeing = None
        if job.done.exception() is not None:
            log.debug("the host cannot be asked: %r", job.done.exception())
            return
        seen = job.done.result()
        self._device_nodes = seen.device_nodes
        roster.bus.told = roster.bus.told if seen.bindings is None else seen.bindings
        if seen.mig_minors is not None:
            for watched in roster.gpus:
                watched.gpu = with_caps(watched.gpu, seen.mig_minors)
        if seen.boot_id and seen.boot_id != self.boot_id:
            before, self.boot_id = self.boot_id, seen.boot_id
            if before:
                log.warning("the node was booted: every GPU was reset, and is found anew")
                self._rebooted = True
                roster.wanted = Released()  # no maintenance outlives the boot it was begun in
                self.booted(seen.boot_id)
