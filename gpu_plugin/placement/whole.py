"""Choose the best whole GPUs for a container: exactly on nodes of up to 16 GPUs, by a bounded search on larger nodes."""

from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum, auto
from operator import itemgetter

import msgspec

from gpu_plugin.placement.subsets import LARGEST, Criterion, Placement

SEEDS = 32  # the number of GPUs from which the bounded search starts, each in turn
SWAPS = 32  # the most times that the bounded search replaces a chosen GPU by a better one


class How(Enum):
    """The way in which devices were found: without a choice, as the first or the best of all sets, or by a bounded search."""

    IMPOSSIBLE = auto()
    ALL_AVAILABLE = auto()
    ALL_REQUIRED = auto()
    FIRST_OF_EQUALS = auto()
    BEST = auto()
    NOT_JUDGED_YET = auto()
    TOO_MANY_GPUS = auto()
    TOO_LATE = auto()


SEARCHED = frozenset({How.NOT_JUDGED_YET, How.TOO_MANY_GPUS, How.TOO_LATE})
"""Results of a bounded search, which may miss the best set."""


class Choice(msgspec.Struct, frozen=True):
    """Positions of GPUs, ascending, empty if there is no possible set; and the way in which they were found."""

    gpus: tuple[int, ...]
    how: How

    @property
    def exact(self) -> bool:
        """True if there is surely no better set."""
        return self.how not in SEARCHED


class Trace(msgspec.Struct):
    """A record of a choice, which `choose` fills, for explanations. The first three fields are its arguments."""

    placement: Placement = msgspec.field(default_factory=Placement)
    available: frozenset[int] = frozenset()
    required: frozenset[int] = frozenset()
    choice: Choice = Choice((), How.IMPOSSIBLE)
    runner_up: tuple[int, ...] | None = None  # the second best set; None without another, and after a bounded search
    criterion: Criterion = Criterion.POSITIONS  # the first criterion by which the runner-up is worse


class Budget(msgspec.Struct, frozen=True):
    """The time that an exact choice may take, in seconds of `clock`."""

    clock: Callable[[], float]
    seconds: float

    def deadline(self) -> Callable[[], bool]:
        """Return a function that returns True once the time, which starts now, is up."""
        clock, end = self.clock, self.clock() + self.seconds
        return lambda: clock() > end


def choose(
    placement: Placement,
    available: Collection[int],
    required: Collection[int],
    size: int,
    budget: Budget | None = None,
    trace: Trace | None = None,
) -> Choice:
    """Return the best set of `size` available positions, including all required positions, for a container.

    On nodes of up to 16 GPUs it is the best of all such sets by each `subsets.Criterion` in turn. On larger nodes, or if
    `budget` is used up, it is the result of a bounded search, and `Choice.exact` is False. With a `trace`, every set is read
    once more.
    """
    pool, must = frozenset(available), frozenset(required)
    choice = _chosen(placement, pool, must, size, budget)
    if trace is not None:
        trace.placement, trace.available, trace.required, trace.choice = placement, pool, must, choice
        subsets = placement.subsets
        if subsets is not None and choice.how in {How.BEST, How.FIRST_OF_EQUALS}:
            second, trace.criterion = subsets.runner_up(*map(subsets.mask, (pool, must, choice.gpus)))
            trace.runner_up = subsets.gpus(second)
    return choice


def possible(pool: AbstractSet[object], must: AbstractSet[object], size: int) -> bool:
    """Return True if there is a set of `size` out of `pool` that contains `must`."""
    return size >= 1 and len(must) <= size <= len(pool) and must <= pool


def _chosen(
    placement: Placement, pool: frozenset[int], must: frozenset[int], size: int, budget: Budget | None
) -> Choice:
    if not possible(pool, must, size):
        return Choice((), How.IMPOSSIBLE)
    if size == len(pool):
        return Choice(tuple(sorted(pool)), How.ALL_AVAILABLE)
    if size == len(must):
        return Choice(tuple(sorted(must)), How.ALL_REQUIRED)
    subsets = placement.subsets
    if subsets is None:
        how = How.NOT_JUDGED_YET if len(placement.topology) <= LARGEST else How.TOO_MANY_GPUS
        return Choice(_searched(placement, pool, must, size), how)
    if subsets.uniform:
        rest = sorted(pool - must)[: size - len(must)]
        return Choice(tuple(sorted((*must, *rest))), How.FIRST_OF_EQUALS)
    expired = budget.deadline() if budget else lambda: False
    best = subsets.best(subsets.mask(pool), subsets.mask(must), size, expired)
    if best is None:
        return Choice(_searched(placement, pool, must, size), How.TOO_LATE)
    return Choice(subsets.gpus(best), How.BEST)


def _searched(placement: Placement, pool: frozenset[int], must: frozenset[int], size: int) -> tuple[int, ...]:
    return tuple(sorted(search(placement.topology.weights, sorted(must), sorted(pool - must), size - len(must))))


def search(weights: Sequence[Sequence[int]], required: Sequence[int], free: Sequence[int], missing: int) -> list[int]:
    """Return the required rows of a symmetric matrix and `missing` free rows, with a great total weight of their pairs.

    The set grows row by row from the required rows and each of `SEEDS` free rows in turn, and the best result is improved by
    up to `SWAPS` exchanges. Takes O(SEEDS x n^2) for n rows. Of equal rows the first is taken.
    """
    best: list[int] = []
    most: int | None = None
    seeds = free[:: max(1, -(-len(free) // SEEDS))]
    for seed in (None, *seeds) if required else seeds:
        chosen, total = _grown(weights, required, free, missing, seed)
        if most is None or total > most:
            best, most = chosen, total
    return _improved(weights, best, len(required), free)


def _grown(
    weights: Sequence[Sequence[int]], required: Sequence[int], free: Sequence[int], missing: int, seed: int | None
) -> tuple[list[int], int]:
    """Return the required rows and `missing` further rows, and the weight that these add.

    The first further row is `seed`, if given. Each other further row is the row that adds most.
    """
    chosen = [*required]
    gain = {row: sum(weights[row][other] for other in required) for row in free}
    total = 0
    for pick in [seed] * missing:
        following = max(gain, key=gain.__getitem__) if pick is None or pick not in gain else pick
        total += gain.pop(following)
        chosen.append(following)
        to_following = weights[following]
        for row in gain:
            gain[row] += to_following[row]
    return chosen, total


def _improved(weights: Sequence[Sequence[int]], chosen: list[int], fixed: int, free: Sequence[int]) -> list[int]:
    """Return the chosen rows after up to `SWAPS` exchanges, each the one that gains most. The first `fixed` rows stay."""
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
