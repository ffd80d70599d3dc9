"""Pass the node from a running daemon to a new daemon. Both sides are here; `state.node_lock` describes the protocol."""

import logging
import math
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio

from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.now import Now
from gpu_plugin.daemon.opened_state import STATE_PATIENCE, make_way
from gpu_plugin.health.evidence import Evidence, newer
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.snapshot import ResourceView
from gpu_plugin.runtime.control.server import Verb, serve_refusals
from gpu_plugin.runtime.threads import SlowCall, begin
from gpu_plugin.state.memory import Memory
from gpu_plugin.state.node_lock import NodeLock, Outcome
from gpu_plugin.state.recorder import Recorder

log = logging.getLogger(__name__)

CLAIM_PATIENCE = 15.0
"""Seconds after which a running daemon does not hand over. It looks for a claim at least every 10 s; older versions never do."""

REGISTER_PATIENCE = 60.0
"""Seconds in which a new daemon must register all resources while the former daemon still answers the kubelet."""

LAST_CALLS = 1.0
"""Seconds for which the former daemon still answers after the new daemon serves.

The kubelet chooses a plugin, asks for its preference, and only then has it allocate. A kubelet up to 1.36 drops the new daemon
when the former one ends: the new daemon registers again at once if it is no longer busy with its start.
"""


class TakeoverError(Exception):
    """This daemon cannot take the node over from the daemon that serves it."""


class Takeover:
    """Takes the node over from the daemon before this one, and hands it over to the next daemon.

    Attributes:
        may_register: set once the kubelet may have the lists of this daemon.
        takes_orders: set once no former daemon can get the node back, which would not know the orders of operators.
        over: set once this daemon serves and no former daemon does.
    """

    def __init__(
        self,
        lock: NodeLock,
        now: Now,
        health: HealthWatch,
        inventory: Inventory,
        registrations: Registrations,
        memory: Memory,
        recorder: Recorder,
    ) -> None:
        self._lock = lock
        self._now = now
        self._health = health
        self._inventory = inventory
        self._store = inventory.store
        self._registrations = registrations
        self._memory = memory
        self._recorder = recorder
        self.may_register = anyio.Event()
        self.takes_orders = anyio.Event()
        self.over = anyio.Event()

    @property
    def offers_devices(self) -> bool:
        """Whether a list has a healthy device."""
        return any(map(self._has_healthy_device, self._store.current.resources.values()))

    @property
    def serves_pods(self) -> bool:
        """Whether the kubelet has a list with a healthy device."""
        resources = self._store.current.resources
        return any(self._registrations.heard(name) and self._has_healthy_device(resources[name]) for name in resources)

    @staticmethod
    def _has_healthy_device(view: ResourceView) -> bool:
        return any(device.healthy for device in view.resource.devices)

    async def wait_for_node(self, state_dir: Path, state_call: SlowCall[str], status: Verb, *, claims: bool) -> None:
        """Wait until no other daemon has this node. Until then this daemon reads, writes and serves nothing.

        Args:
            state_dir: the state directory of this daemon.
            state_call: makes the calls that lock the directories.
            status: answers the command `status` during the wait.
            claims: whether to ask a running daemon for the node.

        Raises:
            NoAnswerError: the state directory or the kubelet's directory does not answer.
        """
        async with AsyncExitStack() as waiting:
            while why := await state_call.joined(self._lock.take, STATE_PATIENCE):
                if why != self._now.waits_for:
                    log.warning("waiting: %s", why)
                if self._lock.has_state and not self._now.waits_for:  # else the other daemon answers there
                    make_way(state_dir)
                    refusals = serve_refusals(
                        state_dir,
                        lambda: f"this daemon waits: {self._now.waits_for}",
                        {"status": status},
                    )
                    await waiting.enter_async_context(refusals)
                self._now.waits_for, standby = why, not self._lock.has_state
                # A pod that claims is not ready: a DaemonSet would end the former pod before this pod is known to work.
                claiming, claims = claims and standby, claims and not standby
                self._now.standby = standby and not claiming
                job = begin(partial(self._lock.wait, claims=claiming), "lock")
                if claiming and not await job.wait(CLAIM_PATIENCE):
                    log.info("the other daemon does not hand over; starting when it has ended")
                    self._now.standby = True
                await job.result()
        if self._now.waits_for:
            log.info("the other daemon has %s; starting", "handed over" if self._lock.former_serves else "ended")
        self._now.waits_for, self._now.standby = "", False
        self._now.takes_over = self._lock.former_serves
        if not self._lock.former_serves:
            self._lock.unclaim()  # the next daemon may claim, whether or not this daemon ever reaches a GPU

    async def until_over(self) -> None:
        """Wait until the kubelet has the lists of all resources, then have the former daemon end, if there is one.

        Raises:
            TakeoverError: it takes longer than REGISTER_PATIENCE, or no device is healthy, and a former daemon serves.
        """
        from_former = self._lock.former_serves
        if not from_former:
            self.takes_orders.set()
        with anyio.move_on_after(REGISTER_PATIENCE if from_former else math.inf) as patience:
            while self._inventory.unpublished or (from_former and not self.offers_devices):
                await self._store.changed.wait()
            if from_former:
                await begin(self._lock.registers, "lock").result()
            self.may_register.set()
            while not all(map(self._registrations.heard, self._store.current.resources)):
                await self._registrations.changes.wait()
        if patience.cancelled_caught:
            raise TakeoverError(
                f"not every resource was registered with a healthy device within {REGISTER_PATIENCE:g} s, so the former daemon "
                "keeps the node; gpu-plugin doctor shows why the GPUs or the kubelet cannot be reached"
            )
        self._lock.serves()
        self._now.takes_over = False
        self.takes_orders.set()
        if from_former:
            had_former = await begin(self._lock.wait_directory, "directory-lock").result()
            self._inventory.former_ended(anyio.current_time())
            for name in self._store.current.resources if had_former else ():
                self._store.resend(name)  # the former daemon may have sent a list after ours
        late = await begin(self._memory.handed_over, "state").result()
        self._health.adopt(late)
        self._lock.unclaim()
        self.over.set()
        if late:
            await self._recorder.all_written()
            await begin(self._memory.forget_handover, "state").wait(STATE_PATIENCE)

    async def hand_over(self) -> Outcome:
        """Unlock the state directory for the new daemon, and wait until that daemon serves or has ended.

        During the wait this daemon watches the GPUs and answers the kubelet. Its other parts must not run. It sends no list
        after it has noticed that the new daemon serves.

        Unless the new daemon serves, this daemon has the state directory again afterwards.
        """
        log.info("handing over to a new daemon; the kubelet is answered until that daemon is registered")
        self._now.waits_for, self._now.standby = "the new daemon takes over", True
        before = self._health.evidence()
        written = before if await self._recorder.written() else ()
        self._lock.hand_over()
        try:
            outcome = await begin(self._lock.handed_over, "takeover").result()
            if outcome is Outcome.NEW_SERVES:
                self._store.lists_stopped = True
                await anyio.sleep(LAST_CALLS)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self._pass_on(written)
            raise
        if outcome is Outcome.NEW_SERVES:
            await self._pass_on(written)
            return outcome
        log.warning("the new daemon ended before it was registered; serving on")
        self._health.adopt(newer(await begin(self._memory.taken_back, "state").result(), before))
        self._now.waits_for, self._now.standby = "", False
        return outcome

    async def _pass_on(self, written: tuple[Evidence, ...]) -> None:
        """Write for the new daemon the evidence that the state directory did not have when it was unlocked."""
        if late := newer(self._health.evidence(), written):
            await begin(partial(self._memory.hand_over, late), "state").wait(STATE_PATIENCE)
