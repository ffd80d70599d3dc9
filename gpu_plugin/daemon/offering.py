"""Publish offers of devices, and update the published lists when pods or MPS daemons end. The I/O around the inventory."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from pathlib import Path

import anyio
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
"""Longest interval in seconds between queries which devices pods hold, while a device is retired. An earlier query is made if
it can release more devices."""

HOLDERS_SOON = 0.2
"""Seconds to the next query after a list that makes the kubelet write its checkpoint."""

HOLDERS_CHECK = 30.0
"""Seconds between queries while no device is retired. They find devices that pods hold and no plugin lists."""

TIMER_SLACK = 0.01
"""Seconds added to the time of an early query: a timer may fire early by its resolution, and the query would be useless."""

UNANSWERED_LIMIT = 3
"""Failed queries in a row to a witness before the log reports that capacity waits: a kubelet may be starting."""

FIRST_PATIENCE = 5.0
"""Seconds that the first offer waits for a checkpoint that exists but cannot be read: a former process may have allocated
devices without storing that, and PodResources may not list them."""

MPS_POLL = 1.0
"""Seconds between two checks of the MPS daemons."""

SPECS_PATIENCE = 5.0
"""Seconds that a change to CDI names waits for the specifications. Until then the former offer is served."""

MAX_JUDGEMENTS = 2
"""Limit of attempts to judge on a thread. An attempt is repeated if its input (links, health) changed before it ended."""


class Offering:
    """Publishes offers through an inventory. Devices that a new offer lacks leave the lists when no pod holds them."""

    def __init__(
        self,
        inventory: Inventory,
        settings: SettingsStore,
        unsaved: Pulse,
        registrations: Registrations,
    ) -> None:
        """Store the parts. The settings name the sockets of the kubelet. `unsaved` rings when a list has changed."""
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
        """Publish an offer: at once, or when it is prepared.

        The first offer waits for a query which devices pods hold: a process that was killed may not have stored all holders.
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
        # The query did not cover the devices that this offer retires.
        self._inventory.apply(new, holding.of_all, asked, holding.listed)
        self._report(new, holding, before)

    async def _judge_apart(self, new: Offer, holding: Holding, asked: float) -> bool:
        """Publish an offer of many devices, judged on a thread. Return False if each attempt was outdated when it ended."""
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
        """Return True if judging the offer would block the event loop for too long."""
        listed = (*self._inventory.listed, *new.plan.resources)
        return sum(len(resource.devices) for resource in listed) >= OFF_LOOP_DEVICES

    def _report(self, new: Offer, holding: Holding, before: Mapping[str, ResourceView]) -> None:
        """Log the changes of a published offer since `before`."""
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
                "%s: %d devices are not offered yet: with the former devices, which stay listed until no pod can hold them, the "
                "list would be longer than the %d bytes that the kubelet reads. The devices are offered when former devices "
                "leave the list: within seconds, or when the pods that hold the former devices end. There is nothing to do",
                name,
                waiting[name],
                MAX_LIST_BYTES,
                extra={"resource": name},
            )
        self._waiting = waiting.keys()
        self._unsaved.ring()

    def _log_unlistable(self, holding: Holding) -> None:
        """Log once each device that a pod holds, as reported by the kubelet, under an id that a list must not have."""
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
        """Publish waiting offers, withdraw devices that no pod holds, and list held devices again. Never returns."""
        while True:
            await self._settle_next()

    async def _settle_next(self) -> None:
        """Publish the next offer, or make the next query."""
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
                return  # there is a newer offer
            self._next = None
            if not published:
                self._apply(new, holding, asked)
            if not new.placement.ready and new.placement.topology != failed:
                self._next = new  # its links are new: prepare it, and publish it again
        else:
            await self._unsettled.wait(self._pause(anyio.current_time()))
            if self._next is None and not self._inventory.unpublished:
                asked, about = anyio.current_time(), self._inventory.judged.asked
                holding = await self._read_holding()
                await self._withdraw(holding, asked, about)

    def _pause(self, now: float) -> float:
        """Return the seconds to the next query, which is made as soon as its answer can differ from the last answer."""
        if not self._inventory.leaving:
            return HOLDERS_CHECK
        if self._writes:
            return min(HOLDERS_SOON, HOLDERS_POLL)
        recent = self._inventory.store.recent
        worth = (self._inventory.judged.next_leave, recent.worth_asking(self._inventory.judged.awaited))
        return min((HOLDERS_POLL, *(at - now + TIMER_SLACK for at in worth if at > now)))

    async def _prepare(self) -> Topology | None:
        """Prepare the newest offer on a thread, because this takes long on large nodes. A failure does not block the offer.

        If links change all the time, the offer may still be unprepared. Return the topology that could not be judged, if any.
        """
        for _ in range(MAX_JUDGEMENTS):
            asked = self._next
            if asked is None or asked.placement.ready:
                break
            try:
                made = await computed(asked.prepared, apart=True)
            except Exception:
                log.exception("judging sets of GPUs failed; pods get good ones, which may not be the best")
                return asked.placement.topology
            if self._next is not None and self._next.placement.topology == made.placement.topology:
                self._next = replace(self._next, placement=made.placement)
        return None

    async def _await_specs(self) -> None:
        """Wait up to SPECS_PATIENCE for the CDI specifications of the newest offer, if the served offer has none."""
        with anyio.move_on_after(SPECS_PATIENCE):
            while self._next is not None and self._inventory.awaits_specs(self._next):
                await self._inventory.specs_changed.wait()

    async def _withdraw(self, holding: Holding, asked: float, about: Mapping[tuple[str, str], float]) -> None:
        """Apply the answer to a query of the time `asked` about the devices `about`, unless other devices were retired since."""
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
                    self._unsaved.ring()  # store the foreign devices
                return

    def _request_checkpoint(self, holding: Holding, asked: float, before: Mapping[str, ResourceView]) -> None:
        """Make the kubelet write its checkpoint if a device waits for the write, and log the changes since `before`."""
        store = self._inventory.store
        changed = store.current.resources is not before
        awaited = self._inventory.judged.awaited
        kept = (holding.written & awaited) | store.recent.unconfirmed(awaited)
        self._log_long_waits(holding, awaited)
        if changed:  # a changed list has the same effect
            self._log_resources(before)
            again = ""
        else:
            # Devices allocated less than a second ago need a later list, and that list serves all devices.
            later = asked < store.recent.worth_asking(kept) < inf
            listening = () if later else filter(self._registrations.heard, store.current.resources)
            begun = store.recent.begun(kept)
            again = self._again.due(kept, listening, asked, ready=begun, answered=holding.answered)
        if again:
            store.resend(again)
        self._writes = bool(kept) and (changed or bool(again))

    def _log_long_waits(self, holding: Holding, awaited: AbstractSet[tuple[str, str]]) -> None:
        """Log once that capacity may not return while a witness does not answer, and again after the witness had answered."""
        if self._reached_limit("checkpoint", waits=holding.writing is None and self._unproved(holding, awaited)):
            log.warning(
                "hardware is kept back for pods that may have ended: the kubelet's checkpoint %s cannot be read: %s. "
                "It returns when the checkpoint can be read: PodResources does not list the devices of plain init containers",
                Path(self._settings.current.socket_dir) / checkpoint.NAME,
                self._holders.unread,
            )
        if self._reached_limit("PodResources", waits=bool(awaited) and not holding.answered):
            log.warning(
                "hardware is kept back for pods that may have ended: without PodResources the kubelet does not say so. "
                "It returns when PodResources answers at %s, or when the kubelet has admitted another pod that gets devices of "
                "any plugin. If all devices are kept back, no such pod can be admitted: mount the directory of PodResources, or "
                "drain the node, stop the kubelet, remove its checkpoint %s and start the kubelet",
                self._settings.current.effective_pod_resources_socket,
                Path(self._settings.current.socket_dir) / checkpoint.NAME,
            )

    def _reached_limit(self, witness: str, *, waits: bool) -> bool:
        """Count a failed query to a witness in a row of failures. Return True if this failure must be logged."""
        self._unanswered[witness] = self._unanswered[witness] + 1 if waits else 0
        return self._unanswered[witness] == UNANSWERED_LIMIT

    def _unproved(self, holding: Holding, awaited: AbstractSet[tuple[str, str]]) -> bool:
        """Return True if a waiting device is not proven to belong to a pod."""
        if holding.allocated is None:
            return bool(awaited)
        return not awaited.isdisjoint(holding.allocated - holding.listed) or bool(
            self._inventory.store.recent.unconfirmed(awaited)
        )

    async def _holding_for_offer(self) -> tuple[Holding, float]:
        """Return the devices that pods hold, for the next offer, and the time of the query."""
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
        """Keep devices that are shared by MPS unhealthy while their daemon is down. Never returns."""
        while not self._inventory.mps_resources:
            await self._inventory.store.changed.wait()
        from gpu_plugin.mps.watch import MpsWatch  # noqa: PLC0415 - only needed with MPS

        watch = MpsWatch()
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


def _counted(listed: Sequence[Device]) -> str:
    """Return the numbers of listed devices by health, in the kubelet's words, for the log."""
    retired = sum(1 for device in listed if device.retired)
    healthy = sum(1 for device in listed if not device.reason)
    unhealthy = len(listed) - retired - healthy
    parts = (
        [f"{healthy} Healthy"] + [f"{unhealthy} Unhealthy"] * bool(unhealthy) + [f"{retired} retired"] * bool(retired)
    )
    return f"{counted(len(listed), 'device')}: {', '.join(parts)}"


def _held_back(resources: Iterable[Resource], warnings: Sequence[str]) -> Iterable[str]:
    """Yield a sentence for each reason why the plan withholds devices, unless a warning of the plan has it."""
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
