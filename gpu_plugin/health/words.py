"""What is said of signals beyond their own words: advice, and names for events."""

import re

from gpu_plugin.health.latch import Latch, LatchKey, Proof, Verdict
from gpu_plugin.health.signals import OPERATORS, SIGNALS
from gpu_plugin.health.xids import REBOOT, RESET, Judgement, XidPolicy

MAX_REASON = 128
"""Characters of the reason of a Kubernetes Event (API validation of events.k8s.io)."""


def advice(key: LatchKey, policy: XidPolicy, gpu: str, latch: Latch) -> str:
    """What an operator is advised to do about an open latch of a GPU, which commands name by its uuid; empty for nothing."""
    if key.signal == "maintenance" and latch.value:  # resumed
        return ""
    xid = xid_number(key)
    said = SIGNALS[key.signal].action if xid is None else _xid_advice(policy.judge(xid), latch)
    return re.sub(r"\bID\b", gpu, said if isinstance(said, str) else said(latch))


def _xid_advice(judged: Judgement, latch: Latch) -> str:
    """What ends an Xid that came to be worse than it is by itself: by its repetition, or by what the driver asks for."""
    if latch.verdict > judged.verdict:
        if latch.proof is Proof.REBOOT:
            return REBOOT
        if latch.proof in (Proof.RESET, Proof.QUIET):
            return RESET
    return judged.advice


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
