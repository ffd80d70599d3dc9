"""Xid errors: each has a latch of its own, by what the policy says of it and by what the driver asks for since."""

import re
from enum import StrEnum
from typing import Self

from msgspec.structs import replace

from gpu_plugin.config.values import spell_duration
from gpu_plugin.health.hysteresis import MINUTE, lately
from gpu_plugin.health.latch import (
    CLEAN_SAMPLES,
    RESET,
    Latch,
    LatchKey,
    Memory,
    Moment,
    Proof,
    Recovery,
    Span,
    Verdict,
    merged,
)
from gpu_plugin.health.observation import Sample, XidEvent
from gpu_plugin.health.policy import Judgement, describe
from gpu_plugin.health.proof import after_recovery, recovered
from gpu_plugin.health.signal import Case, Context, OperatorInfluence, SignalKind, signal
from gpu_plugin.health.signals.recovery_action import asks

NAME = "xid"

APPLICATION_QUIET = 600.0  # seconds without another Xid of the number that close what is an application's
QUIET = 86400.0  # seconds without another that close what is worth a look

EPISODE = 5.0
"""Seconds in which those of a number count once towards an escalation: one fault has a line for each link or channel it met.

A study of A100 and H100 GPUs takes so long for one error (Cui et al., Story of Two GPUs, SC '25; 95 % of NVLink errors are
told for no more than 1.2 s). An episode goes on while the next comes within that time, for `PERSISTING` seconds at most.
"""

PERSISTING = 60.0
"""Seconds after which a fault that is reported all the time counts again: one that does not end is more than one fault."""

_BURST = 1.0  # seconds in which an application's Xids are one: a failing pod raises hundreds


class Adjustment(StrEnum):
    """The reason why an Xid is judged as more or less than it is by itself."""

    AS_IT_IS = ""
    RAISED = "raised"
    """It happened too often or came alone; or another came with it by which it is something else, be it worse or less."""
    LOWERED = "lowered"
    """The driver asked for nothing after it."""


class Occurrences(Memory, frozen=True):
    """When (Unix seconds) its episodes began lately: for `within` seconds they count towards an escalation, 0: towards none.

    `last` is when it was told last, None where that was not written down. `asked` is whether the driver asked for a recovery
    since that makes a GPU unfit; `look`: it is to be asked again at once.
    """

    times: tuple[Moment, ...] = ()
    within: Span = 0.0
    weighed: Adjustment = Adjustment.AS_IT_IS
    asked: bool = False
    look: bool = False
    last: Moment | None = None

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
        """The Xid's adjustment, how often it happened, and when last: by the minute, so that a storm is written seldom."""
        return self.weighed, self.asked, len(self.times), None if self.last is None else self.last // MINUTE

    def stored(self) -> Self:
        """The memory without the look that is due: a process begins with one."""
        return replace(self, look=False) if self.look else self

    def joined(self, other: Self) -> Self:
        """The memory with those episodes too."""
        return replace(
            self,
            times=merged(self.times, other.times),
            asked=self.asked or other.asked,
            last=max((at for at in (self.last, other.last) if at is not None), default=None),
        )


def until(latch: Latch[Occurrences]) -> float:
    """When it ends by itself unless another comes: Unix time in seconds."""
    return last(latch) + (APPLICATION_QUIET if latch.proof is Proof.APPLICATION else QUIET)


def advice(case: Case) -> str:
    """Advice on what ends an Xid, also one that is worse than by itself: by its repetition, or by what the driver asks for."""
    judged, latch = case.policy.xids.judge(int(case.key.part)), case.latch
    if latch.verdict > judged.verdict and latch.proof is Proof.QUIET and not judged.follows:
        return RESET  # so often it is no application's, whatever the catalogue says of one
    return judged.advised(latch.verdict, latch.proof)


@signal(
    NAME,
    SignalKind.EVENT,
    advice,
    memory=Occurrences(),
    sees=(Sample, XidEvent),
    until=until,
    parts=re.compile("[0-9]{1,20}"),
    recovers=True,
    say=OperatorInfluence.ENABLED,
)
def xid(latch: Latch[Occurrences] | None, seen: Sample | XidEvent, ctx: Context) -> Latch[Occurrences] | None:
    """Opens with the Xid, by the policy's judgement; what the policy ignores leaves no latch.

    A FATAL one is DEGRADED once the driver says in a clean sample, the third after it at least, that it asks for no
    recovery, and never asked for one in between; a DEGRADED one is FATAL as soon as the driver asks for one. Neither where
    the verdict is firm. It closes by its class: after a time without another, or by `after_recovery`. Its times are remembered
    for as long as they count towards an escalation, or until a reset is proven. What another Xid makes of it is decided as soon
    as the second of them comes.
    """
    if isinstance(seen, XidEvent):
        own = seen.xid == int(ctx.key.part)
        return _happened(latch, seen.xid, ctx) if own else latch and _accompanied(latch, ctx)
    if latch is None:
        return None
    memory = latch.memory
    if latch.verdict <= Verdict.APP and memory.times and recovered(ctx.marks, seen, ctx.now):
        memory = replace(memory, times=())
        latch = replace(latch, memory=memory)
    if latch.verdict is Verdict.OK:
        return latch if memory.times and ctx.now - memory.times[-1] <= memory.within else None
    judged = ctx.policy.xids.judge(int(ctx.key.part))
    if judged.verdict is Verdict.OK:  # the operator's word changed
        return None
    if latch.proof in (Proof.APPLICATION, Proof.QUIET) and not seen.fault and ctx.now >= until(latch):
        times = () if latch.recovery.reset else lately(memory.times, ctx.now, judged.within)
        return Latch(Occurrences(times, judged.within)) if times and judged.within else None
    known = _looked(latch, seen, ctx)
    return known and _weigh(known, int(ctx.key.part), judged, ctx)


def _happened(latch: Latch[Occurrences] | None, number: int, ctx: Context) -> Latch[Occurrences] | None:
    judged = ctx.policy.xids.judge(number)
    if judged.verdict is Verdict.OK:
        return None
    known = latch
    if known is None or known.verdict is Verdict.OK:
        known = Latch(Occurrences(known.memory.times if known else ()), since=ctx.now)
    elif known.verdict is Verdict.APP and judged.count == 1 and not judged.follows and last(known) > ctx.now - _BURST:
        return latch
    memory = known.memory
    before = () if known.recovery.reset else memory.times  # those before a reset say nothing of the GPU after it
    same = judged.within > 0 and _goes_on(known, before, ctx.now)
    times = lately(before if same else (*before, ctx.now), ctx.now, judged.within, judged.count)
    often = len(times) >= judged.count > 1
    unfollowed = bool(judged.follows) and ctx.facts.nvswitch and not _follows(number, ctx.now, judged.follows, ctx)
    brought = judged.brings is not None and _brought(ctx.now, *judged.brings, ctx)
    # That one was less says nothing of the next
    was = memory.weighed is Adjustment.RAISED and judged.raised > judged.verdict
    raised = was or often or unfollowed or brought
    happened = Occurrences(
        times,
        judged.within,
        Adjustment.RAISED if raised else Adjustment.AS_IT_IS,
        memory.asked or asks(ctx.action, ctx),
        judged.look,
        ctx.now,
    )
    return _weigh(known.renewed(happened), number, judged, ctx)


def _accompanied(latch: Latch[Occurrences], ctx: Context) -> Latch[Occurrences]:
    """The latch after another Xid, by which it may be something else."""
    number = int(ctx.key.part)
    judged, weighed = ctx.policy.xids.judge(number), latch.memory.weighed
    if latch.verdict is Verdict.OK or judged.verdict is Verdict.OK:
        return latch
    if judged.follows and weighed is Adjustment.RAISED and _follows(number, last(latch), judged.follows, ctx):
        weighed = Adjustment.AS_IT_IS
    elif judged.brings and weighed is Adjustment.AS_IT_IS and _brought(last(latch), *judged.brings, ctx):
        weighed = Adjustment.RAISED
    else:
        return latch
    return _weigh(replace(latch, memory=replace(latch.memory, weighed=weighed)), number, judged, ctx)


def _looked(latch: Latch[Occurrences], seen: Sample, ctx: Context) -> Latch[Occurrences] | None:
    """The latch after a sample, its verdict apart; None once it is proven over."""
    memory = latch.memory
    weighed, asked = memory.weighed, memory.asked or asks(seen.recovery_action, ctx)
    if latch.verdict is not Verdict.APP:
        after = after_recovery(latch, seen, ctx)
        if after is None:
            return None
        latch, recovery = after, after.recovery
        if seen.recovery_action is None and seen.asked_for("recovery_action") and recovery.clean and not recovery.reset:
            # Before a reset, looks count in which the driver says that it asks for nothing
            latch = replace(latch, recovery=replace(recovery, clean=0))
        asks_nothing = seen.recovery_action == 0 and latch.recovery.clean >= CLEAN_SAMPLES and not asked
        if asks_nothing and latch.verdict is Verdict.FATAL:
            weighed = Adjustment.LOWERED
    else:
        asked = memory.asked  # what was asked for before it was worth a look
    known = replace(memory, weighed=weighed, asked=asked, look=False)
    return latch if known == memory else replace(latch, memory=known)


def _weigh(latch: Latch[Occurrences], number: int, judged: Judgement, ctx: Context) -> Latch[Occurrences]:
    """The latch with the verdict of all that is known now, and the words and the proof that go with it."""
    verdict, detail = judged.verdict, describe(number, judged.name if judged.listed else "unknown to this version")
    weighed = latch.memory.weighed
    if not judged.firm:
        if weighed is Adjustment.RAISED and (judged.raised > verdict or judged.brings):
            verdict, detail = judged.raised, f"{detail}, {_how(judged)}"
        elif weighed is Adjustment.LOWERED:
            verdict, detail = min(verdict, Verdict.DEGRADED), f"{detail}, after which the driver asks for no recovery"
        if judged.beside:
            other = ctx.open.get(LatchKey(judged.beside[0]))
            there = other is not None and other.verdict is not Verdict.OK
            was = weighed is not Adjustment.LOWERED and latch.verdict >= judged.beside[1]
            if there or was:  # that it went away proves no reset
                verdict = max(verdict, judged.beside[1])
        if latch.memory.asked and verdict is Verdict.DEGRADED and not judged.follows:
            verdict = Verdict.FATAL
    proof = judged.proof(verdict)
    if (verdict, proof) == (latch.verdict, latch.proof):
        return replace(latch, detail=detail)
    recovery = latch.recovery
    if latch.verdict is Verdict.OK:  # it is new: nobody looked out for a reset yet
        recovery = Recovery(ctx.marks, clean=recovery.clean)
    return replace(latch, verdict=verdict, detail=detail, proof=proof, recovery=recovery)


def _how(judged: Judgement) -> str:
    if judged.brings:
        return f"together with Xid {' or '.join(map(str, sorted(judged.brings[0])))}"
    return "on its own" if judged.follows else f"{judged.count} times within {spell_duration(judged.within)}"


def last(latch: Latch[Occurrences]) -> float:
    """When it was told last, as far as is known: Unix time in seconds."""
    memory = latch.memory
    if memory.last is not None:
        return memory.last
    return memory.times[-1] if memory.times else latch.since


def _goes_on(latch: Latch[Occurrences], times: tuple[float, ...], now: float) -> bool:
    """Whether one that comes now is of the episode that began with the last of these times."""
    return bool(times) and 0 <= now - last(latch) <= EPISODE and now - times[-1] <= PERSISTING


def _follows(number: int, then: float, within: float, ctx: Context) -> bool:
    """Whether another Xid came about then, on the same MIG device or the whole GPU: what follows one may also be told first."""
    return any(
        other != number and device in ("", ctx.key.device) and abs(then - at) <= within
        for (other, device), at in ctx.xids.items()
    )


def _brought(then: float, xids: frozenset[int], within: float, ctx: Context) -> bool:
    """Whether one of these came about then: on the same MIG device, or for a latch of the whole GPU on the whole GPU."""
    return any(
        other in xids and device == ctx.key.device and abs(then - at) <= within
        for (other, device), at in ctx.xids.items()
    )
