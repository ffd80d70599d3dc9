"""A choice of GPUs explained: what came second, and what told the two apart. For people, not for the kubelet's path."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from gpu_plugin.devices.device import Device
from gpu_plugin.placement.dealing import Rank, Share
from gpu_plugin.placement.groups import called
from gpu_plugin.placement.prepared import Placement
from gpu_plugin.placement.shared import PACKED, POLICIES, SPREAD, SharedGpu, counted
from gpu_plugin.placement.subsets import Subsets, pods_to_come
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.whole import Choice, choose

ALL_AVAILABLE, ALL_REQUIRED = "it is all that is available", "it is all that must be included"


@dataclass(frozen=True, slots=True)
class Explanation:
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
    masks = (
        subsets.mask((*must, *others)) for others in combinations(sorted(pool - must), len(choice.gpus) - len(must))
    )
    keys = [
        (
            subsets.score[mask],
            subsets.remainder[free ^ mask],
            -subsets.distance[mask],
            subsets.evenness[free ^ mask],
            mask,
        )
        for mask in masks
    ]
    keys.remove(max(keys))
    return subsets.gpus(max(keys)[-1]) if keys else None


def _difference(topology: Topology, pool: frozenset[int], choice: Choice, other: Choice) -> str:
    """What the first of two sets has over the second, in the order in which it counts."""
    more = choice.score - other.score
    if more:
        return f"a total score of {choice.score}, {more} more than the runner-up's"
    equal = f"both score {choice.score}; " if len(choice.gpus) > 1 else ""
    return equal + _finer_difference(topology, pool, choice, other)


def _finer_difference(topology: Topology, pool: frozenset[int], choice: Choice, other: Choice) -> str:
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


# Shared GPUs and MIG devices

_FIRST: Mapping[str, str] = {
    PACKED: "the most used GPU first",
    SPREAD: "what the container has least of first, then the least used GPU",
}
"""What a policy looks for, in words; `distributed` is the one left."""


@dataclass(slots=True)
class _Round:
    """One of the two rounds in which devices are dealt: first of hardware that the container does not have, then of all.

    `gpus` are as they are after the round, in the order of the list; `loads` has what was given out before it, `totals` how
    many there are in all, `gave` what each gave in the round.
    """

    gpus: Sequence[SharedGpu]
    loads: Sequence[int]
    totals: Sequence[int]
    gave: Sequence[int]
    policy: str

    @classmethod
    def of(cls, gpus: Sequence[SharedGpu], gave: Sequence[int], policy: str) -> "_Round":
        """The round in which GPUs that are open gave so many devices. They count these as picked from now on."""
        loads = [gpu.load for gpu in gpus]
        totals = [gpu.load + sum([len(part.free) for part in gpu.parts]) for gpu in gpus]
        for gpu, count in zip(gpus, gave, strict=True):
            gpu.taken(count, POLICIES[policy])
            gpu.take(count)
        return cls(gpus, loads, totals, gave, policy)

    @property
    def open(self) -> list[int]:
        """The places of the GPUs that had any to give."""
        return [at for at, gpu in enumerate(self.gpus) if self.gave[at] or gpu.room]

    @property
    def even(self) -> bool:
        """Whether several GPUs had any to give, and as many of each were given out before."""
        return len(self.open) > 1 and len({self.loads[at] for at in self.open}) == 1

    @property
    def givers(self) -> list[int]:
        """The places of the GPUs that gave any."""
        return [at for at, count in enumerate(self.gave) if count]

    @property
    def equals(self) -> tuple[list[int], list[int]]:
        """The places of the GPUs that were of one rank and not all needed: those that were taken, and those that were not."""
        rank = max(self._last_rank(at) for at in self.givers)
        fills = POLICIES[self.policy].fills
        left = [at for at, gpu in enumerate(self.gpus) if gpu.room and not (fills and self.gave[at])]
        over = [at for at in left if POLICIES[self.policy].rank(self.gpus[at]) == rank]
        return [at for at in self.givers if self._last_rank(at) == rank] if over else [], over

    def picked_before(self, at: int) -> int:
        """How many devices of a GPU that gave any the container had when the GPU was turned to last."""
        return self.gpus[at].picked - self._last_gift(at)

    def _last_gift(self, at: int) -> int:
        """Where the policy fills, a GPU is turned to once, else for each device."""
        return self.gave[at] if POLICIES[self.policy].fills else 1

    def _last_rank(self, at: int) -> Rank:
        gpu, gift = self.gpus[at], self._last_gift(at)
        return POLICIES[self.policy].rank(Share(gpu.load - gift, gpu.picked - gift, gpu.room + gift))


def explain_shared(
    required: Sequence[int],
    free: Sequence[int],
    chosen: Collection[int],
    devices: Sequence[Device],
    policy: str,
    placement: Placement,
) -> str:
    """Why `shared.taken` takes these positions of the list, the required ones among them, in a sentence or two."""
    missing = len(chosen) - len(required)
    if missing == len(free):
        return ALL_AVAILABLE
    if not missing:
        return ALL_REQUIRED
    gpus = counted(required, free, devices)
    names = _indices(devices)
    gave = Counter(devices[at].gpu for at in chosen) - Counter(devices[at].gpu for at in required)
    had = any(part.picked and part.free for gpu in gpus for part in gpu.parts)
    for gpu in gpus:
        gpu.open(new=True)
    rooms = [gpu.room for gpu in gpus]
    if missing <= sum(rooms):
        before = "what the container does not have yet comes first; there, " if had else ""
        last = _Round.of(gpus, [gave[gpu.uuid] for gpu in gpus], policy)
    else:
        before = "each GPU or MIG device with any free gives one before any gives a second one; then, "
        _Round.of(gpus, rooms, policy)
        for gpu in gpus:
            gpu.open(new=False)
        last = _Round.of(gpus, [gave[gpu.uuid] - room for gpu, room in zip(gpus, rooms, strict=True)], policy)
        before = before if any(rooms) else ""
    return before + _ranked(last, names) + _told_apart(last, names, placement)


def _indices(devices: Sequence[Device]) -> Mapping[str, int]:
    """The index of each GPU by uuid; what is gone and has none is never dealt."""
    return {device.gpu: int(index) for device in devices if (index := device.index.partition(":")[0])}


def _ranked(last: _Round, names: Mapping[str, int]) -> str:
    """How much was given out of the GPUs that gave, in the order in which the policy turns to them."""
    if last.even:
        load, counts = last.loads[last.open[0]], {last.totals[at] for at in last.open}
        of_all = f"{load} of {counts.pop()} given out" if len(counts) == 1 else f"{load} given out of each"
        return f"{_listed(last, last.open, names)} are equally used, {of_all}"
    used = {at: f"{last.loads[at]} of {last.totals[at]} given out" for at in last.givers}
    ordered = sorted(last.givers, key=lambda at: (-last.loads[at] if last.policy == PACKED else last.loads[at], at))
    groups = [list(group) for _, group in groupby(ordered, used.__getitem__)]
    shown = ", then ".join(f"{_listed(last, group, names)} ({used[group[0]]})" for group in groups)
    return f"{_FIRST.get(last.policy, 'the least used GPU first')}: {shown}"


def _told_apart(last: _Round, names: Mapping[str, int], placement: Placement) -> str:
    """What told GPUs of one rank apart, where not all of them were needed."""
    taken, over = last.equals
    if not taken:
        return ""
    equals = sorted({*taken, *over})
    among = "of these" if last.even and equals == last.open else f"of {_listed(last, equals, names)}, which rank equal"
    equal = f"; {among}, {_listed(last, taken, names)} {'is' if len(taken) == 1 else 'are'}"
    position = placement.topology.position
    known = {position[last.gpus[at].uuid] for at in (*taken, *over) if last.gpus[at].uuid in position}
    if last.picked_before(taken[0]) or len(known) <= len(taken):
        return f"{equal} taken, first in the list"
    had = [gpu.uuid for at, gpu in enumerate(last.gpus) if gpu.picked and at not in taken and gpu.uuid in position]
    must = [position[uuid] for uuid in had]
    told = explain(placement, {*known, *must}, must, len(must) + len(taken))
    if told.runner_up is None:
        return f"{equal} taken: {told.choice.why}"
    by = {position[uuid]: index for uuid, index in names.items() if uuid in position}
    with_ = f" with {called(sorted(names[uuid] for uuid in had))}" if had else ""
    other = called(sorted(by[gpu] for gpu in told.runner_up.gpus if gpu not in must))
    if told.choice.score != told.runner_up.score:
        return f"{equal} linked best{with_}: a score of {told.choice.score}, {told.runner_up.score} with {other}"
    why = _finer_difference(placement.topology, frozenset({*known, *must}), told.choice, told.runner_up)
    return f"{equal} taken rather than {other}, linked as well{with_}: {why}"


def _listed(last: _Round, places: Sequence[int], names: Mapping[str, int]) -> str:
    return called(sorted(names[last.gpus[at].uuid] for at in places))
