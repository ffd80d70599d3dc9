"""What the kubelet is told: the plan for the node, less what is unfit, plus what is gone and may still be held by a pod."""

import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from gpu_plugin.access.conflicts import pair_warning
from gpu_plugin.access.container import Access, MpsDirectories
from gpu_plugin.access.plan import access_warnings, plan_access
from gpu_plugin.config.settings import Settings
from gpu_plugin.config.sharing import DISTRIBUTED, MPS, SharedResource
from gpu_plugin.devices.device import GPU, MIG, Device, Resource, with_held
from gpu_plugin.devices.naming import DOMAIN, resource_name_fault
from gpu_plugin.devices.node import Node
from gpu_plugin.devices.plan import Plan, check_length, plan
from gpu_plugin.devices.retirement import GONE, SETTLE, Held, Retirement, gone, retire
from gpu_plugin.devices.sharing import REPLICA, MpsShared
from gpu_plugin.placement.prepared import SOON, Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.pulse import Pulse
from gpu_plugin.snapshot import ResourceView, SnapshotStore

if TYPE_CHECKING:
    from gpu_plugin.access.cdi.readiness import CdiReadiness

WITHDRAW = 2.0
"""Seconds that a resource without a device is still served: the kubelet must read the empty list before we leave."""

MPS_UNKNOWN = "it is not known yet whether its MPS daemon is up"


@dataclass(frozen=True, slots=True)
class Offer:
    """What this node has for pods under these settings, before health. Where there are many GPUs, `prepared` takes its time.

    `warnings` are sentences on what the settings ask for, besides those of the plan. `slices` has the GPU's uuid for each MIG
    device of the node, also of GPUs that are not served.
    """

    plan: Plan = field(default_factory=Plan)
    access: Access = field(default_factory=Access)
    placement: Placement = field(default_factory=Placement)
    policy: str = DISTRIBUTED
    mps_root: str = ""
    warnings: tuple[str, ...] = ()
    slices: Mapping[str, str] = field(default_factory=dict)

    def prepared(self) -> "Offer":
        """The offer with its placement ready."""
        return self if self.placement.ready else replace(self, placement=Placement.of(self.placement.topology))


_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def without_gone(old: Offer, node: Node) -> Offer:
    """The same offer, with devices whose hardware is not on the node any more held back."""
    there = {gpu.uuid for gpu in node.gpus} | {mig.uuid for gpu in node.gpus for mig in gpu.mig_devices}
    resources = tuple(
        Resource(
            resource.name,
            tuple(
                device if device.visible_id in there or device.held else with_held(device, GONE)
                for device in resource.devices
            ),
        )
        for resource in old.plan.resources
    )
    return replace(old, plan=Plan(resources, old.plan.warnings))


def offer(node: Node, settings: Settings, dev_root: str, before: Placement | None = None) -> Offer:
    """What a node has for pods. `before` is kept as its placement where it still holds; a large node's is not ready then.

    Raises ConfigError where the settings ask for what the node cannot do.
    """
    topology = Topology.of(node)
    planned = plan(node, settings)
    conflict = pair_warning(settings.device_list_strategy, planned.resources)
    made = Offer(
        planned,
        plan_access(settings, node, dev_root),
        before if before is not None and before.topology == topology else Placement(topology),
        settings.shared_devices_allocation_policy,
        settings.mps_root.rstrip("/"),
        (*access_warnings(settings, node), *([conflict] if conflict else [])),
        {mig.uuid: gpu.uuid for gpu in node.gpus for mig in gpu.mig_devices},
    )
    return made.prepared() if len(topology) <= SOON else made


def _lost(held: Held) -> list[tuple[str, str]]:
    """What of these has an id made of one of NVIDIA's uuids and a name that a kubelet takes, in order."""
    return sorted(
        (name, identifier)
        for name, identifier in held
        if _UUID.fullmatch(identifier.partition(REPLICA)[0]) and not resource_name_fault(name)
    )


def _placed(device: Device) -> bool:
    """Whether it is known which GPU a device is of."""
    return device.kind != MIG or device.gpu != device.visible_id


class Inventory:
    """Keeps the store true to an offer, to the health of the hardware and to what pods hold. Does no I/O.

    `health` gives the reason why a GPU, or one MIG device of it, is unfit, empty where it is fit; it takes both uuids, the
    second one the GPU's own for a whole GPU.
    """

    def __init__(self, store: SnapshotStore, health: Callable[[str, str], str]) -> None:
        self.store = store
        self.offer = Offer()
        self._health = health
        self._remembered: tuple[Resource, ...] = ()
        self._retirement = Retirement()
        self._foreign: Mapping[tuple[str, str], Device] = {}
        self._elsewhere: Held = frozenset()
        self._slices: dict[str, str] = {}
        self._empty_since: dict[str, float] = {}
        self._mps_down: dict[str, str] = {}
        self._cdi: CdiReadiness | None = None
        self.specs_told = Pulse()
        """Rung whenever it is told which devices CDI specifications have."""

    @property
    def listed(self) -> tuple[Resource, ...]:
        """The resources as the kubelet is told of them; before there is anything to tell, those of an earlier process."""
        if self.unpublished:
            return self._remembered
        return tuple(view.resource for view in self.store.current.resources.values())

    @property
    def unpublished(self) -> bool:
        """Whether no offer has been published yet."""
        return not self.store.current.version

    @property
    def awaited(self) -> AbstractSet[tuple[str, str]]:
        """What keeps hardware back until no pod holds it: what is retired, and what is held under foreign names."""
        return self._retirement.since.keys() | self._elsewhere

    @property
    def foreign(self) -> tuple[Resource, ...]:
        """What pods hold of NVIDIA's devices under names that are not listed here, which another plugin may serve."""
        found: dict[str, list[Device]] = {}
        for (name, _), device in self._foreign.items():
            found.setdefault(name, []).append(device)
        return tuple(Resource(name, tuple(devices)) for name, devices in found.items())

    @property
    def retired(self) -> Mapping[tuple[str, str], float]:
        """What is gone and still listed, by resource name and device id: since when, in seconds of the clock of `apply`."""
        return self._retirement.since

    @property
    def mps_resources(self) -> tuple[MpsShared, ...]:
        """Resources some of whose devices are shared by MPS, with what their daemons should serve."""
        found = []
        for resource in self.offer.plan.resources:
            devices = [device for device in resource.devices if device.shared == MPS]
            if devices:
                gpus = dict.fromkeys(device.gpu for device in devices if not device.held)
                first = devices[0]
                found.append(MpsShared(resource.name, tuple(gpus), first.replicas, first.limits, self.offer.mps_root))
        return tuple(found)

    def awaits_specs(self, new: Offer) -> bool:
        """Whether an offer has the runtime told CDI names from now on, of which it is not known yet whether they are written.

        Published at once, it would have every device unhealthy for a moment, and pods refused.
        """
        if self.unpublished or not new.access.by_cdi or self.offer.access.by_cdi:
            return False
        return self._cdi is None or not self._cdi.known

    @property
    def leaving(self) -> bool:
        """Whether something is still listed that is to go: `settle` is owed now and then."""
        return bool(self._retirement.since or self._empty_since or self._elsewhere)

    def next_leave(self, now: float) -> float:
        """When something that is listed still may go next though nothing more is learnt, after `now`; inf for nothing."""
        retired = (self._retirement.since.get(key, now) + SETTLE for key in self._retirement.free)
        emptied = (since + WITHDRAW for since in self._empty_since.values())
        return min((at for at in (*retired, *emptied) if at > now), default=inf)

    def remember(self, resources: Iterable[Resource], foreign: Iterable[Resource] = ()) -> None:
        """Takes what an earlier process of this boot had listed, and what it knew to be held under `foreign` names."""
        self._remembered = tuple(Resource(r.name, tuple(map(gone, r.devices))) for r in resources)
        self._foreign = {(r.name, device.id): gone(device) for r in foreign for device in r.devices}

    def check(self, new: Offer) -> None:
        """Raises ConfigError where a list of this offer, with what would be retired in it, is longer than a kubelet reads."""
        listed = {resource.name: resource for resource in self.listed}
        for resource in new.plan.resources:
            present = {device.id for device in resource.devices}
            old = listed[resource.name].devices if resource.name in listed else ()
            leaving = tuple(device for device in old if device.id not in present)
            check_length(Resource(resource.name, (*resource.devices, *leaving)))

    def apply(self, new: Offer, held: Held | None, now: float, known: Held = frozenset()) -> None:
        """Publishes an offer.

        `held` is what pods may hold, None where nobody says; `now` is when the kubelet was asked, in seconds of a steady clock.
        `known` is what pods are known to hold where `held` does not say all. What of either is ours and is not listed is listed
        again. What is held under foreign names keeps its hardware back; where nobody says, as far as it was said before.
        """
        listed, elsewhere = self._recalled(new, held, known)
        before = {shared.name: shared for shared in self.mps_resources}
        self.offer = new
        for shared in self.mps_resources:
            if before.get(shared.name) != shared:
                self._mps_down.pop(shared.name, None)  # what its daemon serves is not what is asked for now
        if self.unpublished:  # what an earlier process listed it may have given away until a moment ago
            for resource in self._remembered:
                self.store.given.note(resource.name, (device.id for device in resource.devices), now)
        recent = self.store.given.unsaid([(r.name, d.id) for r in listed for d in r.devices])
        resources, self._retirement = retire(listed, new.plan.resources, self._retirement, held, now, recent, elsewhere)
        names = {resource.name for resource in resources}
        emptied = {resource.name for resource in listed} - names
        self._empty_since = {name: self._empty_since.get(name, now) for name in emptied}
        withdrawn = {name for name, since in self._empty_since.items() if now - since >= WITHDRAW}
        for name in withdrawn:
            del self._empty_since[name]
        lasting = [Resource(name) for name in (r.name for r in listed) if name in emptied and name not in withdrawn]
        self.store.publish({r.name: self._view(r) for r in (*resources, *lasting)})

    def _recalled(self, new: Offer, held: Held | None, known: Held) -> tuple[tuple[Resource, ...], list[Device]]:
        """What is listed with what is to be listed again, and what pods hold of this node's hardware under foreign names."""
        everything = (*self.listed, *new.plan.resources)
        present = {(resource.name, device.id) for resource in everything for device in resource.devices}
        names = {resource.name for resource in everything}
        self._slices |= new.slices
        listed = {resource.name: resource.devices for resource in self.listed}
        said = known | (self._foreign.keys() if held is None else held)
        foreign: dict[tuple[str, str], Device] = {}
        lost = _lost(said - present)
        alike = {device.visible_id: device for r in everything for device in r.devices} if lost else {}
        for name, identifier in lost:
            device = self._foreign.get((name, identifier)) or self._described(name, identifier, alike)
            if name in names or name.startswith(f"{DOMAIN}/"):
                listed[name] = (*listed.get(name, ()), device)
            else:
                foreign[name, identifier] = device
        gpus = {device.gpu for resource in new.plan.resources for device in resource.devices}
        self._foreign = foreign
        elsewhere = {key: device for key, device in foreign.items() if device.gpu in gpus or not _placed(device)}
        self._elsewhere = frozenset(elsewhere)
        return tuple(Resource(name, devices) for name, devices in listed.items()), list(elsewhere.values())

    def _described(self, resource: str, identifier: str, alike: Mapping[str, Device]) -> Device:
        """A device that a pod holds, as far as it is known. `alike` are devices by the uuid that containers see."""
        uuid, replica, _ = identifier.partition(REPLICA)
        sharing = SharedResource(resource, resource, 2) if replica else None
        same = alike.get(uuid)
        if same is not None:
            return gone(replace(same, id=identifier, sharing=sharing, retired=False))
        kind = MIG if uuid.startswith("MIG-") else GPU
        return gone(Device(identifier, self._slices.get(uuid, uuid), uuid, "", kind=kind, sharing=sharing))

    def settle(self, held: Held | None, now: float, known: Held = frozenset()) -> None:
        """Lets go of what no pod holds any more, as far as the kubelet says; arguments are those of `apply`."""
        self.apply(self.offer, held, now, known)

    def health_changed(self, uuid: str) -> None:
        """Publishes the health of one GPU and of the MIG devices that it is cut into."""
        if self.unpublished:
            return
        views = self.store.current.resources.values()
        seen = {device.visible_id for view in views for device in view.resource.devices if device.gpu == uuid}
        reasons = {visible: self._health(uuid, visible) for visible in seen}
        self.store.publish(
            {name: view.with_reasons(reasons) for name, view in self.store.current.resources.items()},
        )

    def mps_changed(self, seen: MpsShared, down: str) -> bool:
        """Publishes whether the MPS daemon of a resource is up; `down` is why it is not. Returns whether that is news.

        `seen` is the resource as it was when the daemon was looked at: what is not offered so any more is no news.
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
        """Publishes which devices the container runtime can be told of by CDI name."""
        self._cdi = state
        self.specs_told.ring()
        views = self.store.current.resources
        if not self.unpublished and self.offer.access.by_cdi:
            self.store.publish({name: self._with_health(replace(view, cdi=state)) for name, view in views.items()})

    def withheld(self, gpu: str) -> tuple[str, ...]:
        """Why devices of a GPU are not handed out although their hardware is healthy, each reason once."""
        devices = (d for view in self.store.current.resources.values() for d in view.resource.devices if d.gpu == gpu)
        sound = (d for d in devices if not d.retired and not self._health(d.gpu, d.visible_id))
        return tuple(dict.fromkeys(device.reason for device in sound if device.reason))

    def cdi_status(self) -> Mapping[str, object] | None:
        """How many devices the specification of GPUs has, and why none can be used if so; None where no CDI name is told."""
        if not self.offer.access.by_cdi:
            return None
        state = self._cdi_readiness()
        return {"devices": len(state.nodes), "trouble": state.trouble}

    def status(self) -> Mapping[str, object]:
        """By resource: how many devices are listed, healthy, and retired, and how they are shared."""
        return {
            name: {
                "devices": len(view.resource.devices),
                "healthy": sum(device.healthy for device in view.resource.devices),
                "retired": sum(device.retired for device in view.resource.devices),
                "sharing": sorted({d.shared for d in view.resource.devices if d.shared and not d.retired}),
            }
            for name, view in self.store.current.resources.items()
        }

    def _view(self, resource: Resource) -> ResourceView:
        access = self.offer.access
        down = ""
        if any(device.shared == MPS for device in resource.devices):
            access = replace(access, mps=MpsDirectories.of(self.offer.mps_root, resource.name))
            down = self._mps_down.get(resource.name, MPS_UNKNOWN)
        cdi = self._cdi_readiness() if access.by_cdi else None
        new = self._with_health(ResourceView.of(resource, access, self.offer.placement, self.offer.policy, down, cdi))
        old = self.store.current.resources.get(resource.name)
        return old if old == new else new

    def _cdi_readiness(self) -> "CdiReadiness":
        """What is known of the CDI specifications; before anything is, no device is in one."""
        if self._cdi is None:
            from gpu_plugin.access.cdi.readiness import CdiReadiness  # noqa: PLC0415 - only CDI strategies need it

            self._cdi = CdiReadiness()
        return self._cdi

    def _with_health(self, view: ResourceView) -> ResourceView:
        hardware = {(device.gpu, device.visible_id) for device in view.resource.devices}
        reasons = {visible: self._health(gpu, visible) for gpu, visible in hardware}
        return view.with_reasons(reasons)
