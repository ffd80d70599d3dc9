"""Compute the device lists from the plan, the retired devices that pods hold, and the health reasons. No I/O.

Input and output are immutable, so a list can be computed on any thread: 56,000 devices take 0.2 s. The code uses loops, because
an operation on a large set keeps the interpreter from all other threads.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from math import inf
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.names import resource_name_fault
from gpu_plugin.config.sharing import MPS, SharedResource
from gpu_plugin.containers.edits import MpsDirectories
from gpu_plugin.devices.device import GPU, MAX_LIST_BYTES, MIG, OWN_NAMES, Device, Resource, device_id_fault
from gpu_plugin.devices.plan import fitting, list_bytes
from gpu_plugin.devices.recent_allocations import Key
from gpu_plugin.devices.retirement import SETTLE, Allocated, Retirement, gone, retire
from gpu_plugin.devices.sharing import REPLICA
from gpu_plugin.kubelet.offer import Offer
from gpu_plugin.kubelet.snapshot import ResourceView

if TYPE_CHECKING:
    from gpu_plugin.containers.cdi.readiness import CdiReadiness

WITHDRAW = 2.0  # seconds for which a resource without a device is served: the kubelet must read the empty list first

MPS_UNKNOWN = "it is not known yet whether its MPS daemon is up"


class ListingInput(msgspec.Struct, frozen=True):
    """The input of `judge`.

    Attributes:
        offer: the resources of the node under the settings.
        listed: the resources in the last lists.
        views: the published views of `listed`.
        before: the last result.
        reasons: the reason why hardware is unfit, by the uuid that containers see.
        mps_down: the reason why an MPS daemon is down, by resource.
        cdi: the state of the CDI specifications; None if the runtime gets no CDI names.
        unconfirmed: returns the devices that were given away without a confirmation by the kubelet.
        allocated: as for `Inventory.apply`.
        known: as for `Inventory.apply`.
        held: all devices that pods may hold, without the unconfirmed devices; None if this was never known.
        now: as for `Inventory.apply`.
    """

    offer: Offer
    listed: tuple[Resource, ...]
    views: Mapping[str, ResourceView]
    before: "Judgement"
    reasons: Mapping[str, str]
    mps_down: Mapping[str, str]
    cdi: "CdiReadiness | None"
    unconfirmed: Callable[[Collection[Key]], Allocated]
    allocated: Allocated | None
    known: Allocated
    held: Allocated | None
    now: float

    @property
    def devices(self) -> int:
        """The number of listed and planned devices, which determines the cost of `judge`."""
        return sum(len(resource.devices) for resource in (*self.listed, *self.offer.plan.resources))


class Judgement(msgspec.Struct, frozen=True):
    """The new lists, and the state for the next computation. Times are in seconds of a steady clock.

    Attributes:
        views: the view of each resource; the same object if nothing has changed.
        retirement: the retired devices.
        foreign: NVIDIA's devices that pods hold under names that are not listed here, or under ids that cannot be listed.
        foreign_since: the time since which a foreign device is known without a break.
        elsewhere: the foreign devices whose hardware is in this offer.
        mig_gpus: the uuid of the GPU of each MIG device offered so far.
        empty_since: the time since which a resource is served without a device.
        waiting: the number of planned devices of a resource for which retired devices leave no room in the list.
        unheld: the devices whose hardware is offered, also as replicas, because no pod holds them.
        awaited: the devices that withhold hardware until no pod holds them.
        asked: the retired and foreign devices, which the kubelet must be asked about, with the time of the first question.
        next_leave: the time at which a device may leave the list without a new answer; inf for none.
    """

    views: Mapping[str, ResourceView] = msgspec.field(default_factory=dict)
    retirement: Retirement = msgspec.field(default_factory=Retirement)
    foreign: Mapping[Key, Device] = msgspec.field(default_factory=dict)
    foreign_since: Mapping[Key, float] = msgspec.field(default_factory=dict)
    elsewhere: Allocated = frozenset()
    mig_gpus: Mapping[str, str] = msgspec.field(default_factory=dict)
    empty_since: Mapping[str, float] = msgspec.field(default_factory=dict)
    waiting: Mapping[str, int] = msgspec.field(default_factory=dict)
    unheld: Allocated = frozenset()
    awaited: Allocated = frozenset()
    asked: Mapping[Key, float] = msgspec.field(default_factory=dict)
    next_leave: float = inf


def judge(standing: ListingInput) -> Judgement:
    """Compute the lists for the kubelet."""
    now, offer, before = standing.now, standing.offer, standing.before
    mig_gpus = {**before.mig_gpus, **offer.mig_gpus}
    gpus = {device.gpu for resource in offer.plan.resources for device in resource.devices}
    listed, foreign = _recalled(standing, mig_gpus, gpus)
    foreign_since = {key: before.foreign_since.get(key, now) for key in foreign}
    elsewhere = {
        key: device
        for key, device in foreign.items()
        if device.gpu in gpus or (device.kind == MIG and device.gpu == device.visible_id)  # its GPU is unknown
    }
    recent = standing.unconfirmed([(r.name, d.id) for r in listed for d in r.devices])
    resources, retirement = retire(
        listed,
        offer.plan.resources,
        before.retirement,
        standing.allocated,
        now,
        recent,
        list(elsewhere.values()),
        standing.held,
    )
    waiting: dict[str, int] = {}
    if retirement.since:  # without retired devices the list is the plan, which is not too long
        before_now = {resource.name: resource.devices for resource in listed}
        held = standing.known if standing.held is None else standing.known | standing.held
        fitted = tuple(_fitted(resource, before_now.get(resource.name, ()), held) for resource in resources)
        waiting = {
            whole.name: len(whole.devices) - len(part.devices)
            for whole, part in zip(resources, fitted, strict=True)
            if part is not whole
        }
        resources = fitted
    names = {resource.name for resource in resources}
    emptied = {resource.name for resource in listed} - names
    empty_since = {name: before.empty_since.get(name, now) for name in emptied}
    empty_since = {name: since for name, since in empty_since.items() if now - since < WITHDRAW}
    lasting = [Resource(resource.name) for resource in listed if resource.name in empty_since]
    views = {resource.name: _view(standing, resource) for resource in (*resources, *lasting)}
    leaves = (
        *(retirement.since[key] + SETTLE for key in retirement.free),
        *(since + WITHDRAW for since in empty_since.values()),
    )
    return Judgement(
        views=views,
        retirement=retirement,
        foreign=foreign,
        foreign_since=foreign_since,
        elsewhere=frozenset(elsewhere),
        mig_gpus=mig_gpus,
        empty_since=empty_since,
        waiting=waiting,
        unheld=frozenset(
            (
                *retirement.free,
                *(key for key in before.retirement.since if key not in retirement.since),
                *(key for key in retirement.back if key not in recent and key not in (standing.held or ())),
            )
        ),
        awaited=retirement.back.union(retirement.since, elsewhere),
        asked={**foreign_since, **retirement.since},
        next_leave=min((at for at in leaves if at > now), default=inf),
    )


def _fitted(resource: Resource, listed: Iterable[Device], held: AbstractSet[Key]) -> Resource:
    """Return the resource without the new devices that make its list longer than a kubelet reads.

    Listed devices stay, and devices that pods hold come next. The other devices are listed when retired devices have left the
    list.
    """
    if list_bytes(resource) <= MAX_LIST_BYTES:
        return resource
    before = {device.id for device in listed}
    old = [device for device in resource.devices if device.id in before]
    new = [device for device in resource.devices if device.id not in before]
    new.sort(key=lambda device: (resource.name, device.id) not in held)
    room = MAX_LIST_BYTES - list_bytes(Resource(resource.name, tuple(old)))
    kept = {device.id for device in (*old, *fitting(new, room))}
    return Resource(resource.name, tuple(device for device in resource.devices if device.id in kept))


def _view(standing: ListingInput, resource: Resource) -> ResourceView:
    offer, access = standing.offer, standing.offer.access
    down = ""
    if any(device.shared == MPS for device in resource.devices):
        access = replace(access, mps=MpsDirectories.of(offer.mps_root, resource.name))
        down = standing.mps_down.get(resource.name, MPS_UNKNOWN)
    new = ResourceView.of(resource, access, offer.placement)
    new = replace(new, policy=offer.policy, mps_down=down, cdi=standing.cdi).with_reasons(standing.reasons)
    old = standing.views.get(resource.name)
    return old if old == new else new


def _recalled(
    standing: ListingInput, mig_gpus: Mapping[str, str], gpus: AbstractSet[str]
) -> tuple[tuple[Resource, ...], Mapping[Key, Device]]:
    """Return the listed devices with the devices to list again, and the devices that pods hold under names not listed here.

    A device is listed again only under a name that is listed or planned: another name may be the resource of the plugin that gave
    the device away. A device whose id cannot be listed, or for which a list has no room, counts as held under a foreign name, so
    that its hardware is withheld.
    """
    everything = (*standing.listed, *standing.offer.plan.resources)
    present: dict[str, set[str]] = {}
    for resource in everything:
        present.setdefault(resource.name, set()).update(device.id for device in resource.devices)
    listed = {resource.name: resource.devices for resource in standing.listed}
    reported = standing.known | (standing.before.foreign.keys() if standing.allocated is None else standing.allocated)
    foreign: dict[Key, Device] = {}
    lost = _lost(((name, each) for name, each in reported if each not in present.get(name, ())), gpus)
    by_uuid = {device.visible_id: device for r in everything for device in r.devices} if lost else {}
    again: dict[str, list[Device]] = {}
    for name, identifier in lost:
        device = standing.before.foreign.get((name, identifier)) or _described(name, identifier, by_uuid, mig_gpus)
        if name in present and not device_id_fault(identifier):
            again.setdefault(name, []).append(device)
        else:
            foreign[name, identifier] = device
    for name, devices in again.items():
        before = listed.get(name, ())
        fit = fitting(devices, MAX_LIST_BYTES - list_bytes(Resource(name, before)))
        listed[name] = (*before, *fit)
        if len(fit) < len(devices):
            ids = {device.id for device in fit}
            foreign |= {(name, device.id): device for device in devices if device.id not in ids}
    return tuple(Resource(name, devices) for name, devices in listed.items()), foreign


def _described(resource: str, identifier: str, by_uuid: Mapping[str, Device], mig_gpus: Mapping[str, str]) -> Device:
    """Return a device that a pod holds, with the known data. `by_uuid` has offered devices by the uuid in containers."""
    uuid, replica, _ = identifier.partition(REPLICA)
    sharing = SharedResource(resource, resource, 2) if replica else None
    same = by_uuid.get(uuid)
    if same is not None:
        return gone(replace(same, id=identifier, sharing=sharing, retired=False))
    kind = MIG if uuid.startswith("MIG-") else GPU
    return gone(Device(identifier, mig_gpus.get(uuid, uuid), uuid, "", kind=kind, sharing=sharing))


_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _lost(allocated: Iterable[Key], gpus: AbstractSet[str]) -> list[tuple[str, str]]:
    """Return the allocated devices whose ids have an NVIDIA uuid and whose names a kubelet accepts, sorted.

    `gpus` are the uuids of the offer. Under WSL and on Tegra, the only GPU has a name in place of a uuid.
    """
    own = gpus & OWN_NAMES
    return sorted(
        (name, identifier)
        for name, identifier in allocated
        if ((uuid := identifier.partition(REPLICA)[0]) in own or _UUID.fullmatch(uuid))
        and not resource_name_fault(name)
    )
