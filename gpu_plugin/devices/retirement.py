"""Retired devices: no longer in the plan, listed and Unhealthy until no pod can hold them.

A kubelet may crash over a device that leaves the list while a pod holds it or gets it (1.34 to 1.36: the device manager
dereferences its entry without a check). So an id is withdrawn only after the kubelet has reported that no pod has it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from gpu_plugin.devices.device import MIG, Device, Resource, is_placeholder, shown_id, withhold
from gpu_plugin.devices.recent_allocations import Key

SETTLE = 5.0
"""Least seconds that a retired device stays listed: a pod that was getting the device when it went is reported by then."""

Allocated = frozenset[Key]  # (resource name, device id) of devices that pods hold or may hold

NOT_ON_NODE = "it is not on this node any more"

NO_LONGER_OFFERED = "it is not offered any more"


class Retirement(msgspec.Struct, frozen=True):
    """Retired devices that are still listed, by resource name and device id."""

    since: Mapping[Key, float] = msgspec.field(default_factory=dict)  # time of retirement in seconds
    free: Allocated = frozenset()  # no pod holds these devices; pods no longer get them, so they stay free
    # The MIG devices that were on the GPU together with the retired device: they share no hardware with it.
    beside: Mapping[Key, frozenset[str]] = msgspec.field(default_factory=dict)
    back: Allocated = frozenset()  # replicas that are withheld in place of former replicas


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
    """Return the planned resources, with the devices that were listed before and are gone at the end of each, unhealthy.

    Args:
        listed: the resources of the last list for the kubelet.
        planned: the resources of the plan.
        before: the former retirement.
        allocated: the devices that pods may hold according to the kubelet; None without an answer.
        now: the time of the question to the kubelet, in seconds of a monotonic clock.
        recent: the devices that pods got, and that the kubelet has not reported yet.
        elsewhere: the devices that pods hold under names that are not in `listed`.
        held: the devices that pods may hold in addition to `recent`, as last known; None if that was never known.

    Returns:
        Resources in the order of the plan, then resources with retired devices only; and the new retirement. A planned device
        is withheld while a pod may hold its hardware under the id of a retired device, until the kubelet has reported that no
        pod does. If both are replicas of the same hardware, enough replicas are withheld that no more pods get the hardware
        than its number of replicas (`_replicas_back`).
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
    """Return the replicas to withhold while pods may hold former replicas of the same hardware, by id, with a former replica.

    For each former replica, a replica is withheld that surely no pod has: first the replicas that were withheld `before`, then
    the last ones. If there are fewer such replicas than former replicas, all are withheld. Replicas that pods have would not
    help: when such a pod ends, the kubelet would give its replica to the next pod while former replicas are still held.
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
    """Return the device as retired: listed because a pod may hold it, and not for other pods."""
    return device if device.retired else replace(withhold(device, NO_LONGER_OFFERED), retired=True)


def _beside(
    listed: Iterable[Resource], retired: Collection[Key], before: Mapping[Key, frozenset[str]]
) -> Mapping[Key, frozenset[str]]:
    """Return the MIG devices on each retired device's GPU when it was last planned; no entry if that is not known."""
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
    """A retired device."""

    device: Device
    beside: frozenset[str] | None  # as in Retirement; None if it is not known


class _Claim(msgspec.Struct, frozen=True):
    """The former devices that have hardware of a planned device, and that pods may hold."""

    former: Device | None = None  # a former device with which the planned device cannot share the hardware
    replicas: Sequence[Device] = ()  # former replicas with which it shares the hardware


_UNCLAIMED = _Claim()


class _Busy:
    """The planned devices with hardware of retired devices. Devices of the same hardware are compared once."""

    def __init__(self, in_use: Iterable[_InUse], planned: Iterable[Device]) -> None:
        gpu_of = {device.visible_id: device.gpu for device in planned if device.kind == MIG}
        self._of: dict[str, dict[tuple[object, ...], list[_InUse]]] = {}
        self._found: dict[tuple[object, ...], _Claim] = {}
        for old in in_use:
            device = old.device
            parent = device.gpu
            if device.kind == MIG and device.gpu == device.visible_id:  # only its name is known
                parent = gpu_of.get(device.visible_id, ANYWHERE)
            alike = (device.kind, device.visible_id, bool(device.shared), old.beside)
            self._of.setdefault(parent, {}).setdefault(alike, []).append(old)

    def claim(self, device: Device) -> _Claim:
        """Return the former devices with hardware of this device."""
        if device.gpu not in self._of and ANYWHERE not in self._of:
            return _UNCLAIMED
        unit = (device.gpu, device.visible_id, device.kind, bool(device.shared), device.nodes)
        if unit not in self._found:
            candidates = (*self._of.get(device.gpu, {}).values(), *self._of.get(ANYWHERE, {}).values())
            overlapping = [old.device for alike in candidates if _overlap(device, alike[0]) for old in alike]
            former = next((old for old in overlapping if not _shared(device, old)), None)
            self._found[unit] = _Claim(former, [old for old in overlapping if _shared(device, old)])
        return self._found[unit]


ANYWHERE = ""  # the key for the unknown GPU of a MIG device of which only its name is known, and which is no longer on this node


def _shared(device: Device, former: Device) -> bool:
    """Return True if both are replicas that may be held together. A whole GPU and its MIG devices may not."""
    return bool(device.shared and former.shared) and device.kind == former.kind


def _overlap(device: Device, old: _InUse) -> bool:
    """Return True if `old` and `device` of the same GPU have some of the same hardware."""
    former = old.device
    if device.visible_id == former.visible_id:
        return True
    # MIG devices that existed together do not overlap. Otherwise MIG devices overlap if they have the same capability node, since
    # a container can open its nodes as long as it runs. A whole GPU has no capability node, and overlaps all its MIG devices.
    if old.beside is not None and device.visible_id in old.beside:
        return False
    mine, theirs = _capability(device), _capability(former)
    return mine == theirs or not (mine and theirs)


def _capability(device: Device) -> str:
    """Return the capability node of a MIG device's compute instance; empty if it is not known."""
    last = device.nodes[-1] if device.nodes else ""
    return last if "/nvidia-caps/" in last else ""
