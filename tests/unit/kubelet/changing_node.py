"""A node of two GPUs that is repartitioned, renamed and shared in all the ways that tests of interleavings go through."""

import dataclasses
from collections.abc import Iterable
from functools import lru_cache

import msgspec

from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.sharing import NamePattern, SharedResource
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.devices.node import Gpu, MigDevice, Node
from gpu_plugin.kubelet.offer import Offer, offer

GPU = "nvidia.com/gpu"

LAYOUTS: dict[str, tuple[tuple[str, int], ...]] = {
    "whole": (),
    "halves": (("3g.40gb", 1), ("3g.40gb", 2)),
    "small": (("1g.10gb", 7), ("1g.10gb", 8), ("1g.10gb", 9)),
    "mixed": (("3g.40gb", 1), ("1g.10gb", 9)),
}
"""Partitions of a GPU: profile and GPU instance of each slice. An instance's number goes with its capability node."""

NAMES = {
    "as found": ((), ()),
    "renamed": ((NamePattern("*", "nvidia.com/h100"),), ()),
    "foreign": ((NamePattern("*", "example.com/h100"),), ()),
    "foreign slices": ((), (NamePattern("*", "example.com/slice"),)),
    "all foreign": ((NamePattern("*", "example.com/h100"),), (NamePattern("*", "example.com/slice"),)),
}
"""Names of GPUs, and of slices."""


def shared_by(count: int) -> tuple[SharedResource, ...]:
    return tuple(SharedResource(name, name, count) for name in (GPU, "nvidia.com/h100", "nvidia.com/mig-1g.10gb"))


SHARED = {
    "exclusive": (),
    "shared": (SharedResource(GPU, GPU, 2),),
    "all shared": shared_by(2),
    "by three": shared_by(3),
    "by four": shared_by(4),
    "by another name": (SharedResource(GPU, f"{GPU}.shared", 3),),
}


@dataclasses.dataclass(frozen=True)
class Situation:
    """The hardware and the settings: the partition of each GPU with its count, the names, and the sharing."""

    layouts: tuple[tuple[str, int], ...] = (("whole", 0), ("whole", 0))
    names: str = "as found"
    shared: str = "exclusive"


def uuid(kind: str, gpu: int, instance: int = 0, layout: str = "whole", time: int = 0) -> str:
    return f"{kind}-{gpu:08x}-{instance:04x}-{sorted(LAYOUTS).index(layout):04x}-{time:04x}-000000000000"


@lru_cache(None)
def offered(situation: Situation) -> Offer:
    gpus = []
    for at, (layout, time) in enumerate(situation.layouts):
        slices = tuple(
            MigDevice(
                uuid("MIG", at, instance, layout, time),
                index,
                instance,
                0,
                profile,
                gpu_instance_cap=100 * (at + 1) + 2 * instance,
                compute_instance_cap=100 * (at + 1) + 2 * instance + 1,
            )
            for index, (profile, instance) in enumerate(LAYOUTS[layout])
        )
        gpus.append(Gpu(uuid("GPU", at), at, minor=at, mig_enabled=bool(slices), mig_devices=slices))
    settings = msgspec.structs.replace(
        resolve({}, {}),
        mig_strategy="mixed",
        gpu_names=NAMES[situation.names][0],
        mig_names=NAMES[situation.names][1],
        sharing=SHARED[situation.shared],
    )
    return offer(Node(tuple(gpus)), settings, "/")


EVERY = frozenset(instance for layout in LAYOUTS.values() for _, instance in layout)


def hardware(identifier: str) -> frozenset[tuple[int, int]]:
    """The hardware that a container with this id can open, as pairs of a GPU and an instance on it."""
    kind, gpu, instance, *_ = identifier.split("-")
    return frozenset((int(gpu, 16), one) for one in (EVERY if kind == "GPU" else (int(instance, 16),)))


def as_remembered(resource: Resource) -> Resource:
    """A resource as `memory` has it: of devices it does not know why they were unhealthy."""
    return Resource(
        resource.name,
        tuple(msgspec.structs.replace(device, reason="", withheld="", retired=False) for device in resource.devices),
    )


def held_twice(holders: Iterable[tuple[str, str]]) -> str:
    """Describe hardware that a pod has for itself and another pod has as well; or return an empty text.

    Takes pairs of a pod and a device id that it holds. How many pods have replicas of one thing is for `overfull` to judge.
    """
    for part, having_it in _by_part(holders).items():
        if len({pod for pod, _ in having_it}) > 1:
            kinds = {identifier[:3] if "::" in identifier else "" for _, identifier in having_it}
            if len(kinds) != 1 or "" in kinds:
                return f"GPU {part[0]}, instance {part[1]}: {sorted(having_it)}"
    return ""


def overfull(holders: Iterable[tuple[str, str]], admitted: Device) -> str:
    """Describe what is wrong if a pod has just been given this device; empty if nothing is.

    The pod included, its hardware must have no more holders than it is given out to. Pods of an earlier, higher count may
    exceed that by themselves, and then no other pod may be admitted.
    """
    by_part = _by_part(holders)
    for part in sorted(hardware(admitted.id)):
        if len(by_part[part]) > admitted.replicas:
            return f"GPU {part[0]}, instance {part[1]}: {len(by_part[part])} hold what {admitted.replicas} may"
    return ""


def _by_part(holders: Iterable[tuple[str, str]]) -> dict[tuple[int, int], list[tuple[str, str]]]:
    having: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for pod, identifier in holders:
        for part in hardware(identifier):
            having.setdefault(part, []).append((pod, identifier))
    return having
