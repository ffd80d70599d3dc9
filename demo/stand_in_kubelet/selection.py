"""Which devices a container gets: the kubelet's order of steps around GetPreferredAllocation. Decisions only, no I/O.

Source: pkg/kubelet/cm/devicemanager/manager.go (devicesToAllocate).
"""

import random
from collections.abc import Collection, Sequence

import msgspec

from demo.stand_in_kubelet.device_table import ResourceState
from demo.stand_in_kubelet.topology import Hint, aligned
from gpu_plugin.kubelet.messages import ContainerPreferredAllocationRequest


class SelectionError(Exception):
    """The kubelet cannot serve the request; the text is its own."""


class Selection(msgspec.Struct, frozen=True):
    """Devices taken so far (`taken`), the question for the plugin if there is one, and where the rest comes from.

    `preferable` are the ids an answer may choose from; `rest` are tried in turn after the answer.
    """

    taken: tuple[str, ...]
    wanted: int
    ask: ContainerPreferredAllocationRequest | None
    preferable: frozenset[str]
    rest: tuple[frozenset[str], ...]


def check_serving(state: ResourceState, allocated: Collection[str] = ()) -> None:
    """What must hold before devices are counted. Raises SelectionError; `allocated` are ids the container has already."""
    if not state.healthy:
        raise SelectionError(f"no healthy devices present; cannot allocate unhealthy devices {state.resource}")
    if not state.healthy.issuperset(allocated):
        raise SelectionError(
            "previously allocated devices are no longer healthy; cannot allocate unhealthy devices " + state.resource
        )


def select(state: ResourceState, wanted: int, reusable: Collection[str], hint: Hint, rng: random.Random) -> Selection:
    """The steps up to the question. Raises SelectionError when too few devices are free."""
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
    """All ids for the container, once the plugin answered `preferred` (empty: no preference)."""
    taken = selection.taken
    for source in (selection.preferable.intersection(preferred), *selection.rest):
        taken += _draw(source, selection.wanted - len(taken), taken, rng)
    if len(taken) < selection.wanted:
        raise SelectionError(
            f"unexpectedly allocated less resources than required. Requested: {selection.wanted}, Got: {len(taken)}"
        )
    return taken


def preferred_breaches(ask: ContainerPreferredAllocationRequest, answer: Sequence[str]) -> list[str]:
    """What is wrong with a preferred allocation. An empty one is right: the plugin leaves the choice to the kubelet."""
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
    """In random order, as Go gives a set; sorted first so that one seed gives one order."""
    ordered = sorted(ids)
    rng.shuffle(ordered)
    return tuple(ordered)
