"""Which GPUs shared devices and MIG devices are taken from.

Names and purpose of the policies are those of NVIDIA's plugin v0.20.0 (internal/rm/allocate.go), which counts MIG devices as
GPUs of their own and so tells none of them apart. Here what counts is the hardware; only within one GPU its MIG devices.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from gpu_plugin.devices.device import Device

DISTRIBUTED = "distributed"
PACKED = "packed"

Rank = tuple[int, int]


def _distributed(load: int, picked: int) -> Rank:
    """What this container has least of, so that several devices are several GPUs; then what is used least."""
    return picked, load


def _packed(load: int, picked: int) -> Rank:
    """What is used most."""
    return -load, picked


POLICIES: Mapping[str, Callable[[int, int], Rank]] = {DISTRIBUTED: _distributed, PACKED: _packed}
"""Policies by name. Each ranks hardware, lowest first, by how many of its devices are given out, those picked for this
container included, and by how many were picked for it. Where ranks are equal, the position in the list decides."""


@dataclass(slots=True)
class _Part:
    """A GPU that is shared whole, or one of its MIG devices: its free devices, the next one to take last."""

    load: int = 0
    picked: int = 0
    free: list[int] = field(default_factory=list)


_Queue = list[tuple[Rank, int, "_Part"]]


@dataclass(slots=True)
class _Hardware:
    """A GPU with its parts, and a heap of those that have a free device."""

    parts: defaultdict[str, _Part] = field(default_factory=lambda: defaultdict(_Part))
    load: int = 0
    picked: int = 0
    queue: _Queue = field(default_factory=list)


def taken(
    required: Sequence[int], free: Sequence[int], missing: int, devices: Sequence[Device], policy: str
) -> list[int]:
    """The required positions and `missing` of the free ones, both ascending and without the other's, by that policy.

    What is neither free nor required counts as given out, unhealthy devices included. Takes O(n log n) for n devices.
    """
    rank = POLICIES[policy]
    gpus = _counted(required, free, devices)
    queue = []
    for gpu in gpus.values():
        gpu.queue = [(rank(part.load, part.picked), part.free[-1], part) for part in gpu.parts.values() if part.free]
        if gpu.queue:
            heapify(gpu.queue)
            queue.append((rank(gpu.load, gpu.picked), gpu.queue[0][1], gpu))
    heapify(queue)
    chosen = list(required)
    for _ in range(missing):
        gpu = queue[0][2]
        chosen.append(_take(gpu, rank))
        if gpu.queue:
            heapreplace(queue, (rank(gpu.load, gpu.picked), gpu.queue[0][1], gpu))
        else:
            heappop(queue)
    return chosen


def _take(gpu: _Hardware, rank: Callable[[int, int], Rank]) -> int:
    """Takes one device from the GPU's first part."""
    part = gpu.queue[0][2]
    position = part.free.pop()
    for used in (gpu, part):
        used.load += 1
        used.picked += 1
    if part.free:
        heapreplace(gpu.queue, (rank(part.load, part.picked), part.free[-1], part))
    else:
        heappop(gpu.queue)
    return position


def _counted(required: Iterable[int], free: Sequence[int], devices: Sequence[Device]) -> Mapping[str, _Hardware]:
    """Every GPU by its uuid, with what of it is given out, picked already, and free."""
    gpus: defaultdict[str, _Hardware] = defaultdict(_Hardware)
    for device in devices:
        gpu = gpus[device.gpu]
        gpu.load += 1
        gpu.parts[device.visible_id].load += 1
    for at in reversed(free):
        gpu = gpus[devices[at].gpu]
        part = gpu.parts[devices[at].visible_id]
        part.free.append(at)
        gpu.load -= 1
        part.load -= 1
    for at in required:
        gpu = gpus[devices[at].gpu]
        gpu.picked += 1
        gpu.parts[devices[at].visible_id].picked += 1
    return gpus
