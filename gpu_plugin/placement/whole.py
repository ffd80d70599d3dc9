"""Which whole GPUs suit a container best: exactly on nodes of up to 16 GPUs, by a bounded search beyond."""

from collections.abc import Callable, Collection, Sequence
from math import comb
from operator import itemgetter

import msgspec

from gpu_plugin.placement.prepared import Placement
from gpu_plugin.placement.subsets import LARGEST
from gpu_plugin.placement.topology import Matrix, Topology

SEEDS = 32
"""From how many GPUs the bounded search sets out, each in turn."""

SWAPS = 32
"""How often it changes one chosen GPU for a better one at most."""


class Choice(msgspec.Struct, frozen=True):
    """GPUs by position, ascending; none where there is no such set. `score` is the total of their pairs.

    `exact` is False where a bounded search found them, which may miss the best. `why` says how they were found.
    """

    gpus: tuple[int, ...]
    score: int
    exact: bool
    why: str


class Budget(msgspec.Struct, frozen=True):
    """The time that an exact choice may take, in seconds of `clock`."""

    clock: Callable[[], float]
    seconds: float

    def deadline(self) -> Callable[[], bool]:
        """Whether the time that began now is up."""
        clock, end = self.clock, self.clock() + self.seconds
        return lambda: clock() > end


def choose(
    placement: Placement,
    available: Collection[int],
    required: Collection[int],
    size: int,
    budget: Budget | None = None,
) -> Choice:
    """The set of `size` of the available positions, all required ones among them, that suits a container best.

    On nodes of up to 16 GPUs, of all such sets: the one with the greatest total score; of those, whose removal leaves the best
    remainder; of those, with the least total NUMA distance; of those, which leaves NUMA nodes most even; of those, the one
    with the lowest positions (`subsets.Subsets`). On larger nodes, and where `budget` is used up, what a bounded search finds:
    `Choice.exact` is False.
    """
    pool, must = frozenset(available), frozenset(required)
    fault = impossible(pool, must, size)
    if fault:
        return Choice((), 0, exact=True, why=fault)
    gpus, exact, why = _chosen(placement, pool, must, size, budget)
    return Choice(gpus, placement.topology.score(gpus), exact, why)


def impossible(pool: Collection[object], must: Collection[object], size: int) -> str:
    """Why there is no set of `size` out of `pool` that holds `must`; empty where there is one. Both without doubles."""
    if size < 1:
        return f"the size is {size}: at least one GPU must be asked for"
    if size > len(pool):
        return f"{size} are asked for and {len(pool)} are available"
    if len(must) > size:
        return f"{len(must)} must be included and {size} are asked for"
    if any(one not in pool for one in must):
        return "one that must be included is not available"
    return ""


def _chosen(
    placement: Placement, pool: frozenset[int], must: frozenset[int], size: int, budget: Budget | None
) -> tuple[tuple[int, ...], bool, str]:
    """The GPUs, whether they are the best there are, and how they were found."""
    subsets = placement.subsets
    if size == len(pool):
        return tuple(sorted(pool)), True, "there is no other"
    if size == len(must):
        return tuple(sorted(must)), True, "there is no other"
    if subsets is None:
        count = len(placement.topology)
        few = "the sets of this node's GPUs are not judged yet"
        why = few if count <= LARGEST else f"{count} GPUs are more than {LARGEST}"
        return _searched(placement, pool, must, size), False, f"a bounded search, since {why}"
    if subsets.uniform:
        rest = sorted(pool - must)[: size - len(must)]
        return tuple(sorted((*must, *rest))), True, "all pairs of GPUs are equal, so the first ones are taken"
    expired = budget.deadline() if budget else _never
    best = subsets.best(subsets.mask(sorted(pool)), subsets.mask(sorted(must)), size, expired)
    if best is None:
        return (
            _searched(placement, pool, must, size),
            False,
            "a bounded search, since looking at every set took too long",
        )
    return subsets.gpus(best), True, f"the best of {comb(len(pool) - len(must), size - len(must))} sets"


def _searched(placement: Placement, pool: frozenset[int], must: frozenset[int], size: int) -> tuple[int, ...]:
    return tuple(sorted(search(pair_weights(placement.topology), sorted(must), sorted(pool - must), size - len(must))))


def pair_weights(topology: Topology) -> Matrix:
    """What a pair is worth to `search`: its score and, where scores are equal, its nearness."""
    most = 1 + sum(map(sum, topology.distances))
    return tuple(
        tuple(score * most - distance for score, distance in zip(*rows, strict=True))
        for rows in zip(topology.scores, topology.distances, strict=True)
    )


def search(weights: Sequence[Sequence[int]], required: Sequence[int], free: Sequence[int], missing: int) -> list[int]:
    """The required rows of a symmetric matrix and `missing` of the free ones, with a great total weight of their pairs.

    Grown one by one from the required ones and each of `SEEDS` free ones in turn, and the best outcome then bettered by up to
    `SWAPS` exchanges. Takes O(SEEDS x n^2) for n rows; of equals always the first.
    """
    best: list[int] = []
    most: int | None = None
    seeds = free[:: max(1, -(-len(free) // SEEDS))]
    for seed in (None, *seeds) if required else seeds:
        chosen, total = _grown(weights, required, free, missing, seed)
        if most is None or total > most:
            best, most = chosen, total
    return _bettered(weights, best, len(required), free)


def _grown(
    weights: Sequence[Sequence[int]], required: Sequence[int], free: Sequence[int], missing: int, seed: int | None
) -> tuple[list[int], int]:
    """The required ones and `missing` more, `seed` the first of them, each the one that adds most; and what they add."""
    chosen = [*required]
    gain = {one: sum(weights[one][other] for other in required) for one in free}
    total = 0
    for pick in [seed] * missing:
        following = max(gain, key=gain.__getitem__) if pick is None or pick not in gain else pick
        total += gain.pop(following)
        chosen.append(following)
        row = weights[following]
        for one in gain:
            gain[one] += row[one]
    return chosen, total


def _bettered(weights: Sequence[Sequence[int]], chosen: list[int], fixed: int, free: Sequence[int]) -> list[int]:
    """The same after the exchanges that gain most, the first `fixed` ones kept."""
    chosen = [*chosen]
    for _ in range(SWAPS):
        left = sorted(set(free).difference(chosen))
        pull = {one: sum(weights[one][other] for other in chosen) for one in (*chosen, *left)}
        swaps = (
            (pull[one] - weights[one][chosen[at]] - pull[chosen[at]], at, one)
            for at in range(fixed, len(chosen))
            for one in left
        )
        gain, at, one = max(swaps, key=itemgetter(0), default=(0, 0, 0))  # the first of equals
        if gain <= 0:
            break
        chosen[at] = one
    return chosen


def _never() -> bool:
    return False
