"""Retired devices: no longer in the plan, listed and Unhealthy until no pod can hold them.

A kubelet may crash over a device that leaves the list while a pod holds it or is being given it (1.34 to 1.36: the device
manager dereferences its entry without looking), so an id is withdrawn only on the kubelet's word that no pod has it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gpu_plugin.devices.device import MIG, Device, Resource, is_placeholder, shown_id, withhold
from gpu_plugin.devices.recent_allocations import Key

SETTLE = 5.0
"""Seconds that a retired device stays listed at least: a pod that was being given it when it went shows up meanwhile."""

Allocated = frozenset[Key]
"""(resource name, device id) of devices that pods hold or may hold."""

NOT_ON_NODE = "it is not on this node any more"

NO_LONGER_OFFERED = "it is not offered any more"


class Retirement(msgspec.Struct, frozen=True):
    """Retired devices that are still listed, by resource name and device id.

    `since` is when that began (seconds, of the caller's clock). `free` is what no pod holds: nobody is given it any more, so
    that stays so. `beside` are the MIG devices that were on its GPU together with it until it went: what a pod has as one of
    them is no part of the others. `back` are replicas that are withheld in place of former ones.
    """

    since: Mapping[Key, float] = msgspec.field(default_factory=dict)
    free: Allocated = frozenset()
    beside: Mapping[Key, frozenset[str]] = msgspec.field(default_factory=dict)
    back: Allocated = frozenset()


def retire(
    listed: Iterable[Resource],
    planned: Sequence[Resource],
    before: Retirement,
    allocated: Allocated | None,
    now: float,
    recent: Collection[Key] = (),
    elsewhere: Iterable[Device] = (),
    held: Allocated | None = None,
) -> tuple[tuple[Resource, ...], Retirement]:
    """The planned resources, with what was listed before and is gone added at the end of each, unhealthy.

    Args:
        listed: the resources as the kubelet was last told of them.
        planned: the resources as they should be.
        before: what was retired already.
        allocated: what pods may hold as far as the kubelet says; None where it has not said.
        now: when the kubelet was asked, in seconds of a clock that never goes back.
        recent: what was given to a pod, and the kubelet has not said so yet.
        elsewhere: what pods hold under names that are not listed here.
        held: all that pods may hold besides `recent`, as last known; None if that was never known.

    Returns:
        Resources in the order of the plan, then those that have retired devices alone; and what is retired now. A planned
        device is withheld while a pod may hold its hardware under the id of a retired one, until the kubelet has said that
        none does. Where both are replicas of the same hardware, so many are withheld that no more pods get it than it is given
        out to (`_replicas_back`).
    """
    listed = tuple(listed)
    wanted = {resource.name: resource for resource in planned}
    since: dict[Key, float] = {}
    leaving: dict[str, list[Device]] = {}
    for resource in listed:
        present = {d.id for d in wanted[resource.name].devices} if resource.name in wanted else frozenset[str]()
        for device in resource.devices:
            key = (resource.name, device.id)
            if device.id in present or is_placeholder(device.id):
                continue
            began = before.since.get(key, now)
            if allocated is None or key in allocated or key in recent or now - began < SETTLE:
                since[key] = began
                leaving.setdefault(resource.name, []).append(gone(device))
    others = [_InUse(device, None) for device in elsewhere]
    if not since and not others:
        return tuple(planned), Retirement()
    free = frozenset(
        key
        for key in since
        if key not in recent and (key in before.free if allocated is None else key not in allocated)
    )
    beside = _beside(listed, since.keys(), before.beside)
    in_use = [
        _InUse(d, beside.get((name, d.id)))
        for name, devices in leaving.items()
        for d in devices
        if (name, d.id) not in free
    ]
    busy = _Busy([*in_use, *others], [device for resource in planned for device in resource.devices])
    names = [*wanted, *(name for name in leaving if name not in wanted)]
    merged, back = [], set()
    for name in names:
        devices = wanted[name].devices if name in wanted else ()
        replicas = _replicas_back(name, devices, busy, before.back, recent, held)
        back |= {(name, identifier) for identifier in replicas}
        kept = tuple(_withheld(device, busy.claim(device).former or replicas.get(device.id)) for device in devices)
        merged.append(Resource(name, (*kept, *leaving.get(name, ()))))
    return tuple(merged), Retirement(since, free, beside, frozenset(back))


def _withheld(device: Device, former: Device | None) -> Device:
    if device.withheld or former is None:
        return device
    return withhold(device, f"a pod may still hold its hardware as {shown_id(former.id)}")


def _replicas_back(
    resource: str,
    devices: Iterable[Device],
    busy: "_Busy",
    before: Allocated,
    recent: Collection[Key],
    held: Allocated | None,
) -> Mapping[str, Device]:
    """The replicas to withhold while pods may hold former ones of the same hardware, by id, each with a former one.

    For each former replica, one that surely no pod has is withheld: first those that were withheld `before`, then the last
    ones. If there are fewer such replicas than former ones, all replicas are withheld. The others would not do: a pod that
    has one may end, and the kubelet would give that replica to the next pod while the former ones are still held.
    """
    unheld: dict[str, list[tuple[bool, int, str]]] = {}
    ids: dict[str, list[str]] = {}
    claims: dict[str, _Claim] = {}
    for at, device in enumerate(devices):
        claim = busy.claim(device)
        if claim.replicas and not claim.former and not device.withheld:
            key = (resource, device.id)
            claims[device.visible_id] = claim
            ids.setdefault(device.visible_id, []).append(device.id)
            if held is not None and key not in held and key not in recent:
                unheld.setdefault(device.visible_id, []).append((key not in before, -at, device.id))
    back: dict[str, Device] = {}
    for visible, claim in claims.items():
        first = [identifier for *_, identifier in sorted(unheld.get(visible, ()))[: len(claim.replicas)]]
        chosen = first if len(first) == len(claim.replicas) else ids[visible]
        back |= dict.fromkeys(chosen, claim.replicas[0])
    return back


def gone(device: Device) -> Device:
    """The device, listed for the sake of a pod that may hold it, and for no other."""
    return device if device.retired else replace(withhold(device, NO_LONGER_OFFERED), retired=True)


def _beside(
    listed: Iterable[Resource],
    retired: Collection[Key],
    before: Mapping[Key, frozenset[str]],
) -> Mapping[Key, frozenset[str]]:
    """The MIG devices beside each retired one on its GPU when it was last planned; no entry where that is not known."""
    together: dict[str, set[str]] = {}
    fresh = []
    for resource in listed:
        for device in resource.devices:
            key = (resource.name, device.id)
            if device.kind == MIG and not device.retired:
                together.setdefault(device.gpu, set()).add(device.visible_id)
                if key in retired and key not in before:
                    fresh.append((key, device.gpu))
    sets = {gpu: frozenset(ids) for gpu, ids in together.items()}
    return {key: ids for key, ids in before.items() if key in retired} | {key: sets[gpu] for key, gpu in fresh}


class _InUse(msgspec.Struct, frozen=True):
    """A retired device; `beside` as in Retirement, None where it is not known."""

    device: Device
    beside: frozenset[str] | None


class _Claim(msgspec.Struct, frozen=True):
    """The former devices of which pods may have the hardware of a planned device.

    `former` is one of what it cannot be given away beside; None for none. `replicas` are former ones that it shares it with.
    """

    former: Device | None = None
    replicas: Sequence[Device] = ()


_UNCLAIMED = _Claim()


class _Busy:
    """Which planned devices have hardware that retired ones have. Devices of the same hardware are judged once."""

    def __init__(self, in_use: Iterable[_InUse], planned: Iterable[Device]) -> None:
        gpu_of = {device.visible_id: device.gpu for device in planned if device.kind == MIG}
        self._of: dict[str, dict[tuple[object, ...], list[_InUse]]] = {}
        self._found: dict[tuple[object, ...], _Claim] = {}
        for old in in_use:
            device = old.device
            parent = device.gpu
            if device.kind == MIG and device.gpu == device.visible_id:  # all that is known of it is its name
                parent = gpu_of.get(device.visible_id, ANYWHERE)
            alike = (device.kind, device.visible_id, bool(device.shared), old.beside)
            self._of.setdefault(parent, {}).setdefault(alike, []).append(old)

    def claim(self, device: Device) -> _Claim:
        """The former devices of which pods may have its hardware."""
        if device.gpu not in self._of and ANYWHERE not in self._of:
            return _UNCLAIMED
        unit = (device.gpu, device.visible_id, device.kind, bool(device.shared), device.nodes)
        if unit not in self._found:
            candidates = (*self._of.get(device.gpu, {}).values(), *self._of.get(ANYWHERE, {}).values())
            overlapping = [old.device for alike in candidates if _overlap(device, alike[0]) for old in alike]
            former = next((old for old in overlapping if not _shared(device, old)), None)
            self._found[unit] = _Claim(former, [old for old in overlapping if _shared(device, old)])
        return self._found[unit]


ANYWHERE = ""
"""Stands for the GPU of a MIG device of which only its name is known, and which is on this node no more."""


def _shared(device: Device, former: Device) -> bool:
    """Whether both are replicas of one thing. A whole GPU is none with its MIG devices: who has the one has all of the others."""
    return bool(device.shared and former.shared) and device.kind == former.kind


def _overlap(device: Device, old: _InUse) -> bool:
    """Whether a pod that has `old` and one that gets `device`, of one GPU, would both have some of the same hardware."""
    former = old.device
    if device.visible_id == former.visible_id:
        return True
    # MIG devices that were there together are no parts of each other. Of others, that was made of the same instances which
    # has the same capability node: what a container was once given it can open for as long as it lives. A whole GPU has none.
    if old.beside is not None and device.visible_id in old.beside:
        return False
    mine, theirs = _capability(device), _capability(former)
    return mine == theirs or not (mine and theirs)


def _capability(device: Device) -> str:
    """The capability node of a MIG device's compute instance; empty where it is not known."""
    last = device.nodes[-1] if device.nodes else ""
    return last if "/nvidia-caps/" in last else ""
