"""How devices are taken one after the other from whatever ranks first, many at a time."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush

import msgspec

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
