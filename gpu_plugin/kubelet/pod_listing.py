"""Decode answers of the kubelet's PodResources service: the devices, and the containers that hold them. Pure.

betterproto takes 0.1 ms for an entry of a device, so each distinct entry is decoded once: the next answers mostly have the same
entries, in any order. betterproto keeps fields that we do not know as bytes: memory, CPUs and claims cost little.
"""

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from gpu_plugin.kubelet.messages import decode_exactly, encoded_parts

MAX_HELD = 200_000  # the most devices that a node's pods may hold: three times the longest list of one resource
KEPT_PODS = 1024  # Entries of pods that are kept decoded. A node has 110 pods by default.
KEPT_DEVICES = 8192  # entries of allocatable devices that are kept decoded, of 0.3 KiB each


class Holder(NamedTuple):
    """One container of a pod."""

    namespace: str
    pod: str
    container: str


# The containers that hold each (resource name, device id): several where containers share it.
HoldersByDevice = Mapping[tuple[str, str], frozenset[Holder]]

Pods = Mapping[tuple[str, str], frozenset[str]]  # pods, as namespace/name, by the (resource, device id) that they hold


def decode_holders(data: bytes) -> HoldersByDevice:
    """Decode the containers that hold each device from a ListPodResourcesResponse.

    The kubelet lists a device once for each of its NUMA nodes, and several containers may hold it. The result has it once. The
    devices of a container share one set, and the devices of a resource share its name: 400 devices of 100 pods take 0.1 MiB,
    56,000 devices 11 MiB.

    Raises:
        ValueError: the bytes are not such a message, or name more than `MAX_HELD` devices.
    """
    found: dict[tuple[str, str], frozenset[Holder]] = {}
    shared: dict[tuple[str, str], set[Holder]] = {}
    for entry in encoded_parts(data):
        for holder, keys in _containers(entry):
            only_holder = frozenset((holder,))
            for key in keys:
                if found.setdefault(key, only_holder) is not only_holder:
                    shared.setdefault(key, {*found[key]}).add(holder)
                elif len(found) > MAX_HELD:
                    raise ValueError(f"pods would hold more than {MAX_HELD} devices")
    found.update((key, frozenset(holders)) for key, holders in shared.items())
    return found


def pods(by_device: HoldersByDevice) -> Pods:
    """Return the pods, as namespace/name, that hold each device."""
    named: dict[frozenset[Holder], frozenset[str]] = {}
    for holders in by_device.values():
        if holders not in named:
            named[holders] = frozenset(f"{holder.namespace}/{holder.pod}" for holder in holders)
    return {key: named[holders] for key, holders in by_device.items()}


def decode_allocatable(data: bytes) -> Mapping[str, frozenset[str]]:
    """Decode the device ids by resource name from an AllocatableResourcesResponse. Raises ValueError for other bytes."""
    found: dict[str, set[str]] = {}
    for entry in encoded_parts(data):
        resource, ids = _devices(entry)
        found.setdefault(resource, set()).update(ids)
    return {resource: frozenset(ids) for resource, ids in found.items()}


@lru_cache(KEPT_PODS)
def _containers(entry: bytes) -> tuple[tuple[Holder, tuple[tuple[str, str], ...]], ...]:
    """Decode the containers of a PodResources, each with the (resource name, device id) that it holds."""
    from gpu_plugin.kubelet._api import v1  # noqa: PLC0415 - no pod waits for the first answer

    pod = decode_exactly(v1.PodResources, entry)
    return tuple(
        (
            Holder(pod.namespace, pod.name, container.name),
            tuple((sys.intern(each.resource_name), device) for each in container.devices for device in each.device_ids),
        )
        for container in pod.containers
    )


@lru_cache(KEPT_DEVICES)
def _devices(entry: bytes) -> tuple[str, tuple[str, ...]]:
    """Decode the resource name and the device ids of a ContainerDevices."""
    from gpu_plugin.kubelet._api import v1  # noqa: PLC0415 - as above

    devices = decode_exactly(v1.ContainerDevices, entry)
    return sys.intern(devices.resource_name), tuple(devices.device_ids)
