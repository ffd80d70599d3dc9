"""What is said of signals beyond their own words: advice, and names for events."""

import re

from gpu_plugin.health.latch import LatchKey, Verdict
from gpu_plugin.health.signals import OPERATORS, SIGNALS
from gpu_plugin.health.xids import XidPolicy

MAX_REASON = 128
"""Characters of the reason of a Kubernetes Event (API validation of events.k8s.io)."""


def advice(key: LatchKey, policy: XidPolicy, gpu: str | int) -> str:
    """What an operator is advised to do about an open latch of a GPU, which is named by its index or uuid."""
    xid = xid_number(key)
    return re.sub(r"\bID\b", str(gpu), SIGNALS[key.signal].action if xid is None else policy.judge(xid).advice)


def event_reason(signal: str, verdict: Verdict, standing: Verdict) -> str:
    """The CamelCase reason of the event that a signal's change to `verdict` is, where all signals come to `standing` then.

    `GpuXidFatal`, `GpuCordon`; `GpuXidOver` where it is over and something else stands, `GpuRecovered` where nothing does.
    """
    name = "".join(word.capitalize() for word in re.split(r"[^0-9A-Za-z]+", signal))
    if signal in OPERATORS:
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
    return int(key.part) if key.signal == "xid" and key.part.isdecimal() else None
