"""Tables of every set of up to 16 GPUs, computed beforehand, so that the best set for a pod is found without a search.

A set is a mask in which the GPU at position p of n is bit n - 1 - p. So of two sets of the same size, the greater mask has the
lower positions.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from itertools import combinations
from math import comb
from operator import add

import msgspec

from gpu_plugin.placement.topology import Matrix, Topology

LARGEST = 16  # the most GPUs for which all sets are computed: 65,536 sets, in 1 MiB; no server has more GPUs

IMMEDIATE_GPUS = 10
"""Up to this number of GPUs a placement takes 5 ms or less, and is computed on the event loop. For more, use a thread."""

# Sizes of later pods that placement assumes, the largest first: the sizes that groups of linked GPUs have.
PODS = (8, 4, 2)
_CHUNK = 1024  # sets that are compared between two reads of the clock
_ROOM = 3  # making a set takes this many times as long as reading it from a table


class Criterion(Enum):
    """The properties by which sets are compared, in this order.

    The weight of the set (total score, then total NUMA distance), the value of the remaining GPUs for later pods, how evenly
    the remaining GPUs are spread over NUMA nodes, and the positions.
    """

    WEIGHT = auto()
    REMAINDER = auto()
    EVENNESS = auto()
    POSITIONS = auto()


class Subsets(msgspec.Struct, frozen=True):
    """Tables with an entry for every set, by mask. In each table the greater value is the better."""

    bits: tuple[int, ...]  # the bits of the positions
    weight: "array[int]"  # the total of `Topology.weights` over the pairs of the set
    remainder: "array[int]"  # of GPUs that stay free: rank of the set by its value for later pods
    evenness: "array[int]"  # of GPUs that stay free: rank of the set by its even spread over NUMA nodes
    best_first: (
        "tuple[array[int], ...]"  # masks of each size by falling weight, equal ones from the lowest positions on
    )
    uniform: bool  # no pair differs from another, so that all sets of a size are equally good

    @classmethod
    def of(cls, topology: Topology) -> "Subsets":
        """Compute the tables of a topology: about 1 ms for 8 GPUs, 0.4 s for 16. Raises ValueError for more than 16."""
        count = len(topology)
        if count > LARGEST:
            raise ValueError(f"{count} GPUs have too many sets to judge them all")
        weight = _totals(topology.weights)
        return cls(
            tuple(1 << count - 1 - at for at in range(count)),
            weight,
            array("I", _remainders(count, weight)),
            array("H", _evenness(topology)),
            tuple(_best_first(weight, count, size) for size in range(count + 1)),
            _uniform(topology),
        )

    def best(self, available: int, required: int, size: int, expired: Callable[[], bool]) -> int | None:
        """Return the mask of the best set of this size within `available` with all of `required`; None if time is up."""
        ties = self._greatest_weight(available, required, size, expired)
        if ties is None or expired():
            return None
        for worth in (self.remainder, self.evenness):
            if len(ties) > 1:
                ties = _greatest(ties, [worth[available ^ mask] for mask in ties])
        return max(ties)

    def runner_up(self, available: int, required: int, best: int) -> tuple[int, Criterion]:
        """Return the second best of all sets that `best` was chosen from, and the first criterion by which it is worse."""

        def rank(mask: int) -> tuple[int, ...]:
            left = available ^ mask
            return self.weight[mask], self.remainder[left], self.evenness[left], mask

        relevant = sum(self.bits) & ~available | required
        sets = (mask for mask in self.best_first[best.bit_count()] if mask & relevant == required)
        second = max((mask for mask in sets if mask != best), key=rank)
        compared = zip(Criterion, rank(best), rank(second), strict=True)
        return second, next(criterion for criterion, one, other in compared if one != other)

    def _greatest_weight(
        self, available: int, required: int, size: int, expired: Callable[[], bool]
    ) -> list[int] | None:
        """Return all sets of the greatest weight; None if time is up."""
        free = available & ~required
        missing = size - required.bit_count()
        weight, order = self.weight, self.best_first[size]
        if comb(free.bit_count(), missing) * _ROOM <= len(order):
            bits = [bit for bit in self.bits if free & bit]
            candidates = [required | sum(chosen) for chosen in combinations(bits, missing)]
            return _greatest(candidates, [weight[mask] for mask in candidates])
        ties: list[int] = []
        relevant = sum(self.bits) & ~available | required
        for start in range(0, len(order), _CHUNK):
            if expired():
                return None
            ties += [mask for mask in order[start : start + _CHUNK] if mask & relevant == required]
            if ties and weight[ties[-1]] != weight[ties[0]]:
                top = weight[ties[0]]
                return [mask for mask in ties if weight[mask] == top]
        return ties

    def mask(self, gpus: Iterable[int]) -> int:
        """Return the mask of these positions, which must be distinct."""
        return sum(map(self.bits.__getitem__, gpus))

    def gpus(self, mask: int) -> tuple[int, ...]:
        """Return the positions of a set, ascending."""
        return tuple([at for at, bit in enumerate(self.bits) if mask & bit])


class Placement(msgspec.Struct, frozen=True):
    """The links between GPUs and, for up to 16 GPUs, the tables of all their sets.

    Without the tables (`ready` is False for up to 16 GPUs) a choice is not exact.
    """

    topology: Topology = msgspec.field(default_factory=Topology)
    subsets: Subsets | None = None

    @classmethod
    def of(cls, topology: Topology) -> "Placement":
        """Return the placement of a topology with its tables, in about 1 ms for 8 GPUs and 0.4 s for 16."""
        return cls(topology, Subsets.of(topology) if 0 < len(topology) <= LARGEST else None)

    @property
    def ready(self) -> bool:
        """True if the tables are computed, or there are too many GPUs or no GPU."""
        return self.subsets is not None or not 0 < len(self.topology) <= LARGEST


def remainder_worths(count: int, weight: "array[int]") -> "Iterator[tuple[int, array[int]]]":
    """Yield the values of all sets of `count` GPUs for later pods if they stay free, the most important value first.

    Each item has a pod size and, by mask, the total weight of the sets that pods of this size get out of the set, if each pod
    gets the best remaining set. The last size is 0: the weight of the whole set. Each takes 0.1 s for 16 GPUs.
    """
    for size in PODS:
        if size < count:
            yield size, _served(weight, count, size)
    yield 0, weight


def _greatest(masks: list[int], worth: list[int]) -> list[int]:
    """Return the masks with the greatest worth."""
    top = max(worth)
    return [mask for mask, each in zip(masks, worth, strict=True) if each == top]


# Intermediate results are arrays, too: with lists, the process would keep the memory of 65,536 integer objects


def _totals(matrix: Matrix) -> "array[int]":
    """Return the sum over all pairs of each set, by mask."""
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


def _best_first(weight: "array[int]", count: int, size: int) -> "array[int]":
    """Return the masks of one size by falling weight, and masks of equal weight from the lowest positions on."""
    keys = sorted([each << count | mask for mask, each in enumerate(weight) if mask.bit_count() == size], reverse=True)
    every = (1 << count) - 1
    return array("H", [key & every for key in keys])


def _remainders(count: int, weight: "array[int]") -> "array[int]":
    """Return the rank of each set by its value for later pods if it stays free, by mask. The greatest rank is the best."""
    ranks = array("q", bytes(8 * len(weight)))
    for _, worth in remainder_worths(count, weight):
        ranks = _then(ranks, worth)
    return ranks


def _then(ranks: "array[int]", minor: "array[int]") -> "array[int]":
    """Return new ranks in the order of `ranks`, and for equal ranks of `minor`, which has no negative numbers."""
    base = max(minor) + 1
    keys = array("q", [rank * base + less for rank, less in zip(ranks, minor, strict=True)])
    place = {key: rank for rank, key in enumerate(sorted(set(keys)))}
    return array("q", [place[key] for key in keys])


def _served(weight: "array[int]", count: int, size: int) -> "array[int]":
    """Return by mask the total weight of the sets that pods of this size get out of it, one after the other.

    Each pod gets the best set of the GPUs that are left, and of equal sets the set with the lowest positions. Another order
    of equal sets may leave more for the pods after it.
    """
    every = (1 << count) - 1
    best = array("q", [each << count | mask if mask.bit_count() == size else -1 for mask, each in enumerate(weight)])
    for bit in range(count):  # after the loop, best[mask] is the greatest of all subsets of mask
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
    """Return by mask the evenness over NUMA nodes: it is greater if the squares of the GPU counts of nodes have a smaller sum."""
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
