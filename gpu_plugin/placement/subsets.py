"""Every set of up to 16 GPUs, judged beforehand, so that the best one for a pod is looked up rather than searched for.

A set is a mask in which the GPU at position p of n is bit n - 1 - p: of two sets of one size, the greater mask is the one with
the lower positions.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from itertools import combinations
from math import comb
from operator import add

import msgspec

from gpu_plugin.placement.topology import Matrix, Topology

LARGEST = 16
"""The most GPUs whose sets are all judged: 65,536 of them, in 1 MiB. No server has more GPUs."""

IMMEDIATE_GPUS = 10
"""Up to this many GPUs a placement is made in 5 ms or less: at once, where it is needed. More are worth a thread."""

PODS = (8, 4, 2)
"""What pods to come are taken to ask for, the largest first: the sizes that groups of linked GPUs have."""

_CHUNK = 1024
"""Sets that are looked at between two looks at the clock."""

_ROOM = 3
"""How many times as long it takes to make a set as to look at one that is there."""


class Criterion(Enum):
    """What tells sets apart, in the order in which it counts.

    The total score of its pairs, how good what stays free is for pods to come, the total NUMA distance, how evenly what stays
    free lies on NUMA nodes, and how low its positions are.
    """

    SCORE = auto()
    REMAINDER = auto()
    DISTANCE = auto()
    EVENNESS = auto()
    POSITIONS = auto()


class Subsets(msgspec.Struct, frozen=True):
    """What is known of every set, by mask.

    `bits` are the bits of the positions; `score` is the total over a set's pairs; `nearness` is the greater, the less their
    total NUMA distance is, `remainder` the better pods to come are served if the set stays free, `evenness` the more evenly it
    lies on NUMA nodes. `best_first` are the masks of each size by falling score, and those of one score from the lowest
    positions on. `uniform`: no pair differs from another in anything, so that any set is as good as any other.
    """

    bits: tuple[int, ...]
    score: "array[int]"
    nearness: "array[int]"
    remainder: "array[int]"
    evenness: "array[int]"
    best_first: "tuple[array[int], ...]"
    uniform: bool

    @classmethod
    def of(cls, topology: Topology) -> "Subsets":
        """Judges all sets of a topology's GPUs: about 1 ms for 8 of them, 0.4 s for 16. Raises ValueError for more."""
        count = len(topology)
        if count > LARGEST:
            raise ValueError(f"{count} GPUs have too many sets to judge them all")
        score = _totals(topology.scores)
        distance = _totals(topology.distances)
        return cls(
            tuple(1 << count - 1 - at for at in range(count)),
            array("I", score),
            array("I", [distance[-1] - each for each in distance]),
            array("I", _remainders(topology, score)),
            array("H", _evenness(topology)),
            tuple(_best_first(score, count, size) for size in range(count + 1)),
            _uniform(topology),
        )

    def best(self, available: int, required: int, size: int, expired: Callable[[], bool]) -> int | None:
        """The best set of that size within `available` that holds all of `required`, as a mask; None where time is up."""
        ties = self._best_scored(available, required, size, expired)
        if ties is None or expired():
            return None
        for worth, left_by in ((self.remainder, available), (self.nearness, 0), (self.evenness, available)):
            if len(ties) > 1:
                ties = _greatest(ties, [worth[left_by ^ mask] for mask in ties])
        return max(ties)

    def runner_up(self, available: int, required: int, best: int) -> tuple[int, Criterion]:
        """The best of all sets that `best` was chosen from but for that one, and the first criterion by which it is worse."""

        def rank(mask: int) -> tuple[int, ...]:
            left = available ^ mask
            return self.score[mask], self.remainder[left], self.nearness[mask], self.evenness[left], mask

        looked_at = sum(self.bits) & ~available | required
        sets = (mask for mask in self.best_first[best.bit_count()] if mask & looked_at == required)
        second = max((mask for mask in sets if mask != best), key=rank)
        compared = zip(Criterion, rank(best), rank(second), strict=True)
        return second, next(criterion for criterion, one, other in compared if one != other)

    def _best_scored(self, available: int, required: int, size: int, expired: Callable[[], bool]) -> list[int] | None:
        """All sets of the greatest score there is; None where time is up."""
        free = available & ~required
        missing = size - required.bit_count()
        score, order = self.score, self.best_first[size]
        if comb(free.bit_count(), missing) * _ROOM <= len(order):
            bits = [bit for bit in self.bits if free & bit]
            candidates = [required | sum(chosen) for chosen in combinations(bits, missing)]
            return _greatest(candidates, [score[mask] for mask in candidates])
        ties: list[int] = []
        looked_at = sum(self.bits) & ~available | required
        for start in range(0, len(order), _CHUNK):
            if expired():
                return None
            ties += [mask for mask in order[start : start + _CHUNK] if mask & looked_at == required]
            if ties and score[ties[-1]] != score[ties[0]]:
                top = score[ties[0]]
                return [mask for mask in ties if score[mask] == top]
        return ties

    def mask(self, gpus: Iterable[int]) -> int:
        """The set of these positions, each there once."""
        return sum(map(self.bits.__getitem__, gpus))

    def gpus(self, mask: int) -> tuple[int, ...]:
        """The positions of a set, ascending."""
        return tuple([at for at, bit in enumerate(self.bits) if mask & bit])


class Placement(msgspec.Struct, frozen=True):
    """What a choice is made with: how GPUs are linked and, for up to 16 of them, all their sets, judged.

    Without these (`ready` is False) a choice is not exact.
    """

    topology: Topology = msgspec.field(default_factory=Topology)
    subsets: Subsets | None = None

    @classmethod
    def of(cls, topology: Topology) -> "Placement":
        """The placement of a topology, ready, in about 1 ms for 8 GPUs and 0.4 s for 16."""
        return cls(topology, Subsets.of(topology) if 0 < len(topology) <= LARGEST else None)

    @property
    def ready(self) -> bool:
        """Whether all that can be judged beforehand is."""
        return self.subsets is not None or not 0 < len(self.topology) <= LARGEST


def remainder_worths(topology: Topology, scores: "array[int]") -> "Iterator[tuple[int, array[int]]]":
    """What it is worth that a set stays free, by mask, the most important first: to pods of some size, and in all (size 0).

    It is the total score of the sets that such pods get out of it, each the best that is left; and that of all its pairs, which
    are `scores`. Each takes 0.1 s for 16 GPUs.
    """
    for size in PODS:
        if size < len(topology):
            yield size, _served(scores, len(topology), size)
    yield 0, scores


def _greatest(masks: list[int], worth: list[int]) -> list[int]:
    """Those masks that are worth most."""
    top = max(worth)
    return [mask for mask, each in zip(masks, worth, strict=True) if each == top]


# What is made on the way to the tables is made in arrays too: 65,536 numbers as objects would leave their room behind.


def _totals(matrix: Matrix) -> "array[int]":
    """The sum over all pairs of each set, by mask."""
    count = len(matrix)
    totals = array("q", [0])
    for high in range(count):
        row = matrix[count - 1 - high]
        gains = array("q", [0])
        for low in range(high):
            with_it = row[count - 1 - low]
            gains.extend([gain + with_it for gain in gains])
        totals.extend(list(map(add, totals, gains)))
    return totals


def _best_first(scores: "array[int]", count: int, size: int) -> "array[int]":
    """The masks of one size, by falling score, and those of one score from the lowest positions on."""
    keys = sorted(
        [score << count | mask for mask, score in enumerate(scores) if mask.bit_count() == size], reverse=True
    )
    every = (1 << count) - 1
    return array("H", [key & every for key in keys])


def _remainders(topology: Topology, scores: "array[int]") -> "array[int]":
    """By mask, a number that is the greater, the better it is for pods to come that this set stays free."""
    ranks = array("q", bytes(8 * len(scores)))
    for _, worth in remainder_worths(topology, scores):
        ranks = _then(ranks, worth)
    return ranks


def _then(ranks: "array[int]", minor: "array[int]") -> "array[int]":
    """Ranks in the order of `ranks`, and where these are equal of `minor`, which has no negative numbers."""
    base = max(minor) + 1
    keys = array("q", [rank * base + less for rank, less in zip(ranks, minor, strict=True)])
    place = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    return array("q", [place[key] for key in keys])


def _served(scores: "array[int]", count: int, size: int) -> "array[int]":
    """By mask, the total score of the sets that pods of this size get out of it: the best one, the best of the rest..."""
    every = (1 << count) - 1
    best = array("q", [score << count | mask if mask.bit_count() == size else -1 for mask, score in enumerate(scores)])
    for bit in range(count):  # afterwards best[mask] is the greatest of all subsets of mask
        half = 1 << bit
        for start in range(0, len(best), 2 * half):
            upper = start + half
            best[upper : upper + half] = array("q", map(max, best[upper : upper + half], best[start:upper]))
    served = array("q", bytes(8 * len(best)))
    for mask, found in enumerate(best):
        if found >= 0:
            served[mask] = (found >> count) + served[mask ^ found & every]
    return served


def _evenness(topology: Topology) -> "array[int]":
    """By mask, how evenly it lies on NUMA nodes: the less the squares of what each has add up to, the more."""
    count = len(topology)
    nodes: dict[int | None, int] = {}
    for at, node in enumerate(topology.numa):
        nodes[node] = nodes.get(node, 0) | 1 << count - 1 - at
    by_node = list(nodes.values())
    return array(
        "H", [count**2 - sum([(mask & node).bit_count() ** 2 for node in by_node]) for mask in range(1 << count)]
    )


def _uniform(topology: Topology) -> bool:
    pairs = {
        (topology.scores[one][other], topology.distances[one][other])
        for one, other in combinations(range(len(topology)), 2)
    }
    return len(pairs) <= 1 and len(set(topology.numa)) in (0, 1, len(topology))
