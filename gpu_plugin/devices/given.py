"""Which devices were given to containers, so that the kubelet may not have said so yet. The time is an argument.

A kubelet enters what it was given into its books as soon as it has our answer, and writes them down once it has all resources
of the container, which another plugin may hold up for as long as it likes. PodResources lists a pod only after that. Source:
pkg/kubelet/cm/devicemanager/manager.go, allocateContainerResources.
"""

from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from math import inf

Key = tuple[str, str]
"""Resource name and device id."""

ENTERED = 1.0
"""Seconds within which a kubelet has entered an answer of ours into its books, which it writes down later."""


class Given:
    """Notes what Allocate answers, until the kubelet has said it. `note` may be called from any thread, the others from one."""

    def __init__(self) -> None:
        self._at: dict[Key, float] = {}
        self._before: dict[Key, tuple[float, object]] = {}

    def note(self, resource: str, ids: Iterable[str], now: float) -> None:
        """These devices of a resource are about to be given away."""
        for identifier in ids:
            self._at[resource, identifier] = now

    def seen(self, listed: AbstractSet[Key], writing: object, asked: float) -> None:
        """Takes in what the kubelet said to a question of the time `asked`.

        `listed` is what PodResources lists. `writing` tells one writing of the kubelet's checkpoint from another, and is None
        where that could not be read. What was given before two questions, between which the checkpoint was written, is in it.
        """
        for key, at in tuple(self._at.items()):
            if at < asked and key in listed:
                self._forget(key, at)
            elif writing is not None and at + ENTERED <= asked:
                since, before = self._before.get(key, (None, None))
                if since != at:
                    self._before[key] = (at, writing)
                elif before != writing:
                    self._forget(key, at)

    def unsaid(self, keys: Collection[Key]) -> frozenset[Key]:
        """Which of these may have been given away without the kubelet having said so."""
        return frozenset(key for key in keys if key in self._at)

    def begun(self, keys: Iterable[Key]) -> frozenset[Key]:
        """Of which of these nothing is missing but that the checkpoint is written again."""
        return frozenset(key for key in keys if key in self._at and self._asked_since(key, self._at[key]))

    def worth_asking(self, keys: Iterable[Key]) -> float:
        """From when on a question brings one of these on that no question has yet; inf for none."""
        given = ((key, self._at.get(key)) for key in keys)
        return min(
            (at + ENTERED for key, at in given if at is not None and not self._asked_since(key, at)), default=inf
        )

    def _asked_since(self, key: Key, at: float) -> bool:
        return key in self._before and self._before[key][0] == at

    def _forget(self, key: Key, at: float) -> None:
        self._before.pop(key, None)
        if self._at.get(key) == at:  # or it has just been given again
            self._at.pop(key, None)
