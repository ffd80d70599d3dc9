"""When a list is sent again although nothing in it has changed: so that the kubelet writes its checkpoint. Pure."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

PAUSE = 10.0
"""Seconds between two such lists at least. The kubelet writes a file for each; a pod's plain init containers may hold a device
for as long as the pod runs, so that nothing comes of it."""


@dataclass(slots=True)
class Again:
    """A kubelet forgets pods that have ended when PodResources is asked, and writes that down when a list arrives.

    Source: pkg/kubelet/cm/devicemanager/manager.go, UpdateAllocatedDevices and genericDeviceUpdateCallback.
    """

    last: float = float("-inf")

    def due(self, kept: AbstractSet[tuple[str, str]], served: Iterable[str], now: float) -> str:
        """The resource whose list is to be sent again now; empty for none.

        `kept` is what keeps hardware back on the checkpoint's word alone, by resource name and device id; `served` are the
        resources that have lists, any of which will do; `now` is in seconds of a steady clock.
        """
        name = min(served, default="")
        if not kept or not name or now - self.last < PAUSE:
            return ""
        self.last = now
        return name
