"""The rule for whole GPUs as the documents tell it, applied to every set there is."""

from itertools import combinations
from typing import Any

from gpu_plugin.placement.topology import Topology


def served(found: Topology, left: tuple[int, ...], size: int) -> int:
    """What pods of this size get: each the best set that is left, of equals the one with the lowest positions."""
    total = 0
    while len(left) >= size:
        best = max(combinations(left, size), key=found.score)
        total += found.score(best)
        left = tuple(gpu for gpu in left if gpu not in best)
    return total


def rank(found: Topology, pool: set[int], chosen: tuple[int, ...]) -> tuple[Any, ...]:
    """The rule as the documents tell it; the greatest is the best."""
    left = tuple(sorted(pool.difference(chosen)))
    nodes = [found.numa[gpu] for gpu in left]
    return (
        found.score(chosen),
        *(served(found, left, size) for size in (8, 4, 2) if size < len(found)),
        found.score(left),
        -found.distance(chosen),
        -sum(nodes.count(node) ** 2 for node in set(nodes)),
        tuple(-gpu for gpu in chosen),
    )


def best(found: Topology, pool: set[int], must: set[int], size: int) -> tuple[int, ...]:
    sets = (chosen for chosen in combinations(sorted(pool), size) if must <= set(chosen))
    return max(sets, key=lambda chosen: rank(found, pool, chosen))
