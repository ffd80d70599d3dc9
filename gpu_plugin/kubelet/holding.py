"""Decide which devices pods may hold, from PodResources and the kubelet's checkpoint. No I/O.

PodResources lists the devices of the containers of active pods. It omits the devices of plain init containers, and for a while
after its start a kubelet lists no pods, or pods without their devices. The checkpoint has all devices by the uid of the pod. It
keeps pods that have ended until the kubelet writes it again: at an allocation, at a list of devices, and when the kubelet drops
a resource (pkg/kubelet/cm/devicemanager/manager.go, writeCheckpoint).

So a pod may still hold a device that PodResources does not list. Only if the same kubelet has listed the device for the same
pod before, the pod has ended.

An unchanged list is sent again to make the kubelet write its checkpoint.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import msgspec

from gpu_plugin.devices.retirement import Allocated
from gpu_plugin.kubelet.socket import Identity

Key = tuple[str, str]  # resource name and device id

NO_PODS: frozenset[str] = frozenset()

# The checkpoint: the uids of the pods that have a device, by resource and device id.
Entries = Mapping[Key, frozenset[str]]

# Shortest time between two such lists, in seconds. The kubelet writes a file for each list, and a list may have no effect: a
# pod keeps the devices of its plain init containers until it ends.
RESEND_INTERVAL = 10.0

# How often at most the list is sent again for the same devices while PodResources does not answer. Without PodResources, a
# kubelet drops ended pods only when it admits another pod with devices, and then it also writes the checkpoint.
UNANSWERED = 3


class KubeletReadings(msgspec.Struct, frozen=True):
    """One reading of both sources: first the checkpoint, then PodResources, then the checkpoint again.

    Attributes:
        kubelet: the PodResources socket; None if it may have been replaced during the request. A kubelet makes a new socket
            when it starts.
        listed: the devices that PodResources lists; None if it did not answer.
        before: the checkpoint before the answer; None if it could not be read.
        after: the checkpoint after the answer; None if it could not be read.
        writing: the version of the checkpoint read as `after`.
    """

    kubelet: Identity | None = None
    listed: Allocated | None = None
    before: Entries | None = None
    after: Entries | None = None
    writing: object = None


class History(msgspec.Struct, frozen=True):
    """The earlier answers of one kubelet.

    Attributes:
        kubelet: its PodResources socket.
        pods: the uid of the pod that had each device.
        seen: the devices that were listed while they were awaited, with the time since which they were awaited. Empty once the
            checkpoint can be read.
    """

    kubelet: Identity | None = None
    pods: Mapping[Key, str] = msgspec.field(default_factory=dict)
    seen: frozenset[tuple[Key, float]] = frozenset()


class Holding(msgspec.Struct, frozen=True):
    """The devices that pods hold or may hold, according to both sources.

    Attributes:
        allocated: the devices that pods hold or may hold; None if neither source could be read.
        listed: the devices of `allocated` that PodResources lists.
        written: the devices of `allocated` that only the checkpoint has. The pod may have ended: the next version of the
            checkpoint shows it.
        writing: the version of the checkpoint; None if it could not be read. Then `allocated` has only the listed devices and
            the devices that were awaited at the time of the request.
        answered: whether PodResources answered.
    """

    allocated: Allocated | None = None
    listed: Allocated = frozenset()
    written: Allocated = frozenset()
    writing: object = None
    answered: bool = False

    @property
    def of_all(self) -> Allocated | None:
        """All devices that pods may hold; None if this is known only of the listed and the awaited devices."""
        return None if self.writing is None else self.allocated


def weigh(history: History, readings: KubeletReadings, awaited: Mapping[Key, float]) -> tuple[Holding, History]:
    """Return the devices that pods may hold, and the history for the next call.

    Args:
        history: the history from the last call.
        readings: the present readings of both sources.
        awaited: the devices whose hardware is kept back because a pod may hold them, with the time since which each is awaited
            without a break. They are retired devices, which the kubelet gives to no other pod, and devices that pods hold
            under names that other plugins serve.

    A device is free if two conditions hold: PodResources does not list it, if PodResources answers, and the checkpoint names it
    for no pod, or only for pods that have ended.

    If the checkpoint cannot be read, an awaited device is free only if this kubelet has listed it since it is awaited, does not
    list it any more, and the checkpoint could not be read in between either. Otherwise another plugin that serves the device may
    have given it to a plain init container of another pod.
    """
    if readings.listed is None:  # another kubelet may have started, so the history is dropped
        named = frozenset(readings.after or ())
        return Holding(None if readings.after is None else named, written=named, writing=readings.writing), History()
    listed = readings.listed
    same = readings.kubelet is not None and readings.kubelet == history.kubelet
    pods: Mapping[Key, str] = history.pods if same else {}
    seen = frozenset((key, since) for key, since in history.seen if awaited.get(key) == since) if same else frozenset()
    written: Allocated = frozenset()
    if readings.after is None:
        listed_before = {key for key, _ in seen}
        unproven = frozenset(key for key in awaited if key not in listed and key not in listed_before)
        seen |= {(key, awaited[key]) for key in awaited if key in listed}
    else:
        seen = frozenset()
        after = readings.after
        pods = {key: uid for key, uid in pods.items() if uid in after.get(key, ())}
        ended = _ended(pods, listed)
        unproven = written = frozenset(key for key, uids in after.items() if key not in listed and not uids <= ended)
    allocated = listed | unproven if unproven else listed
    holding = Holding(allocated, listed, written, readings.writing, answered=True)
    return holding, History(readings.kubelet, {**pods, **_pairs(readings, listed)}, seen)


def _ended(pods: Mapping[Key, str], listed: Allocated) -> AbstractSet[str]:
    """Return the pods whose devices were listed before and are not now. PodResources lists all devices of a pod or none."""
    return set(pods.values()) - {uid for key, uid in pods.items() if key in listed}


def _pairs(readings: KubeletReadings, listed: Allocated) -> Mapping[Key, str]:
    """Return the pod of each listed device for which the checkpoint has exactly one pod both before and after the answer.

    For other devices the answer may refer to a pod that the checkpoint had only at one of the two times, or in between.
    """
    before, after = readings.before, readings.after
    found = {}
    if before is not None and after is not None:
        for key in listed:
            both = before.get(key, NO_PODS).intersection(after.get(key, NO_PODS))
            if len(both) == 1:
                (found[key],) = both
    return found


class ListResend(msgspec.Struct):
    """Decides when to send a list again, so that the kubelet writes a checkpoint without pods that have ended.

    A kubelet drops these pods at a request to PodResources, and writes the checkpoint when a list arrives.
    Source: pkg/kubelet/cm/devicemanager/manager.go, UpdateAllocatedDevices and genericDeviceUpdateCallback.
    """

    last: float = float("-inf")
    before: AbstractSet[Key] = frozenset()
    unanswered: int = 0

    def due(
        self,
        kept: AbstractSet[Key],
        registered: Iterable[str],
        now: float,
        *,
        ready: AbstractSet[Key] = frozenset(),
        answered: bool = True,
    ) -> str:
        """Return the resource whose list must be sent again now; empty if no list must be sent.

        A device that was not in `kept` at the last call is skipped: the request to PodResources has only just been made, and a
        list on its way to the kubelet may be enough.

        Args:
            kept: the devices that keep hardware back until the checkpoint is written.
            registered: the resources whose lists the kubelet reads. The list of any of them is enough.
            now: seconds of a steady clock.
            ready: devices for which no earlier list is enough, so they are not skipped.
            answered: whether PodResources answered.
        """
        if answered or kept != self.before:
            self.unanswered = 0
        name = min(registered, default="")
        stayed, self.before = kept & (self.before | ready), kept
        if not stayed or not name or now - self.last < RESEND_INTERVAL or self.unanswered >= UNANSWERED:
            return ""
        self.last = now
        self.unanswered += not answered
        return name
