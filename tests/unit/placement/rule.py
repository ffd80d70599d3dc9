"""The rule for whole GPUs as the documents state it, applied to every set that exists."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from typing import Any

from gpu_plugin.placement.topology import Topology

Gpus = tuple[int, ...]
Criterion = Callable[[Gpus], tuple[Any, ...]]
"""Returns numbers for a set of GPUs, of which the greatest are the best."""


class Rule:
    """Compares sets of the GPUs of one topology."""

    def __init__(self, found: Topology) -> None:
        self._found = found
        self.linked = cache(self._linked)
        self._served = cache(self._serve)

    def best(self, pool: set[int], must: set[int], size: int) -> Gpus:
        """The best set of `size` GPUs out of `pool` that holds all of `must`."""
        sets = [chosen for chosen in combinations(sorted(pool), size) if must <= set(chosen)]
        for criterion in self._criteria(pool):
            if len(sets) > 1:
                values = [criterion(chosen) for chosen in sets]
                sets = [chosen for chosen, value in zip(sets, values, strict=True) if value == max(values)]
        [chosen] = sets
        return chosen

    def rank(self, pool: set[int], chosen: Gpus) -> tuple[Any, ...]:
        """All numbers that count for a set, the most important first."""
        return tuple(number for criterion in self._criteria(pool) for number in criterion(chosen))

    def _criteria(self, pool: set[int]) -> Iterator[Criterion]:
        def left(chosen: Gpus) -> Gpus:
            return tuple(sorted(pool.difference(chosen)))

        yield self.linked
        for size in (8, 4, 2):
            if size < len(self._found):
                yield lambda chosen, size=size: self._served(left(chosen), size)  # type: ignore[misc]
        yield lambda chosen: self.linked(left(chosen))
        yield lambda chosen: self._even(left(chosen))
        yield lambda chosen: (tuple(-gpu for gpu in chosen),)

    def _linked(self, gpus: Gpus) -> tuple[int, int]:
        """The total score of all pairs, then how near they are."""
        if not gpus:
            return 0, 0
        *others, last = gpus
        score, nearness = self.linked(tuple(others))
        scores, distances = self._found.scores[last], self._found.distances[last]
        return score + sum(scores[gpu] for gpu in others), nearness - sum(distances[gpu] for gpu in others)

    def _serve(self, left: Gpus, size: int) -> tuple[int, int]:
        """The totals of pods of this size: each gets the best remaining set, of equal sets the lowest positions."""
        if len(left) < size:
            return 0, 0
        best = max(combinations(left, size), key=self.linked)
        score, nearness = self.linked(best)
        others = self._served(tuple(gpu for gpu in left if gpu not in best), size)
        return score + others[0], nearness + others[1]

    def _even(self, left: Gpus) -> tuple[int]:
        nodes = [self._found.numa[gpu] for gpu in left]
        return (-sum(nodes.count(node) ** 2 for node in set(nodes)),)
