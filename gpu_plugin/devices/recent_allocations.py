"""Devices that were given to containers and that the kubelet has not confirmed yet. The time is an argument.

A kubelet records a device in memory as soon as it has the answer to Allocate. It writes its checkpoint once it has all
resources of the container, which another plugin may delay without limit. PodResources lists the pod only after that. Source:
pkg/kubelet/cm/devicemanager/manager.go, allocateContainerResources.
"""

import threading
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from math import inf

import msgspec

Key = tuple[str, str]  # resource name and device id

ENTERED = 1.0
"""Seconds after an answer of Allocate within which a kubelet has recorded it in memory. It writes its checkpoint later."""


class _Allocation(msgspec.Struct, eq=False):
    """One call of Allocate.

    `writing` identifies the checkpoint at the first question after the kubelet has recorded the call; any later checkpoint
    confirms it.
    """

    at: float
    writing: object = None


class RecentAllocations:
    """The newest unconfirmed allocation of each device. All methods may be called from any thread.

    Memory and time are linear in the number of unconfirmed devices, however often each was allocated.
    """

    def __init__(self) -> None:
        self._newest: dict[Key, _Allocation] = {}
        # A long Allocate calls `note` on a thread while the event loop calls `seen`
        self._lock = threading.Lock()

    def note(self, resource: str, ids: Iterable[str], now: float) -> None:
        """Record that these devices of a resource are about to be given away."""
        allocation = _Allocation(now)
        noted = dict.fromkeys(((resource, identifier) for identifier in ids), allocation)
        with self._lock:
            self._newest |= noted

    def seen(self, listed: AbstractSet[Key], writing: object, asked: float) -> None:
        """Drop the devices that an answer of the kubelet confirms. The question was sent at the time `asked`.

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
        """Return the devices of these that were given away and that the kubelet has not confirmed."""
        with self._lock:
            return frozenset(self._newest.keys() & keys)

    def begun(self, keys: Collection[Key]) -> frozenset[Key]:
        """Return the devices of these that the next writing of the checkpoint confirms."""
        with self._lock:
            return frozenset(key for key in self._newest.keys() & keys if self._newest[key].writing is not None)

    def worth_asking(self, keys: Collection[Key]) -> float:
        """Return the earliest time in seconds of a question that makes a device `begun`, inf if no question can."""
        with self._lock:
            newest = set(map(self._newest.__getitem__, self._newest.keys() & keys))
        return min((each.at + ENTERED for each in newest if each.writing is None), default=inf)
