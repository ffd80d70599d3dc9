"""A choice of whole GPUs explained: what came second, and what told the two apart. For people, not for the kubelet's path."""

from collections.abc import Callable, Collection, Iterator
from itertools import combinations

import msgspec

from gpu_plugin.placement.prepared import Placement
from gpu_plugin.placement.subsets import Subsets, pods_to_come
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.whole import Choice, choose

ALL_AVAILABLE, ALL_REQUIRED = "it is all that is available", "it is all that must be included"


class Explanation(msgspec.Struct, frozen=True):
    """A choice, the set that would have been chosen next, if there is one and it is known, and a sentence on why."""

    choice: Choice
    runner_up: Choice | None
    why: str


def explain(placement: Placement, available: Collection[int], required: Collection[int], size: int) -> Explanation:
    """What `whole.choose` answers, and why. Looks at every set again: some 50 ms for 8 of 16 GPUs."""
    choice = choose(placement, available, required, size)
    if not choice.gpus:
        return Explanation(choice, None, choice.why)
    if not choice.exact:
        return Explanation(choice, None, "a bounded search does not say what came second")
    second = _second(placement.subsets, frozenset(available), frozenset(required), choice)
    if second is None:
        return Explanation(choice, None, ALL_AVAILABLE if len(choice.gpus) == len({*available}) else ALL_REQUIRED)
    topology = placement.topology
    runner_up = Choice(second, topology.score(second), exact=True, why=choice.why)
    return Explanation(choice, runner_up, _difference(topology, frozenset(available), choice, runner_up))


def _second(
    subsets: Subsets | None, pool: frozenset[int], must: frozenset[int], choice: Choice
) -> tuple[int, ...] | None:
    """The best set but for the chosen one, if there is another; what is exact without `subsets` is the only one."""
    if subsets is None:
        return None
    free = subsets.mask(sorted(pool))
    missing = len(choice.gpus) - len(must)
    others = {subsets.mask((*must, *more)) for more in combinations(sorted(pool - must), missing)}
    others.remove(subsets.mask(choice.gpus))
    return subsets.gpus(max(others, key=lambda mask: subsets.rank(mask, free))) if others else None


def _difference(topology: Topology, pool: frozenset[int], choice: Choice, other: Choice) -> str:
    """What the first of two sets has over the second, in the order in which it counts."""
    more = choice.score - other.score
    if more:
        return f"a total score of {choice.score}, {more} more than the runner-up's"
    equal = f"both score {choice.score}; " if len(choice.gpus) > 1 else ""
    return equal + finer_difference(topology, pool, choice, other)


def finer_difference(topology: Topology, pool: frozenset[int], choice: Choice, other: Choice) -> str:
    """What the first of two sets of one score has over the second."""
    ours, theirs = (tuple(sorted(pool.difference(one.gpus))) for one in (choice, other))
    for words, worth in _worths(topology):
        left, instead = worth(ours), worth(theirs)
        if left != instead:
            return words.format(left, instead)
    near, far = topology.distance(choice.gpus), topology.distance(other.gpus)
    if near != far:
        return f"on nearer NUMA nodes, with distances of {near} in all instead of {far}"
    squares, more_squares = _unevenness(topology, ours), _unevenness(topology, theirs)
    if squares != more_squares:
        return (
            f"what stays free lies more evenly on NUMA nodes: the squares of their counts add up to {squares} "
            f"instead of {more_squares}"
        )
    lower = "the lower index is" if len(choice.gpus) == 1 else "the lower indices are"
    return f"the two are equal in links, distance and what they leave; {lower} taken"


def _worths(topology: Topology) -> Iterator[tuple[str, Callable[[tuple[int, ...]], int]]]:
    """What a remainder is judged by, the most important first: a phrase with places for two values, and how to get one."""
    for size in pods_to_come(topology):
        yield (
            f"what stays free gives pods of {size} a total score of {{}} instead of {{}}",
            lambda left, size=size: _served(topology, left, size),  # type: ignore[misc]
        )
    yield "the pairs that stay free score {} in all instead of {}", topology.score


def _unevenness(topology: Topology, left: tuple[int, ...]) -> int:
    nodes = [topology.numa[gpu] for gpu in left]
    return sum(nodes.count(node) ** 2 for node in set(nodes))


def _served(topology: Topology, left: tuple[int, ...], size: int) -> int:
    """The total score of the sets that pods of this size get, each time the best one that is left."""
    total = 0
    while len(left) >= size:
        best = max(combinations(left, size), key=topology.score)  # the first of equals: the lowest positions
        total += topology.score(best)
        left = tuple(gpu for gpu in left if gpu not in best)
    return total
