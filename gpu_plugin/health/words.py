"""What is said of signals beyond their own words: advice, and names for events."""

import re

from gpu_plugin.health.context import Case
from gpu_plugin.health.latch import AnyLatch, LatchKey, Verdict
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signals import SIGNALS, SignalKind

MAX_REASON = 128
"""Characters of the reason of a Kubernetes Event (API validation of events.k8s.io)."""


def advice(key: LatchKey, policy: HealthPolicy, gpu: str, latch: AnyLatch) -> str:
    """What an operator is advised to do about an open latch of a GPU, which commands name by its uuid; empty for nothing."""
    said = SIGNALS[key.signal].action
    return (said if isinstance(said, str) else said(Case(key, latch, policy))).format(gpu=gpu)


def event_reason(signal: str, verdict: Verdict, standing: Verdict) -> str:
    """The CamelCase reason of the event that a signal's change to `verdict` is, where all signals come to `standing` then.

    `GpuXidFatal`, `GpuCordon`; `GpuXidOver` where it is over and something else stands, `GpuRecovered` where nothing does.
    """
    name = "".join(word.capitalize() for word in re.split(r"[^0-9A-Za-z]+", signal))
    known = SIGNALS.get(signal)
    if known is not None and known.kind is SignalKind.ORDER:
        ending = "Over" if verdict is Verdict.OK else ""
    elif verdict is not Verdict.OK:
        ending = verdict.name.capitalize()
    elif standing is Verdict.OK:
        return "GpuRecovered"
    else:
        ending = "Over"
    return f"Gpu{name[: MAX_REASON - 3 - len(ending)]}{ending}"


def xid_number(key: LatchKey) -> int | None:
    """The Xid that a latch is of; None for any other signal."""
    return int(key.part) if SIGNALS[key.signal].numbered and key.part else None
