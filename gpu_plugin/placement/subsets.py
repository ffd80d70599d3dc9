"""Every set of up to 16 GPUs, judged beforehand, so that the best one for a pod is looked up rather than searched for.

A set is a mask in which the GPU at position p of n is bit n - 1 - p: of two sets of one size, the greater mask is the one with
the lower positions.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from operator import add

from gpu_plugin.placement.topology import Matrix, Topology

LARGEST = 16
"""The most GPUs whose sets are all judged: 65,536 of them, in 0.9 MiB. No server has more GPUs."""

PODS = (8, 4, 2)
"""What pods to come are taken to ask for, the largest first: the sizes that groups of linked GPUs have."""

_CHUNK = 1024
"""Sets that are looked at between two looks at the clock."""

_ROOM = 3
"""How many times as long it takes to make a set as to look at one that is there."""


@dataclass(frozen=True, slots=True)
class Subsets:
    """By mask: `merit`, how well a set suits a container, and `remainder`, how well it suits those to come if it stays free.

    Greater is better. `best_first` are the masks of each size by falling merit, and those of one merit from the lowest
    positions on. `uniform`: no pair differs from another in anything, so that any set is as good as any other.
    """

    count: int
    merit: Sequence[int]
    remainder: Sequence[int]
    best_first: tuple[Sequence[int], ...]
    uniform: bool

    @classmethod
    def of(cls, topology: Topology) -> "Subsets":
        """Judges all sets of a topology's GPUs: about 1 ms for 8 of them, 0.4 s for 16. Raises ValueError for more."""
        count = len(topology)
        if count > LARGEST:
            raise ValueError(f"{count} GPUs have too many sets to judge them all")
        merit = _totals(merits(topology))
        by_size: list[list[int]] = [[] for _ in range(count + 1)]
        for mask, worth in enumerate(merit):
            by_size[mask.bit_count()].append(worth << count | mask)
        every = (1 << count) - 1
        return cls(
            count,
            array("q", merit),
            array("I", _ranked(_remainders(topology))),
            tuple(array("H", [key & every for key in sorted(keys, reverse=True)]) for keys in by_size),
            _uniform(topology),
        )

    def best(self, available: int, required: int, size: int, expired: Callable[[], bool]) -> int | None:
        """The best set of that size within `available` that holds all of `required`, as a mask; None where time is up.

        The greatest merit, then the best remainder, then the lowest positions. There must be such a set.
        """
        free = available & ~required
        missing = size - required.bit_count()
        merit, remainder, count = self.merit, self.remainder, self.count
        ties: list[int] = []
        top: int | None = None
        if comb(free.bit_count(), missing) * _ROOM <= len(self.best_first[size]):
            bits = [1 << at for at in range(count) if free >> at & 1]
            candidates = [required | sum(chosen) for chosen in combinations(bits, missing)]
            top = max(map(merit.__getitem__, candidates))
            ties = [mask for mask in candidates if merit[mask] == top]
        else:
            order = self.best_first[size]
            looked_at = (1 << count) - 1 & ~available | required
            for start in range(0, len(order), _CHUNK):
                if expired():
                    return None
                fits = [mask for mask in order[start : start + _CHUNK] if mask & looked_at == required]
                if fits:
                    top = merit[fits[0]] if top is None else top
                    ties += fits if merit[fits[-1]] == top else [mask for mask in fits if merit[mask] == top]
                    if merit[fits[-1]] != top:
                        break
        return (
            None
            if expired()
            else max((remainder[available ^ mask] << count) | mask for mask in ties) & (1 << count) - 1
        )

    def mask(self, gpus: Sequence[int]) -> int:
        """The set of these positions."""
        return sum(1 << self.count - 1 - at for at in gpus)

    def gpus(self, mask: int) -> tuple[int, ...]:
        """The positions of a set, ascending."""
        return tuple(at for at in range(self.count) if mask >> self.count - 1 - at & 1)


def merits(topology: Topology) -> Matrix:
    """What a pair adds to the merit of a set: its score and, where all scores are equal, its nearness."""
    most = 1 + sum(map(sum, topology.distances))
    return tuple(
        tuple(score * most - distance for score, distance in zip(*rows, strict=True))
        for rows in zip(topology.scores, topology.distances, strict=True)
    )


def pods_to_come(topology: Topology) -> tuple[int, ...]:
    """The sizes of pods that a remainder is judged by: those that are less than all GPUs."""
    return tuple(size for size in PODS if size < len(topology))


def _totals(matrix: Matrix) -> list[int]:
    """The sum over all pairs of each set, by mask."""
    count = len(matrix)
    totals = [0]
    for high in range(count):
        row = matrix[count - 1 - high]
        gains = [0]
        for low in range(high):
            with_it = row[count - 1 - low]
            gains += [gain + with_it for gain in gains]
        totals += list(map(add, totals, gains))
    return totals


def _remainders(topology: Topology) -> list[int]:
    """By mask, a number that is the greater, the better it is for pods to come that this set stays free.

    What pods of 8 would get out of it, each time taking the best set that is left; then those of 4, then those of 2; then the
    total score of all its pairs; then how evenly it lies on NUMA nodes.
    """
    count = len(topology)
    scores = _totals(topology.scores)
    keys = [0] * len(scores)
    for size in pods_to_come(topology):
        keys = _then(keys, _served(scores, count, size))
    return _then(_then(keys, scores), _evenness(topology))


def _then(keys: list[int], minor: list[int]) -> list[int]:
    """Keys that order by `keys`, and where these are equal by `minor`, which has no negative numbers."""
    base = max(minor) + 1
    return [key * base + less for key, less in zip(keys, minor, strict=True)]


def _served(scores: list[int], count: int, size: int) -> list[int]:
    """By mask, the total score of the sets that pods of this size get out of it: the best one, the best of the rest..."""
    every = (1 << count) - 1
    best = [score << count | mask if mask.bit_count() == size else -1 for mask, score in enumerate(scores)]
    for bit in range(count):  # afterwards best[mask] is the greatest of all subsets of mask
        half = 1 << bit
        for start in range(0, len(best), 2 * half):
            upper = start + half
            best[upper : upper + half] = map(max, best[upper : upper + half], best[start:upper])
    served = [0] * len(best)
    for mask, found in enumerate(best):
        if found >= 0:
            served[mask] = (found >> count) + served[mask ^ found & every]
    return served


def _evenness(topology: Topology) -> list[int]:
    """By mask, how evenly it lies on NUMA nodes: the less the squares of what each has add up to, the more."""
    nodes: dict[int | None, int] = {}
    for at, node in enumerate(topology.numa):
        nodes[node] = nodes.get(node, 0) | 1 << len(topology) - 1 - at
    most = len(topology) ** 2
    return [most - sum((mask & node).bit_count() ** 2 for node in nodes.values()) for mask in range(1 << len(topology))]


def _ranked(keys: list[int]) -> list[int]:
    """The keys by their place among all, which takes less room."""
    ranks = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    return [ranks[key] for key in keys]


def _uniform(topology: Topology) -> bool:
    pairs = {
        (topology.scores[one][other], topology.distances[one][other])
        for one, other in combinations(range(len(topology)), 2)
    }
    return len(pairs) <= 1 and len(set(topology.numa)) in (0, 1, len(topology))
