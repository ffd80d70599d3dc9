"""Select a container's devices, with the kubelet's order of steps around GetPreferredAllocation. Pure functions, no I/O.

Source: pkg/kubelet/cm/devicemanager/manager.go (devicesToAllocate).
"""

import random
from collections.abc import Collection, Sequence

import msgspec

from demo.stand_in_kubelet.device_table import ResourceState
from demo.stand_in_kubelet.topology import Hint, aligned
from gpu_plugin.kubelet.messages import ContainerPreferredAllocationRequest


class SelectionError(Exception):
    """The kubelet cannot satisfy the request. The text is the kubelet's text."""


class Selection(msgspec.Struct, frozen=True):
    """The state of a selection before GetPreferredAllocation.

    Attributes:
        taken: the ids that are selected so far.
        wanted: number of devices that the container needs.
        ask: the request to the plugin; None if the kubelet sends no request.
        preferable: the ids that the answer may select.
        rest: sets of ids from which `complete` selects the missing devices after the answer, in order.
    """

    taken: tuple[str, ...]
    wanted: int
    ask: ContainerPreferredAllocationRequest | None
    preferable: frozenset[str]
    rest: tuple[frozenset[str], ...]


def check_serving(state: ResourceState, allocated: Collection[str] = ()) -> None:
    """Raise SelectionError if no device is healthy, or if an id in `allocated`, which the container already has, is not."""
    if not state.healthy:
        raise SelectionError(f"no healthy devices present; cannot allocate unhealthy devices {state.resource}")
    if not state.healthy.issuperset(allocated):
        raise SelectionError(
            "previously allocated devices are no longer healthy; cannot allocate unhealthy devices " + state.resource
        )


def select(state: ResourceState, wanted: int, reusable: Collection[str], hint: Hint, rng: random.Random) -> Selection:
    """Run the steps before the request to the plugin. Raises SelectionError if too few devices are free."""
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
    """Return all ids for the container, after the plugin answered `preferred` (empty: no preference).

    Raises SelectionError if there are too few.
    """
    taken = selection.taken
    for source in (selection.preferable.intersection(preferred), *selection.rest):
        taken += _draw(source, selection.wanted - len(taken), taken, rng)
    if len(taken) < selection.wanted:
        raise SelectionError(
            f"unexpectedly allocated less resources than required. Requested: {selection.wanted}, Got: {len(taken)}"
        )
    return taken


def preferred_breaches(ask: ContainerPreferredAllocationRequest, answer: Sequence[str]) -> list[str]:
    """Return the rules that a preferred allocation breaks. An empty answer is allowed: the kubelet then chooses."""
    if not answer:
        return []
    found = []
    if len(set(answer)) != len(answer):
        found.append(f"preferred allocation {list(answer)} contains a device twice")
    if foreign := set(answer).difference(ask.available_device_ids):
        found.append(f"preferred allocation contains {sorted(foreign)}, which the request did not offer")
    if left := set(ask.must_include_device_ids).difference(answer):
        found.append(f"preferred allocation lacks {sorted(left)}, which the request had as must-include")
    if len(answer) != ask.allocation_size:
        found.append(f"preferred allocation has {len(answer)} devices, not the requested {ask.allocation_size}")
    return found


def _request(
    available: Collection[str], must_include: Collection[str], size: int, rng: random.Random
) -> ContainerPreferredAllocationRequest:
    return ContainerPreferredAllocationRequest([*_shuffled(available, rng)], [*_shuffled(must_include, rng)], size)


def _draw(source: Collection[str], count: int, but: Collection[str], rng: random.Random) -> tuple[str, ...]:
    return _shuffled(set(source).difference(but), rng)[: max(count, 0)]


def _shuffled(ids: Collection[str], rng: random.Random) -> tuple[str, ...]:
    """Return the ids in random order, as Go iterates over a set. They are sorted first, so that the seed defines the order."""
    ordered = sorted(ids)
    rng.shuffle(ordered)
    return tuple(ordered)
