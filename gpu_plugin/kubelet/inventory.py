"""The device lists: the plan of the node with health, and retired devices that pods may still hold."""

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpu_plugin.devices.device import MAX_LIST_BYTES, Device, Resource
from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.plan import fitting
from gpu_plugin.devices.retirement import Allocated, gone
from gpu_plugin.devices.sharing import MpsShared
from gpu_plugin.health.latch import Health
from gpu_plugin.kubelet.listing import Judgement, ListingInput, judge
from gpu_plugin.kubelet.offer import Offer
from gpu_plugin.kubelet.snapshot import Hardware, ResourceView, SnapshotStore
from gpu_plugin.runtime.pulse import Pulse

if TYPE_CHECKING:
    from gpu_plugin.containers.cdi.readiness import CdiReadiness


# Sentences on files that were left out of CDI specifications, in one status. The log has all of them.


class Inventory:
    """Publishes the offer, the health of the hardware and the devices that pods hold to the store. Does no I/O.

    `health` returns the health of a GPU or a MIG device. It takes the uuid of the GPU and the uuid of the device, which are equal
    for a whole GPU.
    """

    def __init__(self, store: SnapshotStore, health: Callable[[str, str], Health]) -> None:
        self.store = store
        self.offer = Offer()
        self._health = health
        self._restored: tuple[Resource, ...] = ()
        self.judged = Judgement()
        """The last computed lists; another object after each change."""
        self._held: Allocated | None = None
        self.unpublished = True
        """Whether no offer has been published yet."""
        self._hardware: frozenset[tuple[str, str]] = frozenset()
        self.mps_resources: tuple[MpsShared, ...] = ()
        """The resources with devices that are shared by MPS, as their daemons should serve them."""
        self._mps_down: dict[str, str] = {}
        self._cdi: CdiReadiness | None = None
        self.specs_changed = Pulse()
        """Rings after each report on the CDI specifications."""

    @property
    def listed(self) -> tuple[Resource, ...]:
        """The resources in the lists; before the first list, the resources of an earlier process."""
        if self.unpublished:
            return self._restored
        return tuple(view.resource for view in self.store.current.resources.values())

    @property
    def foreign(self) -> tuple[Resource, ...]:
        """NVIDIA's devices that pods hold under names that are not listed here, which another plugin may serve."""
        found: dict[str, list[Device]] = {}
        for (name, _), device in self.judged.foreign.items():
            found.setdefault(name, []).append(device)
        return tuple(Resource(name, tuple(devices)) for name, devices in found.items())

    def found(self, gpus: Iterable[Gpu]) -> None:
        """Publish the hardware of the node and its health, including hardware without a resource."""
        present = {gpu.uuid: Hardware(gpu.uuid, str(gpu.index)) for gpu in gpus}
        parts = {mig.uuid: Hardware(gpu.uuid, f"{gpu.index}:{mig.index}") for gpu in gpus for mig in gpu.mig_devices}
        hardware = {
            uuid: replace(each, health=self._health(each.gpu, uuid)) for uuid, each in (present | parts).items()
        }
        self.store.publish(self.store.current.resources, hardware)

    def awaits_specs(self, new: Offer) -> bool:
        """Whether an offer is the first with CDI names, and the state of their specifications is not known yet.

        If it were published at once, every device would be unhealthy for a moment, and pods would be refused.
        """
        if self.unpublished or not new.access.by_cdi or self.offer.access.by_cdi:
            return False
        return self._cdi is None or not self._cdi.known

    @property
    def leaving(self) -> bool:
        """True while retired devices are still listed, so that the holders must be queried again."""
        return bool(self.judged.retirement.since or self.judged.empty_since or self.judged.elsewhere)

    def remember(self, resources: Iterable[Resource], foreign: Iterable[Resource] = ()) -> None:
        """Restore the lists of an earlier process of this boot, and the devices that pods held under `foreign` names.

        Devices for which a list has no room are never listed: their hardware is withheld as if their name were foreign.
        """
        restored, unlisted = [], []
        for resource in resources:
            kept = fitting(resource.devices, MAX_LIST_BYTES)
            restored.append(Resource(resource.name, tuple(map(gone, kept))))
            if len(kept) < len(resource.devices):
                ids = {device.id for device in kept}
                unlisted.append(Resource(resource.name, tuple(d for d in resource.devices if d.id not in ids)))
        self._restored = tuple(restored)
        allocated = {(r.name, device.id): gone(device) for r in (*foreign, *unlisted) for device in r.devices}
        since = dict.fromkeys(allocated, -inf)
        self.judged = Judgement(foreign=allocated, foreign_since=since, asked=since)

    def record_holders(self, listed: Allocated, allocated: Allocated | None, writing: object, asked: float) -> None:
        """Record an answer of the kubelet.

        Args:
            listed: the devices that PodResources lists.
            allocated: all devices that pods may hold; None if the answer does not cover all.
            writing: as for `RecentAllocations.seen`.
            asked: the time of the question, in seconds of a steady clock.
        """
        self.store.recent.seen(listed, writing, asked)
        if allocated is not None:
            self._held = allocated
        elif self._held is not None and not listed <= self._held:
            self._held |= listed

    def apply(self, new: Offer, allocated: Allocated | None, now: float, known: Allocated = frozenset()) -> None:
        """Publish an offer.

        Our devices in `allocated` or `known` that are not listed are listed again. Devices that pods hold under foreign names
        withhold their hardware; without an answer, the devices of the last answer do.

        Args:
            new: the offer.
            allocated: all devices that pods may hold; None without a complete answer.
            now: the time of the question to the kubelet, in seconds of a steady clock.
            known: devices that pods hold according to an incomplete answer.
        """
        self._note_restored(now)
        self._adopt(new)
        self.settle(allocated, now, known)

    def considered(
        self, new: Offer, allocated: Allocated | None, now: float, known: Allocated = frozenset()
    ) -> ListingInput:
        """Return the input of `judge` with another offer, for `take` later. The arguments are the same as for `apply`."""
        self._note_restored(now)
        return self._standing(new, new.hardware, allocated, now, known)

    def standing(self, allocated: Allocated | None, now: float, known: Allocated = frozenset()) -> ListingInput:
        """Return the input of `judge`. The arguments are the same as for `apply`. Fast for any number of devices."""
        return self._standing(self.offer, self._hardware, allocated, now, known)

    def former_ended(self, now: float) -> None:
        """Record that the daemon that handed over may have given away all of its listed devices until `now`."""
        for resource in self._restored:
            self.store.recent.note(resource.name, (device.id for device in resource.devices), now)

    def _note_restored(self, now: float) -> None:
        """Record before the first offer that an earlier process may just have given away all of its listed devices."""
        if self.unpublished:
            for resource in self._restored:
                self.store.recent.note(resource.name, (device.id for device in resource.devices), now)

    def _adopt(self, new: Offer) -> None:
        self._mps_down = self._mps_down_with(new)
        self.offer, self._hardware, self.mps_resources = new, new.hardware, new.mps_resources

    def _mps_down_with(self, offer: Offer) -> dict[str, str]:
        """Return the reasons why MPS daemons are down under an offer. A daemon of another offer does not count."""
        if offer is self.offer:
            return dict(self._mps_down)
        others = {shared.name for shared in offer.mps_resources if shared not in self.mps_resources}
        return {name: down for name, down in self._mps_down.items() if name not in others}

    def _standing(
        self,
        offer: Offer,
        hardware: Iterable[tuple[str, str]],
        allocated: Allocated | None,
        now: float,
        known: Allocated,
    ) -> ListingInput:
        return ListingInput(
            offer=offer,
            listed=self.listed,
            views=self.store.current.resources,
            before=self.judged,
            reasons={visible: self._reason(gpu, visible) for gpu, visible in hardware},
            mps_down=self._mps_down_with(offer),
            cdi=self._cdi_readiness() if offer.access.by_cdi else None,
            unconfirmed=self.store.recent.unconfirmed,
            allocated=allocated,
            known=known,
            held=self._held,
            now=now,
        )

    def take(self, judged: Judgement, standing: ListingInput) -> bool:
        """Publish the result for `standing` unless the input has changed since. Returns whether it was published."""
        current = self.store.current.resources is standing.views and self.judged is standing.before
        if not current or self.store.recent.unconfirmed(judged.unheld):
            return False
        # Two kinds of change leave the views the same: a change of hardware that no view contains (the offer is new, or a list
        # has no room), and a change of the state of unused CDI names.
        now = self._standing(standing.offer, standing.offer.hardware, None, 0, frozenset())
        if (now.reasons, now.mps_down) != (standing.reasons, standing.mps_down) or now.cdi is not standing.cdi:
            return False
        self._adopt(standing.offer)
        self._publish(judged)
        return True

    def _publish(self, judged: Judgement) -> None:
        self.judged, self.unpublished = judged, False
        self.store.publish(judged.views)

    def settle(self, allocated: Allocated | None, now: float, known: Allocated = frozenset()) -> None:
        """Remove retired devices that no pod holds according to the kubelet. The arguments are the same as for `apply`."""
        while True:
            judged = judge(self.standing(allocated, now, known))
            self._publish(judged)
            # A thread answers long Allocate requests. It notes the devices before it reads the list, and no new list is sent
            # before this returns.
            if not self.store.recent.unconfirmed(judged.unheld):
                return

    def health_changed(self, uuid: str) -> None:
        """Publish the health of a GPU and its MIG devices."""
        now = self.store.current
        views = now.resources.values()
        seen = {device.visible_id for view in views for device in view.resource.devices if device.gpu == uuid}
        reasons = {visible: self._reason(uuid, visible) for visible in seen}
        hardware = {
            own: replace(each, health=self._health(uuid, own)) if each.gpu == uuid else each
            for own, each in now.hardware.items()
        }
        self.store.publish({name: view.with_reasons(reasons) for name, view in now.resources.items()}, hardware)

    def mps_changed(self, seen: MpsShared, down: str) -> bool:
        """Publish whether the MPS daemon of a resource is up; `down` is the reason why it is not. Returns whether this is new.

        `seen` is the resource at the time of the probe. The result is dropped if the resource is no longer offered.
        """
        name = seen.name
        if self._mps_down.get(name) == down or seen not in self.mps_resources:
            return False
        self._mps_down[name] = down
        views = dict(self.store.current.resources)
        if name in views:
            views[name] = self._with_health(replace(views[name], mps_down=down))
            self.store.publish(views)
        return True

    def cdi_changed(self, state: "CdiReadiness") -> None:
        """Publish which devices have a CDI name that the container runtime can resolve."""
        self._cdi = state
        self.specs_changed.ring()
        views = self.store.current.resources
        if not self.unpublished and self.offer.access.by_cdi:
            self.store.publish({name: self._with_health(replace(view, cdi=state)) for name, view in views.items()})

    def withheld(self) -> Mapping[str, tuple[str, ...]]:
        """Return, by the uuid of a GPU, the reasons why devices are withheld although their hardware is healthy."""
        found: dict[str, dict[str, None]] = {}
        for view in self.store.current.resources.values():
            unfit = [device for device in view.resource.devices if device.reason and not device.retired]
            hardware = {(device.gpu, device.visible_id) for device in unfit}
            sound = {each for each in hardware if not self._reason(*each)}
            for device in unfit:
                if (device.gpu, device.visible_id) in sound:
                    found.setdefault(device.gpu, {})[device.reason] = None
        return {uuid: tuple(reasons) for uuid, reasons in found.items()}

    @property
    def cdi(self) -> "CdiReadiness | None":
        """The state of the CDI specifications; None if the runtime gets no CDI names."""
        return self._cdi_readiness() if self.offer.access.by_cdi else None

    def _cdi_readiness(self) -> "CdiReadiness":
        """Return the state of the CDI specifications. Before the first report, no specification has a device."""
        if self._cdi is None:
            from gpu_plugin.containers.cdi.readiness import CdiReadiness  # noqa: PLC0415 - only CDI strategies need it

            self._cdi = CdiReadiness()
        return self._cdi

    def _with_health(self, view: ResourceView) -> ResourceView:
        hardware = {(device.gpu, device.visible_id) for device in view.resource.devices}
        return view.with_reasons({visible: self._reason(gpu, visible) for gpu, visible in hardware})

    def _reason(self, gpu: str, visible: str) -> str:
        return self._health(gpu, visible).reason
