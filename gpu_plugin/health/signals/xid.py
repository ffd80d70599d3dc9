"""Xid errors: each has a latch of its own, by what the policy says of it and by what the driver asks for since."""

from enum import StrEnum
from typing import Self

from msgspec.structs import replace

from gpu_plugin.config.values import spell_duration
from gpu_plugin.health.actions import fatal_action
from gpu_plugin.health.context import Case, Context
from gpu_plugin.health.hysteresis import MINUTE, lately
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, LatchKey, Memory, Proof, Recovery, Verdict
from gpu_plugin.health.observation import Observation, Sample, XidEvent
from gpu_plugin.health.proof import after_recovery
from gpu_plugin.health.xids import REBOOT, RESET, Judgement, describe

APPLICATION_QUIET, QUIET = 600.0, 86400.0
"""Seconds without another Xid of the number that close what is an application's, and what is worth a look."""

EPISODE = 5.0
"""Seconds in which those of a number count once towards an escalation: one fault has a line for each link or channel it met.

A study of A100 and H100 GPUs takes so long for one error (Cui et al., Story of Two GPUs, SC '25; 95 % of NVLink errors are
told for no more than 1.2 s).
"""

_BURST = 1.0  # seconds in which an application's Xids are one: a failing pod raises hundreds


class Weighed(StrEnum):
    """What made an Xid more or less than it is by itself."""

    AS_IT_IS = ""
    RAISED = "raised"
    """It happened too often or came alone; or another came with it by which it is something else, be it worse or less."""
    LOWERED = "lowered"
    """The driver asked for nothing after it."""


class Happened(Memory, frozen=True):
    """When (Unix seconds) it happened lately: for `within` seconds the times count towards an escalation, 0: towards none.

    `asked` is whether the driver asked for a recovery since that makes a GPU unfit; `look`: it is to be asked again at once.
    """

    times: tuple[float, ...] = ()
    within: float = 0.0
    weighed: Weighed = Weighed.AS_IT_IS
    asked: bool = False
    look: bool = False

    @property
    def gathering(self) -> bool:
        """Whether the driver has news."""
        return self.look

    @property
    def lasting(self) -> bool:
        """Whether times count, though nothing is held."""
        return self.within > 0 and bool(self.times)

    @property
    def counted(self) -> object:
        """How often, and when at last: by the minute, so that a storm is not written down all the time."""
        return len(self.times), self.times[-1] // MINUTE if self.times else None

    def written(self) -> Self:
        """All but that a look is due: a process begins with one."""
        return replace(self, look=False) if self.look else self

    def shifted(self, by: float) -> Self:
        """With its times shifted."""
        return replace(self, times=tuple(at + by for at in self.times))


def xid(latch: Latch[Happened] | None, seen: Observation, ctx: Context) -> Latch[Happened] | None:
    """Opens with the Xid, by the policy's judgement; what the policy ignores leaves no latch.

    A FATAL one is DEGRADED once the driver says in a clean sample, the third after it at least, that it asks for no
    recovery, and never asked for one in between; a DEGRADED one is FATAL as soon as the driver asks for one. Neither where
    the verdict is firm. It closes by its class: after a time without another, or by `after_recovery`. Its times are remembered
    for as long as they count towards an escalation.
    """
    if isinstance(seen, XidEvent):
        return _happened(latch, seen.xid, ctx)
    if latch is None or not isinstance(seen, Sample):
        return latch
    memory = latch.memory
    if latch.verdict is Verdict.OK:
        return latch if memory.times and ctx.now - memory.times[-1] <= memory.within else None
    judged = ctx.policy.xids.judge(int(ctx.key.part))
    if judged.verdict is Verdict.OK:  # the operator's word changed
        return None
    known = _looked(latch, seen, judged, ctx)
    if known is None:
        times = lately(memory.times, ctx.now, judged.within)
        return Latch(Happened(times, judged.within)) if times and judged.within else None
    return _weigh(known, int(ctx.key.part), judged, ctx)


def until(latch: Latch[Happened]) -> float:
    """When it ends by itself unless another comes: Unix time in seconds."""
    return _last(latch) + (APPLICATION_QUIET if latch.proof is Proof.APPLICATION else QUIET)


def advice(case: Case) -> str:
    """What ends it; of one that came to be worse than it is by itself: by its repetition, or by what the driver asks for."""
    judged, latch = case.policy.xids.judge(int(case.key.part)), case.latch
    if latch.verdict > judged.verdict:
        if latch.proof is Proof.REBOOT:
            return REBOOT
        if latch.proof in (Proof.RESET, Proof.QUIET) and not judged.follows:
            return RESET
    return judged.advice


def _happened(latch: Latch[Happened] | None, number: int, ctx: Context) -> Latch[Happened] | None:
    judged = ctx.policy.xids.judge(number)
    if judged.verdict is Verdict.OK:
        return None
    known = latch
    if known is None or known.verdict is Verdict.OK:
        known = Latch(Happened(known.memory.times if known else ()), since=ctx.now)
    elif known.verdict is Verdict.APP and judged.count == 1 and not judged.follows and _last(known) > ctx.now - _BURST:
        return latch
    memory = known.memory
    same = judged.within and memory.times and 0 <= ctx.now - memory.times[-1] <= EPISODE
    times = lately(memory.times if same else (*memory.times, ctx.now), ctx.now, judged.within, judged.count)
    often = len(times) >= judged.count > 1
    alone = bool(judged.follows) and ctx.facts.nvswitch and not _follows(number, ctx.now, judged.follows, ctx)
    # That one was less says nothing of the next
    was = memory.weighed is Weighed.RAISED and judged.raised > judged.verdict
    raised = was or often or alone
    happened = Happened(
        times,
        judged.within,
        Weighed.RAISED if raised else Weighed.AS_IT_IS,
        memory.asked or fatal_action(ctx.action),
        judged.look,
    )
    return _weigh(known.again(happened), number, judged, ctx)


def _looked(latch: Latch[Happened], seen: Sample, judged: Judgement, ctx: Context) -> Latch[Happened] | None:
    """The latch after a sample, its verdict apart."""
    if latch.proof in (Proof.APPLICATION, Proof.QUIET) and not seen.fault and ctx.now >= until(latch):
        return None
    memory = latch.memory
    weighed, asked = memory.weighed, memory.asked or fatal_action(seen.recovery_action)
    if judged.follows and weighed is Weighed.RAISED and _follows(int(ctx.key.part), _last(latch), judged.follows, ctx):
        weighed = Weighed.AS_IT_IS
    if judged.brings and weighed is Weighed.AS_IT_IS and _brought(latch, *judged.brings, ctx):
        weighed = Weighed.RAISED
    if latch.verdict is not Verdict.APP:
        after = after_recovery(latch, seen, ctx)
        if after is None:
            return None
        latch, recovery = after, after.recovery
        if seen.recovery_action is None and seen.tells("recovery_action") and recovery.clean and not recovery.reset:
            # Before a reset, looks count in which the driver says that it asks for nothing
            latch = replace(latch, recovery=replace(recovery, clean=0))
        asks_nothing = seen.recovery_action == 0 and latch.recovery.clean >= CLEAN_SAMPLES and not asked
        if asks_nothing and latch.verdict is Verdict.FATAL:
            weighed = Weighed.LOWERED
    else:
        asked = memory.asked  # what was asked for before it was worth a look
    known = Happened(memory.times, memory.within, weighed, asked)
    return latch if known == memory else replace(latch, memory=known)


def _weigh(latch: Latch[Happened], number: int, judged: Judgement, ctx: Context) -> Latch[Happened]:
    """The latch with the verdict of all that is known now, and the words and the proof that go with it."""
    verdict, detail = judged.verdict, describe(number, judged.name if judged.listed else "unknown to this version")
    weighed = latch.memory.weighed
    if not judged.firm:
        if weighed is Weighed.RAISED and (judged.raised > verdict or judged.brings):
            verdict, detail = judged.raised, f"{detail}, {_how(judged)}"
        elif weighed is Weighed.LOWERED:
            verdict, detail = min(verdict, Verdict.DEGRADED), f"{detail}, after which the driver asks for no recovery"
        if judged.beside:
            other = ctx.open.get(LatchKey(judged.beside[0]))
            there = other is not None and other.verdict is not Verdict.OK
            was = weighed is not Weighed.LOWERED and latch.verdict >= judged.beside[1]
            if there or was:  # that it went away proves no reset
                verdict = max(verdict, judged.beside[1])
        if latch.memory.asked and verdict is Verdict.DEGRADED and not judged.follows:
            verdict = Verdict.FATAL
    proof = judged.proof(verdict)
    if (verdict, detail, proof) == (latch.verdict, latch.detail, latch.proof):
        return latch
    recovery = latch.recovery
    if latch.verdict <= Verdict.APP:  # for which nobody looked out for a reset
        recovery = Recovery(ctx.marks, clean=recovery.clean)
    return replace(latch, verdict=verdict, detail=detail, proof=proof, recovery=recovery)


def _how(judged: Judgement) -> str:
    if judged.brings:
        return f"together with Xid {' or '.join(map(str, sorted(judged.brings[0])))}"
    return "on its own" if judged.follows else f"{judged.count} times within {spell_duration(judged.within)}"


def _last(latch: Latch[Happened]) -> float:
    return latch.memory.times[-1] if latch.memory.times else latch.since


def _follows(number: int, then: float, within: float, ctx: Context) -> bool:
    """Whether another Xid came about then: what follows one may also be told first."""
    return any(other != number and abs(then - at) <= within for at, other in ctx.xids)


def _brought(latch: Latch[Happened], xids: frozenset[int], within: float, ctx: Context) -> bool:
    """Whether one of these came about when it happened at last."""
    return any(other in xids and abs(_last(latch) - at) <= within for at, other in ctx.xids)
