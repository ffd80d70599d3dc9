"""Which whole GPUs suit a container best: exactly on nodes of up to 16 GPUs, by a bounded search beyond."""

from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum, auto
from operator import itemgetter

import msgspec

from gpu_plugin.placement.subsets import LARGEST, Criterion, Placement

SEEDS = 32
"""From how many GPUs the bounded search sets out, each in turn."""

SWAPS = 32
"""How often it changes one chosen GPU for a better one at most."""


class How(Enum):
    """How devices were found: with nothing to choose, as the first or the best of all sets, or else by a bounded search."""

    IMPOSSIBLE = auto()
    ALL_AVAILABLE = auto()
    ALL_REQUIRED = auto()
    FIRST_OF_EQUALS = auto()
    BEST = auto()
    NOT_JUDGED_YET = auto()
    TOO_MANY_GPUS = auto()
    TOO_LATE = auto()


SEARCHED = frozenset({How.NOT_JUDGED_YET, How.TOO_MANY_GPUS, How.TOO_LATE})
"""A bounded search, which may miss the best."""


class Choice(msgspec.Struct, frozen=True):
    """GPUs by position, ascending, none where there is no such set; and how they were found."""

    gpus: tuple[int, ...]
    how: How

    @property
    def exact(self) -> bool:
        """Whether there is no better set."""
        return self.how not in SEARCHED


class Trace(msgspec.Struct):
    """What `choose` weighed, which it writes down where it is given one: for whoever wants to know why.

    `available` and `required` are what was asked. `runner_up` is what it chooses where `choice` cannot be had, and `criterion`
    the first by which that is worse; no runner-up where there is no other set, and after a bounded search.
    """

    placement: Placement = msgspec.field(default_factory=Placement)
    available: frozenset[int] = frozenset()
    required: frozenset[int] = frozenset()
    choice: Choice = Choice((), How.IMPOSSIBLE)
    runner_up: tuple[int, ...] | None = None
    criterion: Criterion = Criterion.POSITIONS


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
    trace: Trace | None = None,
) -> Choice:
    """The set of `size` of the available positions, all required ones among them, that suits a container best.

    On nodes of up to 16 GPUs it is the best of all such sets by each `subsets.Criterion` in turn. On larger nodes, and where
    `budget` is used up, it is what a bounded search finds: `Choice.exact` is False. A `trace` makes it look at every set.
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
    """Whether there is a set of `size` out of `pool` that holds `must`."""
    return size >= 1 and len(must) <= size <= len(pool) and must <= pool


def _chosen(
    placement: Placement,
    pool: frozenset[int],
    must: frozenset[int],
    size: int,
    budget: Budget | None,
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
