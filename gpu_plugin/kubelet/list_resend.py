"""When a list is sent again although nothing in it has changed: so that the kubelet writes its checkpoint. Pure."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import msgspec

RESEND_INTERVAL = 10.0
"""Seconds between two such lists at least. The kubelet writes a file for each; a pod's plain init containers may hold a device
for as long as the pod runs, so that nothing comes of it."""


UNANSWERED = 3
"""How often at most it is sent for the same devices while nobody answers as PodResources: then a kubelet forgets pods that have
ended only when it admits another one with devices, and writes that down by itself."""


class ListResend(msgspec.Struct):
    """A kubelet forgets pods that have ended when PodResources is asked, and writes that down when a list arrives.

    Source: pkg/kubelet/cm/devicemanager/manager.go, UpdateAllocatedDevices and genericDeviceUpdateCallback.
    """

    last: float = float("-inf")
    before: AbstractSet[tuple[str, str]] = frozenset()
    unanswered: int = 0

    def due(
        self,
        kept: AbstractSet[tuple[str, str]],
        heard: Iterable[str],
        now: float,
        *,
        ready: AbstractSet[tuple[str, str]] = frozenset(),
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
