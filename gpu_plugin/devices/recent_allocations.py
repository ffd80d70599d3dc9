"""Devices that were given to containers and that the kubelet has not confirmed yet. The time is an argument.

A kubelet enters a device into its books as soon as it has the answer to Allocate. It writes its checkpoint once it has all
resources of the container, which another plugin may delay without limit. PodResources lists the pod only after that. Source:
pkg/kubelet/cm/devicemanager/manager.go, allocateContainerResources.
"""

import threading
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from math import inf

import msgspec

Key = tuple[str, str]
"""Resource name and device id."""

ENTERED = 1.0
"""Seconds within which a kubelet has entered an answer of ours into its books, which it writes down later."""


class _Allocation(msgspec.Struct, eq=False):
    """One call of Allocate.

    `writing` is the checkpoint as the first question found it after which the next writing confirms the call.
    """

    at: float
    writing: object = None


class RecentAllocations:
    """The newest unconfirmed allocation of each device. All methods may be called from any thread.

    Memory and time are linear in the number of unconfirmed devices, however often each was allocated.
    """

    def __init__(self) -> None:
        self._newest: dict[Key, _Allocation] = {}
        # A long Allocate notes its devices on a thread while the loop confirms and drops others.
        self._lock = threading.Lock()

    def note(self, resource: str, ids: Iterable[str], now: float) -> None:
        """Record that these devices of a resource are about to be given away."""
        allocation = _Allocation(now)
        noted = dict.fromkeys(((resource, identifier) for identifier in ids), allocation)
        with self._lock:
            self._newest |= noted

    def seen(self, listed: AbstractSet[Key], writing: object, asked: float) -> None:
        """Drop the devices that an answer of the kubelet, to a question of the time `asked`, confirms.

        `listed` is the set that PodResources lists. `writing` differs after each writing of the kubelet's checkpoint, and is None
        if the checkpoint could not be read. A device is confirmed if it is listed, or if the checkpoint was written
        between two questions that both came after the allocation.
        """
        with self._lock:
            left: dict[Key, _Allocation] = {}
            begun: set[_Allocation] = set()
            for key, allocation in self._newest.items():
                if allocation.at < asked and key in listed:
                    continue
                if writing is not None and allocation.at + ENTERED <= asked:
                    if allocation.writing is None:
                        begun.add(allocation)
                    elif allocation.writing != writing:
                        continue
                left[key] = allocation
            for allocation in begun:
                allocation.writing = writing
            self._newest = left

    def unconfirmed(self, keys: Collection[Key]) -> frozenset[Key]:
        """Which of these may have been given away without the kubelet having confirmed it."""
        with self._lock:
            return frozenset(self._newest.keys() & keys)

    def begun(self, keys: Collection[Key]) -> frozenset[Key]:
        """Which of these are confirmed as soon as the checkpoint is written again."""
        with self._lock:
            return frozenset(key for key in self._newest.keys() & keys if self._newest[key].writing is not None)

    def worth_asking(self, keys: Collection[Key]) -> float:
        """The earliest time of a question that makes one of these `begun`, in seconds; inf if none can become so."""
        with self._lock:
            newest = set(map(self._newest.__getitem__, self._newest.keys() & keys))
        return min((each.at + ENTERED for each in newest if each.writing is None), default=inf)
