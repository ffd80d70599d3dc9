"""Xid errors. Each number has its own latch. The policy and the driver's recovery action decide the verdict."""

import re
from enum import StrEnum
from typing import ClassVar, Self

from msgspec.structs import replace

from gpu_plugin.config.times import duration
from gpu_plugin.config.values import spell_duration
from gpu_plugin.health.hysteresis import MINUTE, recent
from gpu_plugin.health.latch import RESET, XID, Latch, LatchKey, Memory, Moment, Proof, Recovery, Span, Verdict, merged
from gpu_plugin.health.observation import Sample, XidEvent
from gpu_plugin.health.policy import describe
from gpu_plugin.health.proof import PROVEN_SECONDS, UNKNOWN, AsksNothing, after_recovery, recovered
from gpu_plugin.health.signal import Case, Context, OperatorInfluence, SignalKind, signal
from gpu_plugin.health.signals.recovery_action import asks
from gpu_plugin.health.xid_table import Companions, XidRow

APPLICATION_QUIET = 600.0  # seconds without another Xid of the number that close what is an application's
QUIET = 86400.0  # seconds without another that close what is worth a look

# Seconds within which Xids of the same number are one episode, which counts once towards an escalation.
# A fault causes a line for each link or channel that met it. Cui et al. (Story of Two GPUs, SC '25) use the same time
# for A100 and H100 GPUs, where 95 % of NVLink errors last 1.2 s at most. Each further Xid extends the episode, up to
# `PERSISTING` seconds.
EPISODE = 5.0

PERSISTING = 60.0  # Seconds after which a fault that is reported continuously counts again
_BURST = 1.0  # seconds in which an application's Xids are one: a failing pod raises hundreds


class Adjustment(StrEnum):
    """The reason why an Xid is judged as more or less than it is by itself."""

    AS_IT_IS = ""
    RAISED = "raised"  # It happened too often, or together with an Xid that makes it better or worse
    EXPLAINED = "explained"  # The Xids that would raise it came before it as well: they are an application's
    LOWERED = "lowered"  # The driver asked for nothing after it


class Occurrences(Memory, frozen=True):
    """The start times (Unix seconds) of recent episodes, which count towards an escalation for `within` seconds.

    `last` is the time of the last Xid, None if it was not stored. `asked` is True if the driver has asked since for a recovery
    that makes a GPU unfit. `unasked` is the time for which it has asked for nothing. `look` requests a look at once.
    """

    times: tuple[Moment, ...] = ()
    within: Span = 0.0
    weighed: Adjustment = Adjustment.AS_IT_IS
    asked: bool = False
    look: bool = False
    last: Moment | None = None
    unasked: AsksNothing = UNKNOWN

    # The next process begins with a look, and counts the driver's silence from zero
    unstored: ClassVar[tuple[str, ...]] = ("look", "unasked")

    @property
    def gathering(self) -> bool:
        """Whether a look at once is due."""
        return self.look

    @property
    def lasting(self) -> bool:
        """Whether the times count although the latch is closed."""
        return self.within > 0 and bool(self.times)

    @property
    def counted(self) -> object:
        """The parts that are stored when they change. The last time is rounded to minutes, so that a storm is stored seldom."""
        return self.weighed, self.asked, len(self.times), None if self.last is None else self.last // MINUTE

    def joined(self, other: Self) -> Self:
        """The memory with the other's episodes added."""
        return replace(
            self,
            times=merged(self.times, other.times),
            asked=self.asked or other.asked,
            last=max((at for at in (self.last, other.last) if at is not None), default=None),
        )


def until(latch: Latch[Occurrences]) -> float:
    """Unix time in seconds at which the latch closes without another Xid."""
    return last(latch) + (APPLICATION_QUIET if latch.proof is Proof.APPLICATION else QUIET)


def last(latch: Latch[Occurrences]) -> float:
    """Unix time in seconds of the last Xid, as far as it is known."""
    memory = latch.memory
    if memory.last is not None:
        return memory.last
    return memory.times[-1] if memory.times else latch.since


def advice(case: Case) -> str:
    """Advice to the operator that matches the verdict, also after an escalation or a request of the driver."""
    row, latch = case.policy.xids.judge(int(case.key.part)), case.latch
    if row.count > 1 and latch.verdict > row.verdict and latch.proof is Proof.QUIET:
        return RESET  # the catalogue's action is for a single one
    return row.advised(latch.verdict, latch.proof)


def lowered_by(case: Case) -> str:
    """The way in which a driver can make a FATAL Xid DEGRADED, as a sentence; empty if it cannot."""
    row, facts, memory = case.policy.xids.judge(int(case.key.part)), case.facts, case.latch.memory
    linked = facts.says_action and row.answered_by(facts.driver_branch)
    if case.latch.verdict is not Verdict.FATAL or not linked or row.firm or memory.asked:
        return ""
    seconds = duration(PROVEN_SECONDS), duration(memory.unasked.seconds)
    return "It becomes DEGRADED if the driver asks for nothing for {} ({} of it so far).".format(*seconds)


@signal(
    XID,
    SignalKind.EVENT,
    advice,
    memory=Occurrences(),
    sees=(Sample, XidEvent),
    until=until,
    parts=re.compile("[0-9]{1,20}"),
    recovers=True,
    influence=OperatorInfluence.ENABLED,
)
def xid(latch: Latch[Occurrences] | None, seen: Sample | XidEvent, ctx: Context) -> Latch[Occurrences] | None:
    """Opens with the Xid, with the policy's verdict. An Xid that the policy ignores leaves no latch.

    The latch closes by its class: after a time without another Xid, or by `after_recovery`. Unless the verdict is firm, the
    driver changes it: a request for a recovery makes DEGRADED FATAL, and `PROVEN_SECONDS` without a request make FATAL
    DEGRADED, if the recovery action follows this Xid.

    Times are kept while they count towards an escalation, and dropped after a reset.
    """
    if latch is None and isinstance(seen, Sample):
        return None
    number = int(ctx.key.part)
    row = ctx.policy.xids.judge(number)
    if isinstance(seen, XidEvent):
        return _happened(latch, row, ctx) if seen.xid == number else latch and _accompanied(latch, row, ctx)
    assert latch is not None
    if latch.verdict <= Verdict.APP and latch.memory.times and recovered(ctx.marks, seen, ctx.now):
        latch = replace(latch, memory=replace(latch.memory, times=()))
    times = latch.memory.times
    if latch.verdict is Verdict.OK:
        return latch if times and ctx.now - times[-1] <= latch.memory.within else None
    if row.verdict is Verdict.OK:  # the policy changed
        return None
    if latch.proof in (Proof.APPLICATION, Proof.QUIET) and seen.core_answered and ctx.now >= until(latch):
        times = () if latch.recovery.ended_before else recent(times, ctx.now, row.within)
        return Latch(Occurrences(times, row.within)) if times and row.within else None
    return _looked(latch, seen, row, ctx)


def _happened(latch: Latch[Occurrences] | None, row: XidRow, ctx: Context) -> Latch[Occurrences] | None:
    """The latch after another Xid of its number."""
    if row.verdict is Verdict.OK:
        return None
    if latch is None or latch.verdict is Verdict.OK:
        latch = Latch(Occurrences(latch.memory.times if latch else ()), since=ctx.now)
    elif latch.verdict is Verdict.APP and row.count == 1 and last(latch) > ctx.now - _BURST:
        return latch
    memory = latch.memory
    before = () if latch.recovery.ended_before else memory.times  # a reset ended what happened before it
    same = row.within > 0 and _goes_on(latch, before, ctx.now)
    times = recent(before if same else (*before, ctx.now), ctx.now, row.within, row.count)
    stays = memory.weighed is Adjustment.RAISED and row.raised > row.verdict
    weighed = Adjustment.AS_IT_IS  # a lowered verdict does not carry over to the next Xid
    if stays or len(times) >= row.count > 1:
        weighed = Adjustment.RAISED
    elif row.brings is not None and row.brings.later:
        weighed = Adjustment.EXPLAINED if _kept_coming(row.brings, ctx) else weighed
    elif row.brings is not None and _came(row.brings, ctx.now - row.brings.within, ctx.now, ctx):
        weighed = Adjustment.RAISED
    asked = memory.asked or asks(ctx.action, ctx)
    return _judge(latch.renewed(Occurrences(times, row.within, weighed, asked, row.look, ctx.now)), row, ctx)


def _accompanied(latch: Latch[Occurrences], row: XidRow, ctx: Context) -> Latch[Occurrences]:
    """The latch after an Xid of another number, which may raise it."""
    brings, then = row.brings, last(latch)
    if brings is None or Verdict.OK in (latch.verdict, row.verdict) or latch.memory.weighed is not Adjustment.AS_IT_IS:
        return latch
    if not _came(brings, then if brings.later else then - brings.within, then + brings.within, ctx):
        return latch
    return _judge(replace(latch, memory=replace(latch.memory, weighed=Adjustment.RAISED)), row, ctx)


def _looked(latch: Latch[Occurrences], seen: Sample, row: XidRow, ctx: Context) -> Latch[Occurrences] | None:
    """The latch after a look; None once it is proven over."""
    memory = replace(latch.memory, look=False)
    if latch.verdict is not Verdict.APP:  # a request after an application's error is for something else
        after = after_recovery(latch, seen, ctx)
        if after is None:
            return None
        latch, memory = after, replace(memory, asked=memory.asked or asks(seen.recovery_action, ctx))
    if latch.verdict is Verdict.FATAL and not memory.asked and row.answered_by(ctx.facts.driver_branch):
        memory = replace(memory, unasked=memory.unasked.after(seen, ctx))
        if memory.unasked.is_proven:
            memory = replace(memory, weighed=Adjustment.LOWERED)
    return _judge(latch if memory == latch.memory else replace(latch, memory=memory), row, ctx)


def _judge(latch: Latch[Occurrences], row: XidRow, ctx: Context) -> Latch[Occurrences]:
    """The latch with the verdict, the words and the proof that follow from the policy, the memory and the other signals."""
    verdict, memory = row.verdict, latch.memory
    detail = describe(int(ctx.key.part), row.name or "unknown to this version")
    if not row.firm:
        if memory.weighed is Adjustment.RAISED and (row.raised > verdict or row.brings):
            verdict, detail = row.raised, f"{detail}, {_how(row)}"
        elif memory.weighed is Adjustment.LOWERED and row.answered_by(ctx.facts.driver_branch):
            verdict, detail = min(verdict, Verdict.DEGRADED), f"{detail}, after which the driver asks for no recovery"
        if not ctx.facts.says_action:
            verdict = max(verdict, row.silent)
        if row.beside is not None and _holds(row.beside, latch, ctx):
            verdict = max(verdict, row.beside[1])
        if memory.asked and verdict is Verdict.DEGRADED and row.resets:
            verdict = Verdict.FATAL
    proof = row.proof(verdict)
    if (verdict, proof, detail) == (latch.verdict, latch.proof, latch.detail):
        return latch
    recovery = latch.recovery
    if latch.verdict is Verdict.OK:  # it is new: no look searched for a reset yet
        recovery = Recovery(ctx.marks, clean=recovery.clean)
    return replace(latch, verdict=verdict, detail=detail, proof=proof, recovery=recovery)


def _holds(beside: tuple[str, Verdict], latch: Latch[Occurrences], ctx: Context) -> bool:
    """Whether the signal of this name is open, or was open and made it FATAL: its end proves no reset."""
    name, verdict = beside
    other = ctx.open.get(LatchKey(name))
    if other is not None and other.verdict is not Verdict.OK:
        return True
    return verdict is latch.verdict is Verdict.FATAL and latch.memory.weighed is not Adjustment.LOWERED


def _how(row: XidRow) -> str:
    if row.brings is not None:
        return f"together with Xid {' or '.join(map(str, sorted(row.brings.xids)))}"
    return f"{row.count} times within {spell_duration(row.within)}"


def _goes_on(latch: Latch[Occurrences], times: tuple[float, ...], now: float) -> bool:
    """Whether an Xid at `now` belongs to the episode that began at the last of these times."""
    return bool(times) and 0 <= now - last(latch) <= EPISODE and now - times[-1] <= PERSISTING


def _kept_coming(brings: Companions, ctx: Context) -> bool:
    """Whether one of these Xids began to come more than `_BURST` ago, and came in the last ten minutes.

    A shorter time says nothing: the driver may report errors of one instant in any order.
    """
    return any(
        number in brings.xids
        and device == ctx.key.device
        and at >= ctx.now - APPLICATION_QUIET
        and min(at, _began(number, at, ctx)) < ctx.now - _BURST
        for (number, device), at in ctx.xids.items()
    )


def _began(number: int, last: float, ctx: Context) -> float:
    """Unix time in seconds at which the Xid of this number came first, as far as it is open; else `last`."""
    latch = ctx.open.get(LatchKey(XID, str(number), ctx.key.device))
    return last if latch is None or latch.verdict is Verdict.OK else latch.since


def _came(brings: Companions, since: float, until: float, ctx: Context) -> bool:
    """Whether one of these Xids came in that time, on the same MIG device or, for the whole GPU, on the whole GPU."""
    return any(
        number in brings.xids and device == ctx.key.device and since <= at <= until
        for (number, device), at in ctx.xids.items()
    )
