"""Which devices were given to containers, so that the kubelet may not have said so yet. The time is an argument.

A kubelet enters what it was given into its books as soon as it has our answer, and writes them down once it has all resources
of the container, which another plugin may hold up for as long as it likes. PodResources lists a pod only after that. Source:
pkg/kubelet/cm/devicemanager/manager.go, allocateContainerResources.
"""

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from math import inf

import msgspec

Key = tuple[str, str]
"""Resource name and device id."""

ENTERED = 1.0
"""Seconds within which a kubelet has entered an answer of ours into its books, which it writes down later."""


class _Allocation(msgspec.Struct, eq=False):
    """Devices that one call of Allocate gave away and the kubelet has not confirmed yet.

    `writing` is the checkpoint as the first question found it after which the next writing says so.
    """

    at: float
    left: frozenset[Key]
    writing: object = None


class RecentAllocations:
    """Notes what Allocate answers, until the kubelet has said it. `note` may be called from any thread, `seen` from one.

    The others may be asked from any thread. What they take goes with how much is unconfirmed.
    """

    def __init__(self) -> None:
        self._allocations: list[_Allocation] = []

    def note(self, resource: str, ids: Iterable[str], now: float) -> None:
        """These devices of a resource are about to be given away."""
        self._allocations.append(_Allocation(now, frozenset((resource, identifier) for identifier in ids)))

    def seen(self, listed: AbstractSet[Key], writing: object, asked: float) -> None:
        """Takes in what the kubelet said to a question of the time `asked`.

        `listed` is what PodResources lists. `writing` tells one writing of the kubelet's checkpoint from another, and is None
        where that could not be read. What was given before two questions, between which the checkpoint was written, is in it.
        """
        for allocation, left in self._newest_first():
            allocation.left = left
            if allocation.at < asked:
                allocation.left = allocation.left - listed
            if writing is not None and allocation.at + ENTERED <= asked:
                if allocation.writing is None:
                    allocation.writing = writing
                elif allocation.writing != writing:
                    allocation.left = frozenset()
            if not allocation.left:
                self._allocations.remove(allocation)

    def unconfirmed(self, keys: Collection[Key]) -> frozenset[Key]:
        """Which of these may have been given away without the kubelet having said so."""
        return frozenset().union(*(allocation.left.intersection(keys) for allocation in tuple(self._allocations)))

    def begun(self, keys: Collection[Key]) -> frozenset[Key]:
        """Of which of these nothing is missing but that the checkpoint is written again."""
        asked = [left for allocation, left in self._newest_first() if allocation.writing is not None]
        return frozenset().union(*(left.intersection(keys) for left in asked))

    def worth_asking(self, keys: Collection[Key]) -> float:
        """From when on a question brings one of these on that no question has yet; inf for none."""
        unasked = [(allocation.at, left) for allocation, left in self._newest_first() if allocation.writing is None]
        return min((at + ENTERED for at, left in unasked if not left.isdisjoint(keys)), default=inf)

    def _newest_first(self) -> Iterator[tuple[_Allocation, frozenset[Key]]]:
        """Every allocation, with what of it was not given away again since."""
        since: set[Key] = set()
        for allocation in reversed(tuple(self._allocations)):
            left = allocation.left - since
            since |= left
            yield allocation, left
