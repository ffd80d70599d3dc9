"""What is offered, kept true to what pods hold and to the MPS daemons' state: the edges around the inventory."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from gpu_plugin.config.settings import SettingsStore
from gpu_plugin.config.words import counted
from gpu_plugin.devices.device import MAX_LIST_BYTES, Device, Resource, device_id_fault, shown_id
from gpu_plugin.kubelet import checkpoint
from gpu_plugin.kubelet.holders import Holders
from gpu_plugin.kubelet.holding import Holding, ListResend
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.listing import judge
from gpu_plugin.kubelet.offer import Offer
from gpu_plugin.kubelet.registrations import Registrations
from gpu_plugin.kubelet.snapshot import ResourceView
from gpu_plugin.placement.topology import Topology
from gpu_plugin.runtime.log_lines import log_together
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import OFF_LOOP_DEVICES, computed

log = logging.getLogger(__name__)

HOLDERS_POLL = 2.0
"""Seconds between two questions which devices pods hold, while something is retired; less where a sooner one tells more."""

HOLDERS_SOON = 0.2
"""Seconds to the next such question after a list that has the kubelet write down what is waited for."""

HOLDERS_CHECK = 30.0
"""Seconds between two such questions otherwise: what pods hold and nobody lists shows then."""

TIMER_SLACK = 0.01
"""Seconds by which a question comes later than the moment from which on it tells more: a timer may be early by its resolution."""

UNANSWERED_LIMIT = 3
"""Questions in a row that a witness leaves unanswered until it is said that capacity waits: a kubelet may be starting."""

FIRST_PATIENCE = 5.0
"""Seconds for which the first offer waits for a checkpoint that is there and cannot be read: a former process may have given
devices away that it did not write down, which PodResources need not list."""

MPS_POLL = 1.0
"""Seconds between two looks at whether MPS daemons are up."""

SPECS_PATIENCE = 5.0
"""Seconds that a live change to CDI names waits for the specifications; what was served before is served meanwhile."""

MAX_JUDGEMENTS = 2
"""How often something is judged on a thread at most, though what it is judged by (links, health) has changed again meanwhile."""


class Offering:
    """Publishes offers through an inventory; what an offer does away with goes when no pod holds it any more."""

    def __init__(
        self,
        inventory: Inventory,
        settings: SettingsStore,
        unsaved: Pulse,
        registrations: Registrations,
    ) -> None:
        """Takes the settings in force, which name the sockets to ask, and `unsaved`, which rings when a list has changed."""
        self._inventory = inventory
        self._settings = settings
        self._unsaved = unsaved
        self._registrations = registrations
        self._unanswered: Counter[str] = Counter()
        self._writes = False
        self._unsettled = Pulse()
        self._next: Offer | None = None
        self._logged: frozenset[str] = frozenset()
        self._waiting: AbstractSet[str] = frozenset()
        """Resources whose list has no room yet for all devices."""
        self._unlistable: AbstractSet[tuple[str, str]] = frozenset()
        """Devices that pods hold under ids which cannot be listed."""
        self.mps_counts: Mapping[str, Mapping[str, int]] = {}
        """Counts of gpu-plugin mps by resource: `limits_restored` and `probes_failed`."""
        self._holders = Holders(Path(settings.current.socket_dir))
        self._again = ListResend()

    def publish(self, new: Offer) -> None:
        """Has an offer published: at once, or once it is prepared.

        The first one waits for what pods hold: a process that was killed need not have written down all that it knew.
        """
        inventory = self._inventory
        waits = not new.placement.ready or inventory.unpublished or inventory.awaits_specs(new) or self._many(new)
        if self._next is not None or waits:
            self._next = new
            self._unsettled.ring()
        else:
            self._apply(new, Holding(), anyio.current_time())

    def _apply(self, new: Offer, holding: Holding, asked: float) -> None:
        before = self._inventory.store.current.resources
        self._inventory.record_holders(holding.listed, holding.of_all, holding.writing, asked)
        # What the offer itself retires was not asked about.
        self._inventory.apply(new, holding.of_all, asked, holding.listed)
        self._report(new, holding, before)

    async def _judge_apart(self, new: Offer, holding: Holding, asked: float) -> bool:
        """Publish an offer of many devices, judged on a thread. Returns False if things changed each time meanwhile."""
        self._inventory.record_holders(holding.listed, holding.of_all, holding.writing, asked)
        for _ in range(MAX_JUDGEMENTS):
            standing = self._inventory.considered(new, holding.of_all, asked, holding.listed)
            judged = await computed(judge, standing, apart=True)
            if self._next is not new:
                return False
            before = self._inventory.store.current.resources
            if self._inventory.take(judged, standing):
                self._report(new, holding, before)
                return True
        return False

    def _many(self, new: Offer) -> bool:
        """Whether to judge an offer takes so long that the event loop should not stand still meanwhile."""
        listed = (*self._inventory.listed, *new.plan.resources)
        return sum(len(resource.devices) for resource in listed) >= OFF_LOOP_DEVICES

    def _report(self, new: Offer, holding: Holding, before: Mapping[str, ResourceView]) -> None:
        """Log what an offer that was published has changed since `before`."""
        self._log_unlistable(holding)
        asked = {*new.plan.warnings, *new.warnings}
        withheld = {*_held_back(self._inventory.listed, new.plan.warnings)}
        for sentence in sorted(asked - self._logged):
            log.warning("%s", sentence)
        log_together(log, logging.WARNING, sorted(withheld - self._logged))
        self._logged = frozenset(asked | withheld)
        self._log_resources(before)
        self._unsettled.ring()

    def _log_resources(self, before: Mapping[str, ResourceView]) -> None:
        changed = {
            name: f"{name}: {_counted(view.resource.devices)}"
            for name, view in self._inventory.store.current.resources.items()
            if name not in before or before[name].resource != view.resource
        }
        log_together(log, logging.INFO, [*changed.values()], next(iter(changed)) if len(changed) == 1 else "")
        waiting = self._inventory.judged.waiting
        for name in waiting.keys() - self._waiting:
            log.warning(
                "%s: %d devices are not offered yet: beside the devices of before, which stay listed until no pod can hold them, "
                "they would make a list longer than the %d bytes that the kubelet reads. They are offered as those of before "
                "leave the list: within seconds, or when the pods that hold them end. There is nothing to do",
                name,
                waiting[name],
                MAX_LIST_BYTES,
                extra={"resource": name},
            )
        self._waiting = waiting.keys()
        self._unsaved.ring()

    def _log_unlistable(self, holding: Holding) -> None:
        """Log once which devices pods hold, by what the kubelet says, under ids that a list must not have."""
        held = holding.allocated or frozenset()
        known = self._unlistable | held
        odd = {key for key in self._inventory.judged.foreign if device_id_fault(key[1]) and key in known}
        if new := sorted(odd - self._unlistable):
            resource, identifier = new[0]
            by_pod_resources = new[0] in holding.listed
            settings = self._settings.current
            log.warning(
                "%s says that a pod holds %s of %s%s: %s. It is not listed; its hardware is withheld until no pod holds it",
                settings.effective_pod_resources_socket
                if by_pod_resources
                else Path(settings.socket_dir) / checkpoint.NAME,
                shown_id(identifier),
                resource,
                f" (and {counted(len(new) - 1, 'more such device')})" if len(new) > 1 else "",
                device_id_fault(identifier),
                extra={"resource": resource},
            )
        self._unlistable = odd

    async def settle(self) -> None:
        """Publishes offers that wait, withdraws what no pod holds any more, and lists again what one does hold."""
        try:
            while True:
                await self._settle_next()
        finally:
            self._holders.close()

    async def _settle_next(self) -> None:
        """The next offer, or the next question."""
        if self._next is not None:
            failed = await self._prepare()
            await self._await_specs()
            holding, asked = await self._holding_for_offer()
            new = self._next
            try:
                published = self._many(new) and await self._judge_apart(new, holding, asked)
            except Exception:
                self._next = None if self._next is new else self._next
                raise
            if self._next is not new:
                return  # a newer offer came meanwhile
            self._next = None
            if not published:
                self._apply(new, holding, asked)
            if not new.placement.ready and new.placement.topology != failed:
                self._next = new  # its links are of the last moment: it is judged now, and published again
        else:
            await self._unsettled.wait(self._pause(anyio.current_time()))
            if self._next is None and not self._inventory.unpublished:
                asked, about = anyio.current_time(), self._inventory.judged.asked
                holding = await self._read_holding()
                await self._withdraw(holding, asked, about)

    def _pause(self, now: float) -> float:
        """Seconds to the next question: as soon as it can tell more than the one before."""
        if not self._inventory.leaving:
            return HOLDERS_CHECK
        if self._writes:
            return min(HOLDERS_SOON, HOLDERS_POLL)
        recent = self._inventory.store.recent
        worth = (self._inventory.judged.next_leave, recent.worth_asking(self._inventory.judged.awaited))
        return min((HOLDERS_POLL, *(at - now + TIMER_SLACK for at in worth if at > now)))

    async def _prepare(self) -> Topology | None:
        """Has the newest offer prepared, on a thread, since that takes its time on large nodes; no failure keeps it back.

        It may be unready still where links change all the time. Returns the topology that could not be judged, if any.
        """
        for _ in range(MAX_JUDGEMENTS):
            asked = self._next
            if asked is None or asked.placement.ready:
                break
            try:
                made = await anyio.to_thread.run_sync(asked.prepared, abandon_on_cancel=True)
            except Exception:
                log.exception("judging sets of GPUs failed; pods get good ones, which may not be the best")
                return asked.placement.topology
            if self._next is not None and self._next.placement.topology == made.placement.topology:
                self._next = replace(self._next, placement=made.placement)
        return None

    async def _await_specs(self) -> None:
        """Waits a moment for the CDI specifications that the newest offer needs and the one served does without."""
        with anyio.move_on_after(SPECS_PATIENCE):
            while self._next is not None and self._inventory.awaits_specs(self._next):
                await self._inventory.specs_changed.wait()

    async def _withdraw(self, holding: Holding, asked: float, about: Mapping[tuple[str, str], float]) -> None:
        """Takes in an answer to a question `about` these, of the time `asked`; of what was retired since it says nothing."""
        store = self._inventory.store
        self._inventory.record_holders(holding.listed, holding.of_all, holding.writing, asked)
        for last in (*[False] * MAX_JUDGEMENTS, True):
            if self._inventory.judged.asked is not about:
                return
            standing = self._inventory.standing(holding.allocated, asked, holding.listed)
            judged = await computed(judge, standing, apart=not last and standing.devices >= OFF_LOOP_DEVICES)
            before = store.current.resources
            foreign = self._inventory.foreign
            if self._inventory.take(judged, standing):
                self._log_unlistable(holding)
                self._request_checkpoint(holding, asked, before)
                if self._inventory.foreign != foreign:
                    self._unsaved.ring()  # it is to be written down
                return

    def _request_checkpoint(self, holding: Holding, asked: float, before: Mapping[str, ResourceView]) -> None:
        """Has the kubelet write its checkpoint where something waits for that, and says what has changed since `before`."""
        store = self._inventory.store
        changed = store.current.resources is not before
        awaited = self._inventory.judged.awaited
        kept = (holding.written & awaited) | store.recent.unconfirmed(awaited)
        self._log_long_waits(holding, awaited)
        if changed:  # a list that has changed serves as well
            self._log_resources(before)
            again = ""
        else:
            # What was given away less than a second ago needs a list of its own later, which does for all.
            later = asked < store.recent.worth_asking(kept) < inf
            listening = () if later else filter(self._registrations.heard, store.current.resources)
            begun = store.recent.begun(kept)
            again = self._again.due(kept, listening, asked, ready=begun, answered=holding.answered)
        if again:
            store.resend(again)
        self._writes = bool(kept) and (changed or bool(again))

    def _log_long_waits(self, holding: Holding, awaited: AbstractSet[tuple[str, str]]) -> None:
        """Says once that capacity may not come back while a witness stays silent; and again after it has not been so."""
        if self._reached_limit("checkpoint", waits=holding.writing is None and self._unproved(holding, awaited)):
            log.warning(
                "hardware is kept back for pods that may have ended: the kubelet's checkpoint %s cannot be read: %s. "
                "It comes back once that can be read: PodResources does not list what plain init containers have",
                Path(self._settings.current.socket_dir) / checkpoint.NAME,
                self._holders.unread,
            )
        if self._reached_limit("PodResources", waits=bool(awaited) and not holding.answered):
            log.warning(
                "hardware is kept back for pods that may have ended: without PodResources the kubelet does not say so. "
                "It comes back once PodResources answers at %s. Otherwise it does once the kubelet has admitted another pod "
                "that is given devices of any plugin, which cannot be where all are kept back: have PodResources mounted, or "
                "drain the node, stop the kubelet, remove its checkpoint %s and start it",
                self._settings.current.effective_pod_resources_socket,
                Path(self._settings.current.socket_dir) / checkpoint.NAME,
            )

    def _reached_limit(self, witness: str, *, waits: bool) -> bool:
        """Counts a question that a witness left unanswered, in a row. Whether the wait is to be logged at this one."""
        self._unanswered[witness] = self._unanswered[witness] + 1 if waits else 0
        return self._unanswered[witness] == UNANSWERED_LIMIT

    def _unproved(self, holding: Holding, awaited: AbstractSet[tuple[str, str]]) -> bool:
        """Whether something waits that is not known to be a pod's."""
        if holding.allocated is None:
            return bool(awaited)
        return not awaited.isdisjoint(holding.allocated - holding.listed) or bool(
            self._inventory.store.recent.unconfirmed(awaited)
        )

    async def _holding_for_offer(self) -> tuple[Holding, float]:
        """What pods hold, for an offer that is to be published, and when that was asked."""
        patience = anyio.current_time() + FIRST_PATIENCE
        while True:
            asked = anyio.current_time()
            holding = await self._read_holding()
            holders = self._holders
            if not self._inventory.unpublished or not holders.unread or holders.lacking or asked >= patience:
                return holding, asked
            await anyio.sleep(HOLDERS_SOON)

    async def _read_holding(self) -> Holding:
        socket = Path(self._settings.current.effective_pod_resources_socket)
        return await self._holders.ask(socket, self._inventory.judged.asked)

    async def watch_mps(self) -> None:
        """Keeps devices that are shared by MPS unhealthy for as long as their daemon is down."""
        while not self._inventory.mps_resources:
            await self._inventory.store.changed.wait()
        from gpu_plugin.mps.watch import MpsWatch  # noqa: PLC0415 - only who shares by MPS pays for it

        watch = MpsWatch()
        try:
            while True:
                shared = self._inventory.mps_resources
                if not shared:
                    await self._inventory.store.changed.wait()
                    continue
                found = await watch.look(self._settings.current, shared)
                self.mps_counts = msgspec.to_builtins(watch.counts)
                for resource in shared:
                    if self._inventory.mps_changed(resource, down := found[resource.name]):
                        level = logging.WARNING if down else logging.INFO
                        words = down or "its MPS daemon is up"
                        log.log(level, "%s: %s", resource.name, words, extra={"resource": resource.name})
                await self._inventory.store.changed.wait(MPS_POLL)
        finally:
            watch.close()


def _counted(listed: Sequence[Device]) -> str:
    """How many devices the kubelet is told of, in its own words for their health."""
    retired = sum(1 for device in listed if device.retired)
    healthy = sum(1 for device in listed if not device.reason)
    unhealthy = len(listed) - retired - healthy
    parts = (
        [f"{healthy} Healthy"] + [f"{unhealthy} Unhealthy"] * bool(unhealthy) + [f"{retired} retired"] * bool(retired)
    )
    return f"{counted(len(listed), 'device')}: {', '.join(parts)}"


def _held_back(resources: Iterable[Resource], warnings: Sequence[str]) -> Iterable[str]:
    """A sentence for each reason that the plan itself holds devices back for, unless a warning of the plan gives it."""
    for resource in resources:
        ids: dict[str, list[str]] = {}
        for device in resource.devices:
            if device.withheld and not device.retired:
                ids.setdefault(device.withheld, []).append(device.id)
        for why, of in ids.items():
            if any(why in warning for warning in warnings):
                continue
            more = f" and {len(of) - 1} more are" if len(of) > 1 else " is"
            yield f"{resource.name}: {of[0]}{more} withheld: {why}"
