"""Selects a container's devices, with the kubelet's steps before and after GetPreferredAllocation. No I/O.

Source: pkg/kubelet/cm/devicemanager/manager.go (devicesToAllocate).
"""

import random
from collections.abc import Collection, Sequence

import msgspec

from demo.stand_in_kubelet.device_table import ResourceState
from demo.stand_in_kubelet.topology import Hint, aligned
from gpu_plugin.kubelet.messages import ContainerPreferredAllocationRequest


class SelectionError(Exception):
    """The kubelet cannot serve the request; the text is the kubelet's."""


class Selection(msgspec.Struct, frozen=True):
    """The devices selected so far (`taken`), the request to the plugin if needed, and the sources of further devices.

    `preferable` are the ids that the answer may contain; `rest` are used in turn after the answer.
    """

    taken: tuple[str, ...]
    wanted: int
    ask: ContainerPreferredAllocationRequest | None
    preferable: frozenset[str]
    rest: tuple[frozenset[str], ...]


def check_serving(state: ResourceState, allocated: Collection[str] = ()) -> None:
    """Check the conditions for an allocation. Raises SelectionError. `allocated` are ids that the container has already."""
    if not state.healthy:
        raise SelectionError(f"no healthy devices present; cannot allocate unhealthy devices {state.resource}")
    if not state.healthy.issuperset(allocated):
        raise SelectionError(
            "previously allocated devices are no longer healthy; cannot allocate unhealthy devices " + state.resource
        )


def select(state: ResourceState, wanted: int, reusable: Collection[str], hint: Hint, rng: random.Random) -> Selection:
    """Do the steps before the request to the plugin. Raises SelectionError if too few devices are free."""
    taken = _draw(reusable, wanted, (), rng)
    needed = wanted - len(taken)
    if needed == 0:
        return Selection(taken, wanted, None, frozenset(), ())
    free = state.free
    if len(free) < needed:
        raise SelectionError(
            f"requested number of devices unavailable for {state.resource}. Requested: {needed}, Available: {len(free)}"
        )
    inside, outside, nowhere = aligned(state.numa, free, hint)
    if needed < len(inside):
        ask = _request(inside.union(taken), taken, wanted, rng)
        return Selection(taken, wanted, ask, frozenset(inside), (frozenset(inside),))
    taken += _draw(inside, needed, taken, rng)
    if len(taken) == wanted:
        return Selection(taken, wanted, None, frozenset(), ())
    ask = _request(free.union(taken), taken, wanted, rng)
    return Selection(taken, wanted, ask, frozenset(free), (frozenset(outside), frozenset(nowhere)))


def complete(selection: Selection, preferred: Sequence[str], rng: random.Random) -> tuple[str, ...]:
    """Return all ids for the container, given the plugin's answer `preferred` (empty: no preference)."""
    taken = selection.taken
    for source in (selection.preferable.intersection(preferred), *selection.rest):
        taken += _draw(source, selection.wanted - len(taken), taken, rng)
    if len(taken) < selection.wanted:
        raise SelectionError(
            f"unexpectedly allocated less resources than required. Requested: {selection.wanted}, Got: {len(taken)}"
        )
    return taken


def preferred_breaches(ask: ContainerPreferredAllocationRequest, answer: Sequence[str]) -> list[str]:
    """Return the faults of a preferred allocation. An empty one is correct: the kubelet chooses then."""
    if not answer:
        return []
    found = []
    if len(set(answer)) != len(answer):
        found.append(f"preferred allocation {list(answer)} names a device twice")
    if foreign := set(answer).difference(ask.available_device_ids):
        found.append(f"preferred allocation names {sorted(foreign)}, which were not on offer")
    if left := set(ask.must_include_device_ids).difference(answer):
        found.append(f"preferred allocation leaves out {sorted(left)}, which it had to include")
    if len(answer) != ask.allocation_size:
        found.append(f"preferred allocation has {len(answer)} devices for a size of {ask.allocation_size}")
    return found


def _request(
    available: Collection[str], must_include: Collection[str], size: int, rng: random.Random
) -> ContainerPreferredAllocationRequest:
    return ContainerPreferredAllocationRequest([*_shuffled(available, rng)], [*_shuffled(must_include, rng)], size)


def _draw(source: Collection[str], count: int, but: Collection[str], rng: random.Random) -> tuple[str, ...]:
    return _shuffled(set(source).difference(but), rng)[: max(count, 0)]


def _shuffled(ids: Collection[str], rng: random.Random) -> tuple[str, ...]:
    """Return the ids in random order, like a set in Go; sorted first, so that a seed determines the order."""
    ordered = sorted(ids)
    rng.shuffle(ordered)
    return tuple(ordered)
