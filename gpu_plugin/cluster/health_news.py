"""Decides which changes of health become Kubernetes Events, and makes their reasons and messages. Pure.

There are few reasons, so that users can filter by them. The message has the details.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_plugin.cluster.correlation import EventContent, Object
from gpu_plugin.devices.gpu_names import called
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Transition, Verdict
from gpu_plugin.health.signals import SIGNALS, SignalKind
from gpu_plugin.health.signals.orders import MAINTENANCE
from gpu_plugin.kubelet.snapshot import Snapshot
from gpu_plugin.runtime.printable import printable

# The reasons of Events; docs/cluster.md says what each means.
UNHEALTHY = "GPUUnhealthy"
DEGRADED = "GPUDegraded"
HEALTHY = "GPUHealthy"
APPLICATION = "ApplicationError"
CORDONED = "GPUCordoned"
UNCORDONED = "GPUUncordoned"
RELEASED = "GPUReleased"
RESUMED = "GPUResumed"


def reason(change: Transition) -> str:
    """Return the reason of the Event for a change; empty if the change needs no Event."""
    if SIGNALS[change.signal].kind is SignalKind.ORDER:
        begins = change.verdict is not Verdict.OK
        if change.signal == MAINTENANCE:
            return RELEASED if begins else RESUMED
        return CORDONED if begins else UNCORDONED
    if change.verdict is Verdict.FATAL:
        return UNHEALTHY
    if change.verdict is Verdict.APP:
        return APPLICATION
    if change.verdict is Verdict.DEGRADED:
        return "" if change.standing is Verdict.FATAL else DEGRADED
    if change.before <= Verdict.APP:
        return ""
    if change.standing <= Verdict.APP:
        return HEALTHY
    return DEGRADED if change.before is Verdict.FATAL and change.standing is Verdict.DEGRADED else ""


def news(change: Transition, gpus: Sequence[Gpu], about: Object, at: float) -> EventContent | None:
    """Return the Event for the Node, or for a pod that holds the GPU, at Unix time `at`; None if there is no Event.

    The message has the GPU's name and the change. In an Event of the Node it also has the advice for operators.
    """
    operator = about.kind == "Node"
    why = reason(change) if operator or concerns_pods(change) else ""
    if not why:
        return None
    gpu = next((gpu for gpu in gpus if gpu.uuid == change.uuid), None)
    name = called(gpu) if gpu is not None else f"GPU ({change.uuid})"
    part = f", MIG device {change.device}" if change.device else ""
    words = change.detail or change.signal
    if change.xid_name and change.xid_name not in words:
        words = f"{words}: {change.xid_name}"
    over = " is over" if change.verdict is Verdict.OK else ""
    action = f". What to do: {change.action}" if operator and change.action and not over else ""
    return EventContent(about, why, printable(f"{name}{part}: {words}{over}{action}"), why in _WARNINGS, at)


def concerns_pods(change: Transition) -> bool:
    """Whether pods that hold the GPU get an Event. An operator's order does not affect running pods."""
    return SIGNALS[change.signal].kind is not SignalKind.ORDER and reason(change) != ""


def pods_on(
    change: Transition, allocated: Mapping[tuple[str, str], frozenset[Any]], snapshot: Snapshot
) -> frozenset[tuple[str, str]]:
    """Return namespace and name of the pods that hold the GPU or MIG device of the change.

    `allocated` has the holders (namespace, pod, container) by resource and device id.
    """
    return frozenset(
        (holder.namespace, holder.pod)
        for _, device, holders in snapshot.allocated(allocated)
        if device.gpu == change.uuid and change.device in ("", device.visible_id)
        for holder in holders
    )


_WARNINGS = frozenset({UNHEALTHY, DEGRADED, APPLICATION})
