"""What becomes of devices that the plan has no more: listed and unhealthy until no pod can hold them.

A kubelet may crash over a device that leaves the list while a pod holds it or is being given it (1.34 to 1.36: the device
manager dereferences its entry without looking), so an id is withdrawn only on the kubelet's word that no pod has it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpu_plugin.devices.device import Device, Resource, with_held
from gpu_plugin.devices.naming import PLACEHOLDER

SETTLE = 5.0
"""Seconds that a retired device stays listed at least: a pod that was being given it when it went shows up meanwhile."""

Held = frozenset[tuple[str, str]]
"""(resource name, device id) of every device that a pod holds."""


@dataclass(frozen=True, slots=True)
class Retirement:
    """What is gone and still listed: by resource name and device id, when that began (seconds, of the caller's clock).

    `held` is what pods held when the kubelet was last heard.
    """

    since: Mapping[tuple[str, str], float] = field(default_factory=dict)
    held: Held = frozenset()


def retire(
    listed: Iterable[Resource], planned: Sequence[Resource], before: Retirement, held: Held | None, now: float
) -> tuple[tuple[Resource, ...], Retirement]:
    """The planned resources, with what was listed before and is gone added at the end of each, unhealthy.

    Args:
        listed: the resources as the kubelet was last told of them.
        planned: the resources as they should be.
        before: what was retired already.
        held: what pods hold as far as the kubelet says, asked for no earlier than now; None where it has not said.
        now: seconds of a clock that never goes back.

    Returns:
        Resources in the order of the plan, then those that have retired devices alone; and what is retired now. A planned
        device whose hardware a pod holds under a former id is held back, unless both share it anyway.
    """
    wanted = {resource.name: resource for resource in planned}
    since: dict[tuple[str, str], float] = {}
    leaving: dict[str, list[Device]] = {}
    for resource in listed:
        present = {d.id for d in wanted[resource.name].devices} if resource.name in wanted else frozenset[str]()
        for device in resource.devices:
            key = (resource.name, device.id)
            if device.id in present or device.id.startswith(PLACEHOLDER):
                continue
            began = before.since.get(key, now)
            if held is None or key in held or now - began < SETTLE:
                since[key] = began
                leaving.setdefault(resource.name, []).append(_retired(device))
    known = before.held if held is None else held
    in_use = [d for name, devices in leaving.items() for d in devices if (name, d.id) in known]
    names = [*wanted, *(name for name in leaving if name not in wanted)]
    merged = []
    for name in names:
        kept = _held_back(wanted[name].devices, in_use) if name in wanted else ()
        merged.append(Resource(name, (*kept, *leaving.get(name, ()))))
    return tuple(merged), Retirement(since, known if since else frozenset())


def _retired(device: Device) -> Device:
    return device if device.retired else replace(with_held(device, "it is not on this node any more"), retired=True)


def _held_back(devices: tuple[Device, ...], in_use: Sequence[Device]) -> tuple[Device, ...]:
    if not in_use:
        return devices
    # Tens of thousands of replicas are each held against what is in use of their own hardware alone.
    by_hardware: dict[str, list[Device]] = {}
    for old in in_use:
        for uuid in {old.gpu, old.visible_id}:
            by_hardware.setdefault(uuid, []).append(old)
    return tuple(
        _busy(device, [*by_hardware.get(device.gpu, ()), *by_hardware.get(device.visible_id, ())]) for device in devices
    )


def _busy(device: Device, in_use: Sequence[Device]) -> Device:
    if device.held:
        return device
    former = next((old for old in in_use if _conflict(device, old)), None)
    return with_held(device, f"a pod still holds its hardware as {former.id}") if former else device


def _conflict(device: Device, old: Device) -> bool:
    """Whether a pod that has `old` and one that gets `device` would both have hardware that one of them has for itself."""
    same_unit = device.visible_id == old.visible_id
    part_of_it = device.gpu == old.gpu and device.kind != old.kind
    return (same_unit or part_of_it) and not (device.shared and old.shared)
