"""What the kubelet is to be told, from how things stand: the plan, what is gone and still held, and health. No I/O.

All of it is made of values that nobody changes, so that it can be judged on any thread: 56,000 devices take 0.2 s. It goes
through them in loops: an operation on whole sets of pairs would keep the interpreter from all other threads.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from math import inf
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from gpu_plugin.access.container import MpsDirectories
from gpu_plugin.config.names import resource_name_fault
from gpu_plugin.config.sharing import MPS, SharedResource
from gpu_plugin.devices.device import GPU, MAX_LIST_BYTES, MIG, OWN_NAMES, Device, Resource, device_id_fault
from gpu_plugin.devices.plan import fitting, list_bytes
from gpu_plugin.devices.recent_allocations import Key
from gpu_plugin.devices.retirement import SETTLE, Allocated, Retirement, gone, retire
from gpu_plugin.devices.sharing import REPLICA
from gpu_plugin.inventory.offer import Offer
from gpu_plugin.inventory.snapshot import ResourceView

if TYPE_CHECKING:
    from gpu_plugin.access.cdi.readiness import CdiReadiness

WITHDRAW = 2.0
"""Seconds that a resource without a device is still served: the kubelet must read the empty list before we leave."""

MPS_UNKNOWN = "it is not known yet whether its MPS daemon is up"


class ListingInput(msgspec.Struct, frozen=True):
    """How things stand, and what the kubelet said.

    `listed` are the resources as the kubelet is told of them and `views` what is published of them; `before` is what followed
    the last time. `reasons` says why hardware is unfit, by what containers are told to see, `mps_down` why an MPS daemon is, by
    resource; `cdi` is what is known of CDI specifications where their names are told. `unconfirmed` tells which of some devices
    may have been given away without the kubelet having confirmed it. `allocated`, `known` and `now` are as for `Inventory.apply`,
    `held` is all that pods may hold besides what is unconfirmed, None if that was never known.
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
        """How many devices are listed or planned: what judging takes goes with them."""
        return sum(len(resource.devices) for resource in (*self.listed, *self.offer.plan.resources))


class Judgement(msgspec.Struct, frozen=True):
    """The new list, and what to remember for the next time.

    `views` has the very same objects where nothing changes. `foreign` is what pods hold of NVIDIA's devices under names that are
    not listed here, or under ids that cannot be; `foreign_since` since when that is known without a break, and `elsewhere` the
    part of it that is hardware of this offer as far as is known; `mig_gpus` has the GPU's uuid of each MIG device that ever was
    offered; `empty_since` is since when resources without a device are served empty; `waiting` is how many planned devices of a
    resource are not listed yet, for lack of room beside retired ones. `unheld` are the devices whose hardware is offered, or
    replicas of it, because no pod holds them; `awaited` those that keep hardware back until no pod holds them. `asked` is what
    the kubelet is to be asked about, and since when: what is retired, and what is held under foreign names. `next_leave` is when
    something may go next though nothing more is learnt, inf for nothing.
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
    """The list for the kubelet."""
    now, offer, before = standing.now, standing.offer, standing.before
    mig_gpus = {**before.mig_gpus, **offer.mig_gpus}
    gpus = {device.gpu for resource in offer.plan.resources for device in resource.devices}
    listed, foreign = _recalled(standing, mig_gpus, gpus)
    foreign_since = {key: before.foreign_since.get(key, now) for key in foreign}
    elsewhere = {
        key: device
        for key, device in foreign.items()
        if device.gpu in gpus or (device.kind == MIG and device.gpu == device.visible_id)  # of a GPU that is not known
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
    """The resource, without new devices that make its list longer than a kubelet reads.

    What is listed stays, and after that what pods hold has precedence. The devices left out are listed once retired devices
    have gone from the list.
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
    """The listed devices with those that are to be listed again, and what pods hold under names that are not listed here.

    Only what is held under a name that is listed or planned is listed again: to serve any other name could take a resource from
    the plugin that gave the device away. A device whose id cannot be listed, or that a list has no room for, counts as held
    under a foreign name, so that its hardware is withheld all the same.
    """
    everything = (*standing.listed, *standing.offer.plan.resources)
    present: dict[str, set[str]] = {}
    for resource in everything:
        present.setdefault(resource.name, set()).update(device.id for device in resource.devices)
    listed = {resource.name: resource.devices for resource in standing.listed}
    said = standing.known | (standing.before.foreign.keys() if standing.allocated is None else standing.allocated)
    foreign: dict[Key, Device] = {}
    lost = _lost(((name, one) for name, one in said if one not in present.get(name, ())), gpus)
    alike = {device.visible_id: device for r in everything for device in r.devices} if lost else {}
    again: dict[str, list[Device]] = {}
    for name, identifier in lost:
        device = standing.before.foreign.get((name, identifier)) or _described(name, identifier, alike, mig_gpus)
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


def _described(resource: str, identifier: str, alike: Mapping[str, Device], mig_gpus: Mapping[str, str]) -> Device:
    """A device that a pod holds, as far as it is known. `alike` are devices by the uuid that containers see."""
    uuid, replica, _ = identifier.partition(REPLICA)
    sharing = SharedResource(resource, resource, 2) if replica else None
    same = alike.get(uuid)
    if same is not None:
        return gone(replace(same, id=identifier, sharing=sharing, retired=False))
    kind = MIG if uuid.startswith("MIG-") else GPU
    return gone(Device(identifier, mig_gpus.get(uuid, uuid), uuid, "", kind=kind, sharing=sharing))


_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _lost(allocated: Iterable[Key], gpus: AbstractSet[str]) -> list[tuple[str, str]]:
    """Those of these that have an id made of one of NVIDIA's uuids and a name that a kubelet takes, in order.

    `gpus` are those of the offer: under WSL and on Tegra the one that there is has a name in place of a uuid.
    """
    own = gpus & OWN_NAMES
    return sorted(
        (name, identifier)
        for name, identifier in allocated
        if ((uuid := identifier.partition(REPLICA)[0]) in own or _UUID.fullmatch(uuid))
        and not resource_name_fault(name)
    )
