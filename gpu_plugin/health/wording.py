"""A change of health in words, the same for the log, the events of the node and Kubernetes Events. Pure."""

from enum import StrEnum

import msgspec

from gpu_plugin.health.latch import Transition, Verdict
from gpu_plugin.health.signals import SIGNALS, SignalKind
from gpu_plugin.health.signals.orders import MAINTENANCE


class Change(StrEnum):
    """The effect of a change on its GPU. The values are the reasons of Kubernetes Events; docs/cluster.md describes them."""

    UNHEALTHY = "GPUUnhealthy"
    DEGRADED = "GPUDegraded"
    HEALTHY = "GPUHealthy"
    APPLICATION = "ApplicationError"
    CORDONED = "GPUCordoned"
    UNCORDONED = "GPUUncordoned"
    RELEASED = "GPUReleased"
    RESUMED = "GPUResumed"
    UNCHANGED = ""  # The GPU's state is as before


class News(msgspec.Struct, frozen=True):
    """A change of health: its effect, and a sentence that begins with the name of the GPU."""

    change: Change
    text: str


_STATES = {Verdict.FATAL: "Unhealthy", Verdict.DEGRADED: "degraded"}


def news(change: Transition, name: str) -> News:
    """Return a change in words. `name` is the name of the GPU, or of its MIG device."""
    detail = change.detail or change.signal
    if change.signal in SIGNALS and SIGNALS[change.signal].kind is SignalKind.ORDER:
        return _order(change, name, detail)
    tail = _tail(change)
    if change.verdict is Verdict.OK:
        return News(_improved(change), f"{name}: over: {detail}{tail}")
    if change.verdict is Verdict.APP:
        return News(
            Change.APPLICATION, f"{name}: {detail} is an application's error{tail or '; the GPU stays as it is'}"
        )
    state = _STATES[change.verdict]
    if change.verdict > change.stood:
        return News(
            Change.UNHEALTHY if change.verdict is Verdict.FATAL else Change.DEGRADED, f"{name} is {state}: {detail}"
        )
    if change.others >= change.verdict:
        return News(Change.UNCHANGED, f"{name}, also: {detail}; it stays {_STATES[change.others]}")
    if change.verdict < change.stood:
        return News(Change.DEGRADED, f"{name} is {state}: {detail}{tail}")
    return News(Change.UNCHANGED, f"{name} stays {state}: {detail}")


def _order(change: Transition, name: str, detail: str) -> News:
    maintenance = change.signal == MAINTENANCE
    if change.verdict is not Verdict.OK:
        return News(
            Change.RELEASED if maintenance else Change.CORDONED, f"{name} is held back by an operator: {detail}"
        )
    ended = f"{name} is no longer held back by an operator ({detail}){_tail(change)}"
    return News(Change.RESUMED if maintenance else Change.UNCORDONED, ended)


def _improved(change: Transition) -> Change:
    """Return the effect of the end of a fault."""
    if change.stood <= Verdict.APP or change.standing == change.stood:
        return Change.UNCHANGED
    return Change.DEGRADED if change.standing is Verdict.DEGRADED else Change.HEALTHY


def _tail(change: Transition) -> str:
    """Return the state of the GPU after an improvement."""
    if change.healthy_again:
        return "; it is Healthy again"
    return f"; it stays {_STATES[change.standing]}" if change.standing in _STATES else ""
