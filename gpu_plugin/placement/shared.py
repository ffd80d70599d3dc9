"""Which GPUs shared devices and MIG devices are taken from.

Names and purpose of the policies are those of NVIDIA's plugin (internal/rm/allocate.go of v0.20.0; `spread` is that of its
pull request 1936), which counts MIG devices as GPUs of their own and so tells none of them apart. Here what counts is the
hardware: GPUs first, and within one GPU its MIG devices.

Two replicas of the same hardware give a container nothing more than one. So, whatever the policy, no container gets a second
replica of a GPU or MIG device while there is one left of hardware that it does not have.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TypeVar

import msgspec

from gpu_plugin.config.choices import ALLOCATION_POLICIES, Registry
from gpu_plugin.config.sharing import DISTRIBUTED, PACKED, SPREAD
from gpu_plugin.devices.device import Device
from gpu_plugin.placement import whole
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.whole import Budget

Rank = tuple[int, ...]

USE = "use"
HAS = "has"
ROOM = "room"
"""What a number of a rank is about: how much of a GPU is given out, what the container has of it, how much is left."""

Equals = Callable[[list[int], int], list[int]]
"""Which of several places that rank equal are taken, where not all are needed: the places and a number in, both ascending."""


class Share(msgspec.Struct):
    """What a policy sees of a GPU, or of a piece of hardware on it.

    `load` devices of it are given out, those picked for this container included; `picked` were picked for this container;
    `room` more may be taken.
    """

    load: int = 0
    picked: int = 0
    room: int = 0

    def take(self, count: int) -> None:
        """Counts that many devices as picked."""
        self.load += count
        self.picked += count
        self.room -= count


class Policy(msgspec.Struct, frozen=True):
    """Each device is taken from what has the lowest rank at that time and has room.

    With each device taken, the first number of a rank rises by one; where the policy `fills`, it falls, so that what was
    taken from remains the first until it has no room, and shares of one rank must have the same room. What the
    container has must never rank equal to what it does not have: links decide only among the latter. `looks_at` says of each
    number of a rank what it is about (one of `USE`, `HAS`, `ROOM`) and what comes first by it, in words.
    """

    rank: Callable[[Share], Rank]
    looks_at: Mapping[str, str]
    fills: bool = False


POLICIES: Registry[Policy] = Registry(
    "allocation policy",
    ALLOCATION_POLICIES,
    "ALLOCATION_POLICIES in gpu_plugin/config/choices.py",
    "gpu_plugin/placement/shared.py",
)
"""Policies by name. They rank GPUs, and on a GPU its MIG devices; where ranks are equal, links and then the list decide.

`distributed` evens out how much GPUs are used: a container gets several MIG devices of one GPU where that is the least used one.
`packed` leaves as many GPUs unused as it can. `spread` gives each container devices of as many GPUs as it can, busy ones too.
Of GPUs that are shared whole, each gives a container one device before any gives a second one: policies then differ in which
GPUs these are, and in which give more.
"""

R = TypeVar("R", bound=Callable[[Share], Rank])


def policy(name: str, looks_at: Mapping[str, str], *, fills: bool = False) -> Callable[[R], R]:
    """A decorator: the function ranks GPUs for the policy of this name; the rest is as `Policy` has it."""

    def entered(rank: R) -> R:
        POLICIES.enter(name, Policy(rank, looks_at, fills), rank)
        return rank

    return entered


@policy(DISTRIBUTED, {USE: "the least used GPU", HAS: "what the container has least of"})
def _distributed(share: Share) -> Rank:
    return share.load, share.picked


@policy(
    PACKED,
    {USE: "the most used GPU", HAS: "what the container has already", ROOM: "the least room"},
    fills=True,
)
def _packed(share: Share) -> Rank:
    """Nothing is linked better to what the container has than what it has already."""
    return -share.load, not share.picked, share.room


@policy(SPREAD, {HAS: "what the container has least of", USE: "the least used GPU"})
def _spread(share: Share) -> Rank:
    return share.picked, share.load


def first(equal: list[int], count: int) -> list[int]:
    """The first of equals."""
    return equal[:count]


def deal(shares: Sequence[Share], count: int, policy: Policy, of_equals: Equals = first) -> list[int]:
    """How many of `count` devices each share gives when they are taken one by one; the shares count them as picked.

    There must be room for so many. All of one rank are dealt with together, and as many devices at a time as leave the order
    unchanged: takes O(n log n + count) for n shares, and far less for many devices of a few. `of_equals` is called once at
    most, at the end, since until then all that rank equal are taken from.
    """
    dealt = [0] * len(shares)
    ranked: defaultdict[Rank, list[int]] = defaultdict(list)
    for place, share in enumerate(shares):
        if share.room:
            ranked[policy.rank(share)].append(place)
    queue = list(ranked)
    heapify(queue)
    while count:
        rank = heappop(queue)
        equal = ranked.pop(rank)
        each = min(shares[place].room for place in equal)
        if not policy.fills:
            before_others = max(1, queue[0][0] - rank[0]) if queue else each
            each = min(each, before_others, max(1, count // len(equal)))
        if each * len(equal) > count:
            equal = of_equals(sorted(equal), -(-count // each))
        for place in equal:
            share = shares[place]
            number = min(each, count)
            share.take(number)
            dealt[place] += number
            count -= number
            if share.room:
                rank = policy.rank(share)
                if rank not in ranked:
                    heappush(queue, rank)
                ranked[rank].append(place)
    return dealt


class _Hardware(Share):
    """A GPU that is shared whole, or one of its MIG devices, with its free devices."""

    free: list[int] = msgspec.field(default_factory=list)


class SharedGpu(Share):
    """A GPU with the hardware on it that devices stand for: itself, or its MIG devices."""

    uuid: str = ""
    parts: list[_Hardware] = msgspec.field(default_factory=list)

    def open(self, *, new: bool) -> None:
        """Makes room for one device of each piece of hardware that the container does not have, or for all there are."""
        for part in self.parts:
            part.room = min(len(part.free), 0 if part.picked else 1) if new else len(part.free)
        self.room = sum([part.room for part in self.parts])

    def taken(self, count: int, policy: Policy) -> list[int]:
        """Takes so many free devices of the GPU, dealt over its hardware by the policy, and returns their positions."""
        chosen: list[int] = []
        for part, number in zip(self.parts, deal(self.parts, count, policy), strict=True):
            chosen += part.free[:number]
            del part.free[:number]
        return chosen


class Round(msgspec.Struct):
    """Devices dealt once: the GPUs in the order of the list as they were then, and how many each `gave`.

    `ranks` is what the policy made of each, the lowest the first, and `totals` how many devices of it there are.
    `passed_over`: some free devices were left out of it, since the container has others of the same hardware. `equal` are GPUs
    that ranked equal when not all of them were needed, and `taken` those that were, as places in the list; `links` is what was
    weighed between them, without GPUs chosen where links decided nothing and the first in the list were taken.
    """

    gpus: Sequence["SharedGpu"]
    ranks: Sequence[Rank]
    totals: Sequence[int]
    passed_over: bool
    gave: Sequence[int] = ()
    equal: Sequence[int] = ()
    taken: Sequence[int] = ()
    links: whole.Trace = msgspec.field(default_factory=whole.Trace)

    @classmethod
    def of(cls, gpus: Sequence["SharedGpu"], policy: Policy) -> "Round":
        """What is to be seen of GPUs that are open, before any gives one."""
        totals = [gpu.load + sum([len(part.free) for part in gpu.parts]) for gpu in gpus]
        passed_over = any(part.free and not part.room for gpu in gpus for part in gpu.parts)
        return cls([*map(copy, gpus)], [policy.rank(gpu) for gpu in gpus], totals, passed_over)


class Trace(msgspec.Struct):
    """What was weighed among shared devices and MIG devices, written down by `taken` where it is given one.

    `forced` is why there was nothing to choose, None where there was. `rounds` are one or two: in the second one a container
    gets second devices of the same hardware. None has nothing to give.
    """

    forced: whole.How | None = None
    rounds: list[Round] = msgspec.field(default_factory=list)


def taken(
    required: Sequence[int],
    free: Sequence[int],
    missing: int,
    devices: Sequence[Device],
    policy: str,
    placement: Placement,
    budget: Budget | None = None,
    trace: Trace | None = None,
) -> list[int]:
    """The required positions and `missing` of the free ones, both ascending and without the other's, by that policy.

    Of GPUs that the policy ranks equal, and of which not all are needed, those are taken that `whole.choose` chooses to go
    with the GPUs that the container has by then; `choose` is called once at most, for all of them together. GPUs that
    `placement` does not know come last among equals, and where links decide nothing the first in the list come first.

    What is neither free nor required counts as given out, unhealthy devices included. Takes O(n log n) for n devices: some
    10 ms for 60,000 of 16 GPUs or fewer.
    """
    gpus, rule = counted(required, free, devices), POLICIES[policy]
    chosen = list(required)
    for new in (True, False):
        for gpu in gpus:
            gpu.open(new=new)
        count = min(missing, sum([gpu.room for gpu in gpus]))
        seen = Round.of(gpus, rule) if trace is not None and count else None
        dealt = deal(gpus, count, rule, partial(_linked, gpus, placement, budget, seen))
        if trace is not None and seen is not None:
            seen.gave = dealt
            trace.rounds.append(seen)
        for gpu, number in zip(gpus, dealt, strict=True):
            if number:
                chosen += gpu.taken(number, rule)
        missing -= count
        if not missing:
            break
    return chosen


def _linked(
    gpus: Sequence[SharedGpu],
    placement: Placement,
    budget: Budget | None,
    seen: Round | None,
    equal: list[int],
    count: int,
) -> list[int]:
    """Those `count` of some GPUs of one rank that are linked best to each other and to those that the container has."""
    position = placement.topology.position
    known = {position[gpus[at].uuid]: at for at in equal if gpus[at].uuid in position}
    if gpus[equal[0]].picked:  # then it has all of them: they differ in nothing
        chosen = equal[:count]
    elif len(known) <= count:
        unknown = [at for at in equal if gpus[at].uuid not in position]
        chosen = sorted([*known.values(), *unknown][:count])
    else:
        had = [position[gpu.uuid] for gpu in gpus if gpu.picked and gpu.uuid in position]
        trace = None if seen is None else seen.links
        choice = whole.choose(placement, {*known, *had}, had, len(had) + count, budget, trace)
        chosen = sorted(known[gpu] for gpu in choice.gpus if gpu in known)
    if seen is not None:
        seen.equal, seen.taken = equal, chosen
    return chosen


def counted(required: Sequence[int], free: Sequence[int], devices: Sequence[Device]) -> list[SharedGpu]:
    """Every GPU in the order of the list, with what of it is given out, picked already, and free."""
    gpu_of = {device.visible_id: device.gpu for device in devices}
    listed = Counter(map(attrgetter("visible_id"), devices))
    picked = Counter(devices[at].visible_id for at in required)
    open_: defaultdict[str, list[int]] = defaultdict(list)
    for at in free:
        open_[devices[at].visible_id].append(at)
    gpus: dict[str, SharedGpu] = {}
    for visible_id, uuid in gpu_of.items():
        gpu = gpus.setdefault(uuid, SharedGpu(uuid=uuid))
        positions = open_[visible_id]
        part = _Hardware(listed[visible_id] - len(positions), picked[visible_id], free=positions)
        gpu.parts.append(part)
        gpu.load += part.load
        gpu.picked += part.picked
    return list(gpus.values())
