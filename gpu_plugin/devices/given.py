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


class _Giving(msgspec.Struct, eq=False):
    """What was given away at one time and the kubelet has not said yet.

    `writing` is the checkpoint as the first question found it after which the next writing says so.
    """

    at: float
    left: frozenset[Key]
    writing: object = None


class Given:
    """Notes what Allocate answers, until the kubelet has said it. `note` may be called from any thread, `seen` from one.

    The others may be asked from any thread. What they take goes with how much is unsaid.
    """

    def __init__(self) -> None:
        self._givings: list[_Giving] = []

    def note(self, resource: str, ids: Iterable[str], now: float) -> None:
        """These devices of a resource are about to be given away."""
        self._givings.append(_Giving(now, frozenset((resource, identifier) for identifier in ids)))

    def seen(self, listed: AbstractSet[Key], writing: object, asked: float) -> None:
        """Takes in what the kubelet said to a question of the time `asked`.

        `listed` is what PodResources lists. `writing` tells one writing of the kubelet's checkpoint from another, and is None
        where that could not be read. What was given before two questions, between which the checkpoint was written, is in it.
        """
        for giving, left in self._newest_first():
            giving.left = left
            if giving.at < asked:
                giving.left = giving.left - listed
            if writing is not None and giving.at + ENTERED <= asked:
                if giving.writing is None:
                    giving.writing = writing
                elif giving.writing != writing:
                    giving.left = frozenset()
            if not giving.left:
                self._givings.remove(giving)

    def unsaid(self, keys: Collection[Key]) -> frozenset[Key]:
        """Which of these may have been given away without the kubelet having said so."""
        return frozenset().union(*(giving.left.intersection(keys) for giving in tuple(self._givings)))

    def begun(self, keys: Collection[Key]) -> frozenset[Key]:
        """Of which of these nothing is missing but that the checkpoint is written again."""
        asked = [left for giving, left in self._newest_first() if giving.writing is not None]
        return frozenset().union(*(left.intersection(keys) for left in asked))

    def worth_asking(self, keys: Collection[Key]) -> float:
        """From when on a question brings one of these on that no question has yet; inf for none."""
        unasked = [(giving.at, left) for giving, left in self._newest_first() if giving.writing is None]
        return min((at + ENTERED for at, left in unasked if not left.isdisjoint(keys)), default=inf)

    def _newest_first(self) -> Iterator[tuple[_Giving, frozenset[Key]]]:
        """Every giving, with what of it was not given away again since."""
        since: set[Key] = set()
        for giving in reversed(tuple(self._givings)):
            left = giving.left - since
            since |= left
            yield giving, left
