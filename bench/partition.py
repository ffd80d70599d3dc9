"""The rule of NVIDIA's plugin for whole GPUs, as a reference for comparing choices.

go-gpuallocator (gpuallocator/besteffort_policy.go) checks all partitions of the free GPUs into sets of the requested size, up to
22 million. It keeps the first partition with the greatest total score, and returns the first set of it with the greatest score.
Here, a table of the best totals finds the same set. Two faults of go-gpuallocator are left out: its set may include padding
instead of GPUs, and a slice that partitions share may overwrite the best partition.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from gpu_plugin.devices.node import Node
from gpu_plugin.placement.topology import FARTHEST, NVLINK, PCIE

Matrix = Sequence[Sequence[int]]


def known_scores(node: Node) -> list[list[int]]:
    """Return the rule's score of every pair by NVML index: PCIe and direct NVLinks. It does not count NVLinks to an NVSwitch."""
    uuids = [gpu.uuid for gpu in sorted(node.gpus, key=lambda gpu: gpu.index)]
    return [[_known_score(node, one, other) for other in uuids] for one in uuids]


def _known_score(node: Node, one: str, other: str) -> int:
    if one == other:
        return 0
    link = node.link(one, other)
    return PCIE.get(link.ancestor, FARTHEST) + (0 if link.switched else NVLINK * link.nvlinks)


class BestPartition:
    """Chooses among the GPUs of a symmetric matrix of pair scores. Stores the best totals that it found."""

    def __init__(self, scores: Matrix) -> None:
        self._scores = scores
        self._set_scores: dict[int, int] = {}
        self._totals: dict[tuple[int, int], int] = {}

    def choose(self, available: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the best set in the best partition of the available GPUs; of equals, the first in their order.

        There must be at least `size` available GPUs.
        """
        if size == 1:
            return (available[0],)
        sets, left = [], list(available)
        while left:
            sets.append(self._first_set(left, size))
            left = [gpu for gpu in left if gpu not in sets[-1]]
        return max((one for one in sets if len(one) == size), key=lambda one: self._score(_mask(one)))

    def _first_set(self, left: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the first set of the first partition with the greatest total."""
        whole = _mask(left)
        most = self._total(whole, size)
        for chosen in first_sets(left, size):
            mask = _mask(chosen)
            if self._score(mask) + self._total(whole & ~mask, size) == most:
                return chosen
        raise AssertionError("no partition has the greatest total")

    def _total(self, left: int, size: int) -> int:
        """Return the greatest total of a partition of these GPUs, which are a bit mask."""
        known = self._totals.get((left, size), 0 if not left else None)
        if known is None:
            first, *others = [1 << at for at in range(left.bit_length()) if left >> at & 1]
            filled = left.bit_count() % size  # the number of GPUs in the set with padding
            masks = [
                first + sum(chosen)
                for count in ({filled, size} - {0} if left.bit_count() > size else {left.bit_count()})
                for chosen in combinations(others, count - 1)
            ]
            known = max(self._score(mask) + self._total(left ^ mask, size) for mask in masks)
            self._totals[left, size] = known
        return known

    def _score(self, mask: int) -> int:
        known = self._set_scores.get(mask)
        if known is None:
            gpus = [at for at in range(mask.bit_length()) if mask >> at & 1]
            known = self._set_scores[mask] = sum(self._scores[one][other] for one, other in combinations(gpus, 2))
        return known


def first_sets(left: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Yield every possible first set of a partition of these GPUs, in the order of the rule.

    Padding extends the GPUs to a multiple of `size`. A first set has the first GPU, and either the whole padding or no padding.
    """
    filling = -len(left) % size
    filled: list[int | None] = [*left, *[None] * filling]
    if len(filled) == size:
        yield tuple(left)
        return
    for others in combinations(filled[1:], size - 1):
        chosen = tuple(gpu for gpu in (left[0], *others) if gpu is not None)
        if len(chosen) in (size, size - filling):
            yield chosen


def _mask(gpus: Sequence[int]) -> int:
    return sum(1 << gpu for gpu in gpus)
