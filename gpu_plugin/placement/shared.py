"""Policies that choose the GPUs of shared devices and MIG devices.

Names and purpose of the policies come from NVIDIA's plugin (internal/rm/allocate.go of v0.20.0; `spread` from its pull request
1936), which treats MIG devices as separate GPUs. Here a policy chooses between GPUs first, and in the same way between the MIG
devices of a GPU.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from enum import Enum, auto
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
HAD = "had"
ROOM = "room"
"""The subject of a number of a rank: the devices of a GPU that are given out, the devices that the container has, whether the
container had any of them before, the devices that are left."""

Equals = Callable[[list[int], int, Sequence[int]], list[int]]
"""(places of equal rank, number of places to choose, places that are chosen already) → chosen places.

Called if not all of the equal places are needed. The equal places are ascending, and so is the choice.
"""


class Stage(Enum):
    """The devices that may be taken.

    A device of each GPU that the container does not have, a device of each GPU or MIG device that it does not have, or all.
    """

    NEW_GPUS = auto()
    NEW_HARDWARE = auto()
    ALL = auto()


class Share(msgspec.Struct):
    """The numbers of a GPU, or of a MIG device on it, that a policy ranks."""

    load: int = 0  # its devices that are given out, including this container's
    picked: int = 0  # its devices picked for this container
    room: int = 0  # its devices that may still be taken

    def take(self, count: int) -> None:
        """Count this number of devices as picked."""
        self.load += count
        self.picked += count
        self.room -= count


class Policy(msgspec.Struct, frozen=True):
    """The rule by which devices are dealt over GPUs, and over the hardware of a GPU.

    Without `fewest`, a container gets devices of as many GPUs as possible, then of as much hardware as possible. Each device
    comes from the GPU with the lowest rank at that time, so the first number of a rank must rise by one with each device. With
    `fewest`, all devices come from as few GPUs as possible, and from the set of GPUs with the lowest ranks: GPUs of the same
    rank must have the same room. In both cases a GPU that the container has must not have the same rank as a GPU that it does
    not have, because links only decide between GPUs that it does not have. `looks_at` has, for each number of a rank, its
    subject (`USE`, `HAS`, `HAD` or `ROOM`) and words for the GPU that comes first.
    """

    rank: Callable[[Share], Rank]
    looks_at: Mapping[str, str]
    fewest: bool = False

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages in which devices are dealt."""
        return (Stage.ALL,) if self.fewest else tuple(Stage)


POLICIES: Registry[Policy] = Registry(
    "allocation policy",
    ALLOCATION_POLICIES,
    "ALLOCATION_POLICIES in gpu_plugin/config/choices.py",
    "gpu_plugin/placement/shared.py",
)
"""Policies by name. They rank GPUs, and on a GPU its MIG devices. Between equal ranks links decide, then the list's order.

`packed` takes a container's devices from the fewest GPUs, and prefers the most used GPUs. `distributed` takes them from the most
GPUs, the least used GPUs first, and further devices from the least used GPU. `spread` takes them from the most GPUs, too, and
further devices from the GPU of which the container has the fewest devices.
"""

R = TypeVar("R", bound=Callable[[Share], Rank])


def policy(name: str, looks_at: Mapping[str, str], *, fewest: bool = False) -> Callable[[R], R]:
    """Decorate the function that ranks GPUs for the policy of this name; the arguments are the fields of `Policy`."""

    def entered(rank: R) -> R:
        POLICIES.enter(name, Policy(rank, looks_at, fewest), rank)
        return rank

    return entered


@policy(DISTRIBUTED, {USE: "the least used GPU", HAS: "what the container has least of"})
def _distributed(share: Share) -> Rank:
    return share.load, share.picked


@policy(PACKED, {HAD: "what the container has already", USE: "the most used GPU", ROOM: "the least room"}, fewest=True)
def _packed(share: Share) -> Rank:
    return not share.picked, -share.load, share.room


@policy(SPREAD, {HAS: "what the container has least of", USE: "the least used GPU"})
def _spread(share: Share) -> Rank:
    return share.picked, share.load


def first(equal: list[int], count: int, _: Sequence[int]) -> list[int]:
    """Choose the first of equal places."""
    return equal[:count]


def deal(shares: Sequence[Share], count: int, policy: Policy, of_equals: Equals = first) -> list[int]:
    """Return the number of devices that each share gives by the policy, `count` in total. The shares count them as picked.

    There must be room for `count`. Takes O(n log n + count) for n shares, and far less for many devices of a few shares.
    `of_equals` is called at most once, or with a policy of the fewest GPUs at most once for each rank.
    """
    dealt = [0] * len(shares)
    ranked: defaultdict[Rank, list[int]] = defaultdict(list)
    for place, share in enumerate(shares):
        if share.room:
            ranked[policy.rank(share)].append(place)
    if policy.fewest:
        for place in _fewest(shares, count, ranked, of_equals):
            dealt[place] = min(shares[place].room, count)
            shares[place].take(dealt[place])
            count -= dealt[place]
        return dealt
    # Shares of equal rank give together, as many devices at a time as leave the order of ranks unchanged
    queue = list(ranked)
    heapify(queue)
    while count:
        rank = heappop(queue)
        equal = ranked.pop(rank)
        each = min(shares[place].room for place in equal)
        before_others = max(1, queue[0][0] - rank[0]) if queue else each
        each = min(each, before_others, max(1, count // len(equal)))
        if each * len(equal) > count:
            equal = of_equals(sorted(equal), count, ())
        for place in equal:
            share = shares[place]
            share.take(each)
            dealt[place] += each
            count -= each
            if share.room:
                rank = policy.rank(share)
                if rank not in ranked:
                    heappush(queue, rank)
                ranked[rank].append(place)
    return dealt


def _fewest(shares: Sequence[Share], count: int, ranked: Mapping[Rank, list[int]], of_equals: Equals) -> list[int]:
    """Return the places to fill one after the other until `count` devices are taken, in the order of ranks.

    These are all shares that the container has, and the fewest other shares with enough room. Of such sets it is the one with
    the lowest ranks: in the order of ranks, a share replaces the smallest of the roomiest shares while the total room suffices.
    """
    spare = sum([share.room for share in shares if share.picked]) - count
    roomiest: list[int] = []
    for room in sorted([share.room for share in shares if not share.picked], reverse=True):
        if spare >= 0:
            break
        roomiest.append(room)
        spare += room
    chosen: list[int] = []
    undecided: list[tuple[list[int], int]] = []
    for equal in map(ranked.__getitem__, sorted(ranked)):
        room, number = shares[equal[0]].room, len(equal) if shares[equal[0]].picked else 0
        while roomiest and number < len(equal) and room + spare >= roomiest[-1]:
            if room > roomiest[-1]:
                roomiest.remove(room)
            else:
                spare -= roomiest.pop() - room
            number += 1
        if number == len(equal):
            chosen += equal
        elif number:
            undecided.append((equal, number))
    for equal, number in undecided:
        chosen += of_equals(equal, number, chosen)
    position = {place: at for at, rank in enumerate(sorted(ranked)) for place in ranked[rank]}
    return sorted(chosen, key=lambda place: (position[place], place))


class _Hardware(Share):
    """A GPU that is shared as a whole, or a MIG device, with its free devices."""

    free: list[int] = msgspec.field(default_factory=list)


class SharedGpu(Share):
    """A GPU with the hardware that its devices represent: the GPU itself, or its MIG devices."""

    uuid: str = ""
    parts: list[_Hardware] = msgspec.field(default_factory=list)

    def open(self, stage: Stage) -> None:
        """Make room for the devices that may be taken at this stage."""
        for part in self.parts:
            part.room = len(part.free) if stage is Stage.ALL else min(len(part.free), 0 if part.picked else 1)
        self.room = sum([part.room for part in self.parts])
        if stage is Stage.NEW_GPUS:
            self.room = min(self.room, 0 if self.picked else 1)

    def taken(self, count: int, policy: Policy) -> list[int]:
        """Take `count` free devices of the GPU, dealt over its hardware by the policy, and return their positions."""
        chosen: list[int] = []
        for part, number in zip(self.parts, deal(self.parts, count, policy), strict=True):
            chosen += part.free[:number]
            del part.free[:number]
        return chosen


class Round(msgspec.Struct):
    """The devices dealt at one stage. GPUs are in the order of the list."""

    stage: Stage
    gpus: Sequence["SharedGpu"]  # copies of the GPUs before the stage
    ranks: Sequence[Rank]  # their ranks by the policy, of which the lowest comes first
    totals: Sequence[int]  # their numbers of devices
    passed_over: bool  # free devices were left out because the container has others of the same hardware
    gave: Sequence[int] = ()  # the number of devices that each GPU gave
    equal: Sequence[int] = ()  # places of the GPUs of equal rank if not all of them were needed
    taken: Sequence[int] = ()  # the places chosen of them
    # The trace of that choice. It has no GPUs if links decided nothing and the first GPUs in the list were taken.
    links: whole.Trace = msgspec.field(default_factory=whole.Trace)

    @classmethod
    def of(cls, stage: Stage, gpus: Sequence["SharedGpu"], policy: Policy) -> "Round":
        """Return the state of GPUs that are open for a stage, before any gives a device."""
        totals = [gpu.load + sum([len(part.free) for part in gpu.parts]) for gpu in gpus]
        passed_over = any(part.free and not (part.room and gpu.room) for gpu in gpus for part in gpu.parts)
        return cls(stage, [*map(copy, gpus)], [policy.rank(gpu) for gpu in gpus], totals, passed_over)


class Trace(msgspec.Struct):
    """A record of the choice among shared devices and MIG devices, which `taken` fills."""

    forced: whole.How | None = None  # the reason if there was no choice
    rounds: list[Round] = msgspec.field(default_factory=list)  # the stages at which devices were dealt


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
    """Return the required positions and `missing` of the free positions, chosen by the policy.

    `required` and `free` are ascending and disjoint. If the policy ranks GPUs equal and not all are needed, `whole.choose`
    chooses the GPUs that are linked best to the GPUs that the container has by then. It is called as often as `deal` calls
    `of_equals`. GPUs that are not in `placement` come last among equals. If links decide nothing, the first in the list come
    first.

    Devices that are neither free nor required count as given out, including unhealthy devices. Takes O(n log n) for n devices:
    some 10 ms for 60,000 devices of 16 GPUs or fewer.
    """
    gpus, rule = counted(required, free, devices), POLICIES[policy]
    chosen = list(required)
    for stage in rule.stages:
        for gpu in gpus:
            gpu.open(stage)
        count = min(missing, sum([gpu.room for gpu in gpus]))
        record = Round.of(stage, gpus, rule) if trace is not None and count else None
        dealt = deal(gpus, count, rule, partial(_linked, gpus, placement, budget, record))
        if trace is not None and record is not None:
            record.gave = dealt
            trace.rounds.append(record)
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
    record: Round | None,
    equal: list[int],
    count: int,
    chosen_before: Sequence[int],
) -> list[int]:
    """Return the `count` GPUs of equal rank that are linked best to each other and to the other GPUs of the container."""
    position = placement.topology.position
    known = {position[gpus[at].uuid]: at for at in equal if gpus[at].uuid in position}
    if gpus[equal[0]].picked:  # the container has all of them, so links make no difference
        chosen = equal[:count]
    elif len(known) <= count:
        unknown = [at for at in equal if gpus[at].uuid not in position]
        chosen = sorted([*known.values(), *unknown][:count])
    else:
        others = {gpu.uuid for gpu in gpus if gpu.picked} | {gpus[at].uuid for at in chosen_before}
        had = [position[uuid] for uuid in others if uuid in position]
        trace = None if record is None else record.links
        choice = whole.choose(placement, {*known, *had}, had, len(had) + count, budget, trace)
        chosen = sorted(known[gpu] for gpu in choice.gpus if gpu in known)
    if record is not None:
        record.equal, record.taken = equal, chosen
    return chosen


def counted(required: Sequence[int], free: Sequence[int], devices: Sequence[Device]) -> list[SharedGpu]:
    """Return every GPU in the order of the list, with its numbers of devices that are given out, picked and free."""
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
