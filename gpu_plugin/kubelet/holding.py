"""Which devices pods may hold, concluded from what the kubelet says and has written down. Decisions only, no I/O.

Two witnesses. PodResources lists what the containers of active pods have; it leaves out what plain init containers were given,
and for a while after its start a kubelet lists no pods, or pods without their devices. The checkpoint names all of it by the
uid of the pod, and keeps pods that have ended until it is written again: at an allocation, at a list of devices, and when a
resource is forgotten (pkg/kubelet/cm/devicemanager/manager.go, writeCheckpoint).

So that PodResources does not list a device proves nothing by itself. It proves that a pod has ended where the same kubelet has
listed the device for that very pod before.

So that the kubelet writes its checkpoint again, a list is sent once more though nothing in it has changed.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import msgspec

from gpu_plugin.devices.retirement import Allocated
from gpu_plugin.kubelet.socket import Identity

Key = tuple[str, str]
"""Resource name and device id."""

NOBODY: frozenset[str] = frozenset()

Entries = Mapping[Key, frozenset[str]]
"""The checkpoint: by resource and device id, the uids of the pods that were given the device."""

RESEND_INTERVAL = 10.0
"""Seconds between two such lists at least. The kubelet writes a file for each; a pod's plain init containers may hold a device
for as long as the pod runs, so that nothing comes of it."""

UNANSWERED = 3
"""How often at most it is sent for the same devices while nobody answers as PodResources: then a kubelet forgets pods that have
ended only when it admits another one with devices, and writes that down by itself."""


class KubeletReadings(msgspec.Struct, frozen=True):
    """What the witnesses said at one time: first the checkpoint, then PodResources' answer, then the checkpoint again.

    `listed` is None where PodResources did not answer, `before` and `after` where the checkpoint could not be read. `kubelet`
    is the socket that answered, None where it is not known to have been one and the same from the question to the answer: a
    kubelet makes a new socket when it starts. `writing` tells the checkpoint read as `after` from any other writing of it.
    """

    kubelet: Identity | None = None
    listed: Allocated | None = None
    before: Entries | None = None
    after: Entries | None = None
    writing: object = None


class History(msgspec.Struct, frozen=True):
    """What one kubelet, known by its PodResources socket, has listed.

    `pods` has the uid of the pod that had each device; `seen` are devices that were awaited already when they were
    listed, with the time since when they had been, as far as the checkpoint could not be read since.
    """

    kubelet: Identity | None = None
    pods: Mapping[Key, str] = msgspec.field(default_factory=dict)
    seen: frozenset[tuple[Key, float]] = frozenset()


class Holding(msgspec.Struct, frozen=True):
    """What follows from what the witnesses said.

    `allocated` is what pods hold or may hold, None where neither witness spoke; `listed` is the part that PodResources lists
    itself; `written` is what the checkpoint alone keeps: a pod that has ended may have had it, which shows once it is written
    again. `writing` is which writing of the checkpoint was read, None where it could not be: `allocated` then speaks of nothing
    but what is listed and what was awaited when the question was asked. `answered` is whether PodResources spoke.
    """

    allocated: Allocated | None = None
    listed: Allocated = frozenset()
    written: Allocated = frozenset()
    writing: object = None
    answered: bool = False

    @property
    def of_all(self) -> Allocated | None:
        """What pods may hold of anything that there is; None where that is known only of what was awaited."""
        return None if self.writing is None else self.allocated


def weigh(history: History, said: KubeletReadings, awaited: Mapping[Key, float]) -> tuple[Holding, History]:
    """What pods may hold, and what is to be remembered for the next time.

    Args:
        history: what was remembered the last time.
        said: what the witnesses say now.
        awaited: what a pod may hold and its hardware is kept back for, and since when without a break: what is retired, so
            that the kubelet gives it to no pod any more, and what is held under names that others serve.

    A device is free where the checkpoint does not name it, or names it for pods alone that have ended, and PodResources, as far
    as it answers, does not list it. Without a checkpoint one that is awaited is free only where this kubelet has listed it since
    then, and lists it no more, and the checkpoint has not been readable in between: a plain init container of another pod may
    have been given it meanwhile, by a plugin that serves it.
    """
    if said.listed is None:  # another kubelet may have begun meanwhile: nothing that this one said counts any more
        named = frozenset(said.after or ())
        return Holding(None if said.after is None else named, written=named, writing=said.writing), History()
    listed = said.listed
    same = said.kubelet is not None and said.kubelet == history.kubelet
    pods: Mapping[Key, str] = history.pods if same else {}
    seen = frozenset(one for one in history.seen if awaited.get(one[0]) == one[1]) if same else frozenset()
    written: Allocated = frozenset()
    if said.after is None:
        listed_before = {key for key, _ in seen}
        unproven = frozenset(key for key in awaited if key not in listed and key not in listed_before)
        seen |= {(key, awaited[key]) for key in awaited if key in listed}
    else:
        seen = frozenset()
        after = said.after
        pods = {key: uid for key, uid in pods.items() if uid in after.get(key, ())}
        ended = _ended(pods, listed)
        unproven = written = frozenset(key for key, uids in after.items() if key not in listed and not uids <= ended)
    allocated = listed | unproven if unproven else listed
    holding = Holding(allocated, listed, written, said.writing, answered=True)
    return holding, History(said.kubelet, {**pods, **_pairs(said, listed)}, seen)


def _ended(pods: Mapping[Key, str], listed: Allocated) -> AbstractSet[str]:
    """The pods of which devices were listed and none is any more: PodResources lists all of a pod or nothing."""
    return set(pods.values()) - {uid for key, uid in pods.items() if key in listed}


def _pairs(said: KubeletReadings, listed: Allocated) -> Mapping[Key, str]:
    """What PodResources lists, with the pods it can be about: those that the checkpoint names before the answer and after it.

    Where the checkpoint named another pod in between, the answer may have been about either.
    """
    before, after = said.before, said.after
    found = {}
    if before is not None and after is not None:
        for key in listed:
            both = before.get(key, NOBODY).intersection(after.get(key, NOBODY))
            if len(both) == 1:
                (found[key],) = both
    return found


class ListResend(msgspec.Struct):
    """A kubelet forgets pods that have ended when PodResources is asked, and writes that down when a list arrives.

    Source: pkg/kubelet/cm/devicemanager/manager.go, UpdateAllocatedDevices and genericDeviceUpdateCallback.
    """

    last: float = float("-inf")
    before: AbstractSet[Key] = frozenset()
    unanswered: int = 0

    def due(
        self,
        kept: AbstractSet[Key],
        heard: Iterable[str],
        now: float,
        *,
        ready: AbstractSet[Key] = frozenset(),
        answered: bool = True,
    ) -> str:
        """The resource whose list is to be sent again now; empty for none.

        `kept` is what keeps hardware back until the checkpoint is written, by resource name and device id; `heard` are the
        resources whose lists the kubelet hears, any of which will do. `now` is in seconds of a steady clock, `answered` whether
        PodResources did. What was not kept the last time either is waited for: PodResources has only just been asked about it,
        and a list that is on its way may do. `ready` is what no list before now does for.
        """
        if answered or kept != self.before:
            self.unanswered = 0
        name = min(heard, default="")
        stayed, self.before = kept & (self.before | ready), kept
        if not stayed or not name or now - self.last < RESEND_INTERVAL or self.unanswered >= UNANSWERED:
            return ""
        self.last = now
        self.unanswered += not answered
        return name
