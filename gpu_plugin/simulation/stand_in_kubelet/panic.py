"""When a list ends the kubelet. Decisions only, no I/O.

Sources: pkg/kubelet/cm/devicemanager/manager.go (allocateContainerResources) and topology_hints.go
(generateDeviceTopologyHints), which look devices up in the newest list and do not ask whether they are there: kubelets
from 1.34 to 1.36 dereference nil. A strict stand-in goes further, since nobody knows when such a pod is admitted again.
"""

from collections.abc import Collection

import msgspec

from gpu_plugin.simulation.stand_in_kubelet.device_table import ResourceState
from gpu_plugin.simulation.stand_in_kubelet.topology import NumaPolicy


class KubeletPanicError(AssertionError):
    """The stand-in kubelet panicked over what a plugin did; the text is the cause. Only a new start helps."""


class Claims(msgspec.Struct, frozen=True):
    """Device ids of one resource: those that pods hold, and those with an Allocate under way."""

    held: Collection[str]
    in_flight: Collection[str]


def list_panic(state: ResourceState, gone: Collection[str], claims: Claims, policy: NumaPolicy, *, strict: bool) -> str:
    """What the newest list, which is in `state` already, makes of the kubelet: the cause of a panic, or nothing.

    `gone` are the ids that the list before had; `strict` makes every list a fatal one that lacks what a pod holds.
    """
    lost = set(claims.held) - state.devices.keys()
    if torn := set(claims.in_flight).intersection(gone):
        return f"{state.resource}: {sorted(torn)} left the list during their Allocate"
    if lost and state.lists == 1 and policy != "none" and any(state.numa.values()):
        return f"{state.resource}: pods are admitted again with {sorted(lost)}, which no list has"
    if lost and strict:
        return f"{state.resource}: {sorted(lost)} left the list while pods hold them"
    return ""


def admission_panic(state: ResourceState, ids: Collection[str]) -> str:
    """What admitting a pod again makes of the kubelet, by a policy that asks for hints; `ids` are those the pod has."""
    lost = set(ids) - state.devices.keys()
    if not lost or not any(state.numa.values()):
        return ""
    return f"{state.resource}: a pod is admitted again with {sorted(lost)}, which the list lacks"
