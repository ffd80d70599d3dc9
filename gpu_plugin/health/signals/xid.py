"""Xid errors: each has a latch of its own, by what the policy says of it and by what the driver asks for since."""

from dataclasses import replace

from gpu_plugin.config.values import spell_duration
from gpu_plugin.health.actions import fatal_action
from gpu_plugin.health.context import Context
from gpu_plugin.health.hysteresis import lately
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, LatchKey, Proof, Verdict
from gpu_plugin.health.observation import Observation, Sample, XidEvent
from gpu_plugin.health.proof import after_recovery
from gpu_plugin.health.xids import Judgement, describe

APPLICATION_QUIET, QUIET = 600.0, 86400.0
"""Seconds without another Xid of the number that close what is an application's, and what is worth a look."""

RAISED, LOWERED = 1.0, -1.0
"""What `Latch.value` says: it happened too often or came alone, or the driver asked for nothing after it."""

_BURST = 1.0  # seconds in which an application's Xids are one: a failing pod raises hundreds


def xid(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Opens with the Xid, by the policy's judgement; what the policy ignores leaves no latch.

    A FATAL one is DEGRADED once the driver says in a clean sample, the third after it at least, that it asks for no
    recovery, and never asked for one in between; a DEGRADED one is FATAL as soon as the driver asks for one. Neither where
    the verdict is firm. It closes by its class: after a time without another, or by `after_recovery`.
    """
    if isinstance(seen, XidEvent):
        return _happened(latch, seen.xid, ctx)
    if latch is None or not isinstance(seen, Sample):
        return latch
    judged = ctx.policy.xids.judge(int(ctx.key.part))
    if judged.verdict is Verdict.OK:  # the operator's word changed
        return None
    known = _looked(latch, seen, judged, ctx)
    return known and _weighed(known, int(ctx.key.part), judged, ctx)


def _happened(latch: Latch | None, number: int, ctx: Context) -> Latch | None:
    judged = ctx.policy.xids.judge(number)
    if judged.verdict is Verdict.OK:
        return None
    if latch is None:
        known = Latch(since=ctx.now)
    elif latch.verdict is Verdict.APP and judged.count == 1 and not judged.follows and _last(latch) > ctx.now - _BURST:
        return latch
    else:
        known = latch
    times = lately((*known.times, ctx.now), ctx.now, judged.within, judged.count)
    often = len(times) >= judged.count > 1
    alone = bool(judged.follows) and ctx.facts.nvswitch and not _follows(number, ctx.now, judged.follows, ctx)
    known = known.again(
        times=times,
        value=RAISED if known.value == RAISED or often or alone else None,
        asked=known.asked or fatal_action(ctx.before.recovery_action if ctx.before else None),
        streak=int(judged.look),  # for another look soon
    )
    return _weighed(known, number, judged, ctx)


def _looked(latch: Latch, seen: Sample, judged: Judgement, ctx: Context) -> Latch | None:
    """The latch after a sample, its verdict apart."""
    if latch.proof in (Proof.APPLICATION, Proof.QUIET) and not seen.fault:
        quiet = APPLICATION_QUIET if latch.proof is Proof.APPLICATION else QUIET
        if ctx.now - _last(latch) >= quiet:
            return None
    if judged.follows and latch.value == RAISED and _follows(int(ctx.key.part), _last(latch), judged.follows, ctx):
        latch = replace(latch, value=None)
    if latch.verdict is Verdict.APP:
        return replace(latch, streak=0) if latch.streak else latch
    known = after_recovery(latch, seen, ctx)
    if known is None:
        return None
    if seen.recovery_action is None and known.streak and not known.reset:
        known = replace(
            known, streak=0
        )  # before a reset, looks count in which the driver says that it asks for nothing
    asks_nothing = seen.recovery_action == 0 and known.streak >= CLEAN_SAMPLES and not known.asked
    return replace(known, value=LOWERED) if asks_nothing and known.verdict is Verdict.FATAL else known


def _weighed(latch: Latch, number: int, judged: Judgement, ctx: Context) -> Latch:
    """The latch with the verdict of all that is known now, and the words and the proof that go with it."""
    verdict, detail = judged.verdict, describe(number, judged.name if judged.listed else "unknown to this version")
    if not judged.firm:
        if latch.value == RAISED and judged.raised > verdict:
            verdict, detail = judged.raised, f"{detail}, {_how(judged)}"
        elif latch.value == LOWERED:
            verdict, detail = min(verdict, Verdict.DEGRADED), f"{detail}, after which the driver asks for no recovery"
        if judged.beside:
            other = ctx.open.get(LatchKey(judged.beside[0]))
            there = other is not None and other.verdict is not Verdict.OK
            was = latch.value != LOWERED and latch.verdict >= judged.beside[1]  # that it went away proves no reset
            if there or was:
                verdict = max(verdict, judged.beside[1])
        if latch.asked and verdict is Verdict.DEGRADED:
            verdict = Verdict.FATAL
    proof = judged.proof(verdict)
    if (verdict, detail, proof) == (latch.verdict, latch.detail, latch.proof):
        return latch
    changed = replace(latch, verdict=verdict, detail=detail, proof=proof)
    if latch.verdict <= Verdict.APP:  # for which nobody looked out for a reset
        return replace(changed, marks=ctx.marks, reset=False, rebound=False)
    return changed


def _how(judged: Judgement) -> str:
    return "on its own" if judged.follows else f"{judged.count} times within {spell_duration(judged.within)}"


def _last(latch: Latch) -> float:
    return latch.times[-1] if latch.times else latch.since


def _follows(number: int, then: float, within: float, ctx: Context) -> bool:
    """Whether another Xid came about then: what follows one may also be told first."""
    return any(other != number and abs(then - at) <= within for at, other in ctx.xids)
