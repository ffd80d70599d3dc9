"""What the kubelet's PodResources service answers, read: which devices there are, and which containers hold which. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from gpu_plugin.kubelet.fields import Span, last, spans

MAX_HELD = 200_000
"""The most devices that a node's pods may hold: three times what the longest list of one resource has. An answer of 16 MiB may
name millions, at half a KiB of memory each."""


class Holder(NamedTuple):
    """One container of a pod."""

    namespace: str
    pod: str
    container: str


HoldersByDevice = Mapping[tuple[str, str], frozenset[Holder]]
"""The containers that hold each (resource name, device id): several where containers share it."""

Pods = Mapping[tuple[str, str], frozenset[str]]
"""Pods, as namespace/name, by the (resource, device id) that they hold."""


def decode_holders(data: bytes) -> HoldersByDevice:
    """The containers that hold each device of a ListPodResourcesResponse.

    A device is there once for each of its NUMA nodes, and may be in several containers; here it is once. What one container
    holds shares one set, and what is of one resource shares its name: 400 devices of 100 pods take 0.1 MiB, 56,000 11.

    Raises:
        ValueError: the bytes are no such message, or name more than `MAX_HELD` devices.
    """
    found: dict[tuple[str, str], frozenset[Holder]] = {}
    shared: dict[tuple[str, str], set[Holder]] = {}
    names: dict[bytes, str] = {}
    for pod in spans(data, (0, len(data)), 1):
        namespace, name = last(data, pod, 2).decode(), last(data, pod, 1).decode()
        for container in spans(data, pod, 3):
            holder = Holder(namespace, name, last(data, container, 1).decode())
            only_holder = frozenset((holder,))
            for resource, begin, end in _devices(data, container):
                key = (names.get(resource) or names.setdefault(resource, resource.decode()), data[begin:end].decode())
                if found.setdefault(key, only_holder) is not only_holder:
                    shared.setdefault(key, {*found[key]}).add(holder)
                elif len(found) > MAX_HELD:
                    raise ValueError(f"pods would hold more than {MAX_HELD} devices")
    found.update((key, frozenset(holders)) for key, holders in shared.items())
    return found


def _devices(data: bytes, container: Span) -> list[tuple[bytes, int, int]]:
    """The devices of one ContainerResources: the resource's name, and where the id lies."""
    return [
        (resource, begin, end)
        for devices in spans(data, container, 2)
        for resource in (last(data, devices, 1),)
        for begin, end in spans(data, devices, 2)
    ]


def pods(by_device: HoldersByDevice) -> Pods:
    """The pods, as namespace/name, that hold each device."""
    named: dict[frozenset[Holder], frozenset[str]] = {}
    for holders in by_device.values():
        if holders not in named:
            named[holders] = frozenset(f"{holder.namespace}/{holder.pod}" for holder in holders)
    return {key: named[holders] for key, holders in by_device.items()}


def decode_allocatable(data: bytes) -> Mapping[str, frozenset[str]]:
    """The device ids by resource name in an AllocatableResourcesResponse. Raises ValueError on bytes that are none."""
    found: dict[bytes, set[bytes]] = {}
    for devices in spans(data, (0, len(data)), 1):
        resource = last(data, devices, 1)
        found.setdefault(resource, set()).update(data[begin:end] for begin, end in spans(data, devices, 2))
    return {resource.decode(): frozenset(map(bytes.decode, ids)) for resource, ids in found.items()}
