"""The recovery action that the driver requests for a GPU."""

from collections.abc import Mapping

from msgspec.structs import replace

from gpu_plugin.devices.nvml_h import RecoveryAction
from gpu_plugin.health.hysteresis import Graded, graded
from gpu_plugin.health.latch import REBOOT, RESET, Latch, LatchKey, Moment, Verdict
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.proof import fatal_action
from gpu_plugin.health.signal import Case, Context, SignalKind, signal

NAME = "recovery-action"

# Seconds after an Xid within which a request of the driver is attributed to that Xid: a round of looks and a margin
FOLLOWS = 30.0

# Seconds after a request within which its Xid may come: a look may be faster than the thread that waits for the Xid
LATE = 1.0

EXCUSED = 600.0  # Seconds for which such an Xid excuses the request. A request that lasts longer has another cause.

_REQUEST = LatchKey(NAME)

# nvmlDeviceGpuRecoveryAction_t (nvml.h, NVML_GPU_RECOVERY_ACTION_*) without NONE, which is 0
_ASKS: Mapping[int, str] = {
    RecoveryAction.GPU_RESET: "for a reset of the GPU",
    RecoveryAction.NODE_REBOOT: "for a reboot of the node",
    RecoveryAction.DRAIN_P2P: "to drain the GPU's peer-to-peer traffic, so that new work is kept away while what runs goes on",
    RecoveryAction.DRAIN_AND_RESET: "to drain the GPU and then reset it",
    RecoveryAction.RECOVER_IMEX_DOMAIN: "for the recovery of its IMEX domain",
    RecoveryAction.BUS_RESET: "for a reset of the GPU's bus",
    RecoveryAction.SYSTEM_REBOOT: "for a reboot of the whole system",
}


_ADVICE: Mapping[int, str] = {
    RecoveryAction.GPU_RESET: RESET,
    RecoveryAction.NODE_REBOOT: REBOOT,
    RecoveryAction.DRAIN_P2P: "let its pods end; new pods do not get it until then",
    RecoveryAction.DRAIN_AND_RESET: f"let its pods end; {RESET}",
    RecoveryAction.RECOVER_IMEX_DOMAIN: "look at IMEX and its log on this node and on the nodes that it shares memory with",
    RecoveryAction.BUS_RESET: "drain the node and reset the GPU's bus, or reboot the node",
    RecoveryAction.SYSTEM_REBOOT: "drain the nodes of the system and reboot all of it",
}


class RequestedAction(Graded, frozen=True):
    """`action` is the last request of the driver; `excused` is the Unix time in seconds until which an Xid excuses it."""

    action: int = 0
    excused: Moment | None = None


def advice(case: Case) -> str:
    """Return advice to the operator about the action that the driver requests."""
    known = _ADVICE.get(case.latch.memory.action)
    return known or "look the action up in the documentation of the driver's NVML, and drain the GPU"


@signal(
    NAME,
    SignalKind.READING,
    advice,
    memory=RequestedAction(),
    asks=("recovery_action",),
    clears="the driver asks for nothing at three checks in a row",
)
def recovery_action(latch: Latch[RequestedAction] | None, seen: Sample, ctx: Context) -> Latch[RequestedAction] | None:
    """Opens at once on any action; closes after three looks in a row at which the driver requested none.

    Another action of the same verdict replaces the words at once, an action of a better verdict after three looks. A request
    that follows an Xid that the operator configured as no fault is DEGRADED at most for ten minutes. Only Xids whose recovery
    action can be a reset or more excuse a request.
    """
    action = seen.recovery_action
    if not action:
        return graded(latch, ctx, RequestedAction(), grade=None if action is None else Verdict.OK, detail="")
    grade, detail = Verdict.FATAL if fatal_action(action) else Verdict.DEGRADED, words(action)
    excused = _excused(latch, action, ctx) if grade is Verdict.FATAL else None
    if excused is not None and excused > ctx.now:
        grade, detail = Verdict.DEGRADED, f"{detail}, after an Xid that is configured not to be a fault"
        if latch is not None and latch.verdict is Verdict.FATAL and latch.memory.excused is None:
            memory = RequestedAction(action=action, excused=excused)
            return replace(latch, verdict=grade, detail=detail, memory=memory)  # the request was faster than its Xid
    after = graded(latch, ctx, RequestedAction(), grade=grade, detail=detail)
    if after is None or grade < after.verdict or after.memory.action == action:
        return after
    return after.renewed(replace(after.memory, action=action, excused=excused, row=0), detail=detail)


def _excused(latch: Latch[RequestedAction] | None, action: int, ctx: Context) -> float | None:
    """Return the Unix time in seconds until which recent Xids excuse this request, None if they do not."""
    asked = ctx.now
    if latch is not None and latch.verdict is not Verdict.OK and latch.memory.action == action:
        if latch.memory.excused is not None or ctx.now - latch.since > FOLLOWS:
            return latch.memory.excused
        asked = latch.since
    judged = (ctx.policy.xids.judge(xid) for (xid, _), at in ctx.xids.items() if -LATE <= asked - at <= FOLLOWS)
    before = [j for j in judged if j.resets]
    excused = any(j.firm and j.verdict < Verdict.FATAL for j in before) and all(
        j.verdict < Verdict.FATAL for j in before
    )
    return ctx.now + EXCUSED if excused else None


def asks(action: int | None, ctx: Context) -> bool:
    """Return True if the driver requests a recovery that makes the GPU unfit, and no Xid excuses the request."""
    if not fatal_action(action):
        return False
    request = ctx.open.get(_REQUEST)
    excused = request is not None and request.memory.action == action and (request.memory.excused or 0.0) > ctx.now
    return not excused


def words(action: int) -> str:
    """Return words for people about the action of this number."""
    return f"the driver asks {_ASKS.get(action) or f'for recovery action {action}, which this version does not know'}"
