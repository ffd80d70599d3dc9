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
from gpu_plugin.health.wording import Change
from gpu_plugin.health.wording import news as news_of
from gpu_plugin.kubelet.snapshot import Snapshot
from gpu_plugin.runtime.printable import printable


def reason(change: Transition) -> str:
    """Return the reason of the Event for a change; empty if the change needs no Event. A further fault gets an Event, too."""
    told = news_of(change, "").change
    if told or change.verdict < Verdict.DEGRADED or change.others > change.verdict:
        return told.value
    return Change.UNHEALTHY.value if change.verdict is Verdict.FATAL else Change.DEGRADED.value


def news(change: Transition, gpus: Sequence[Gpu], about: Object, at: float) -> EventContent | None:
    """Return the Event for the Node, or for a pod that holds the GPU, at Unix time `at`; None if there is no Event.

    The message has the GPU's name and the change. In an Event of the Node it also has the advice for operators.
    """
    operator = about.kind == "Node"
    why = reason(change) if operator or concerns_pods(change) else ""
    if not why:
        return None
    gpu = next((called(gpu) for gpu in gpus if gpu.uuid == change.uuid), f"GPU ({change.uuid})")
    text = news_of(change, f"MIG device {change.device} of {gpu}" if change.device else gpu).text
    action = f". What to do: {change.action}" if operator and change.action and change.verdict is not Verdict.OK else ""
    return EventContent(about, why, printable(f"{text}{action}"), why in _WARNINGS, at)


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


_WARNINGS = frozenset({Change.UNHEALTHY, Change.DEGRADED, Change.APPLICATION})
