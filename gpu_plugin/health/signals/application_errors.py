"""Applications that keep failing on one GPU: whether that is one bad application or a bad GPU."""

from dataclasses import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.hysteresis import lately
from gpu_plugin.health.latch import Latch, Proof, Verdict
from gpu_plugin.health.observation import ApplicationError, Observation, Sample
from gpu_plugin.health.proof import after_recovery

DEGRADED_AT, FATAL_AT, WITHIN = 5, 10, 600.0
"""Errors within so many seconds that are worth a look, and that make a GPU suspect of being wedged."""

_MOST = 64  # errors that are remembered
_SHOWN = 3  # pods that are named


def application_errors(latch: Latch | None, seen: Observation, ctx: Context) -> Latch | None:
    """Opens by the errors of ten minutes: five are DEGRADED, ten FATAL, where no one pod can be behind all of them.

    An error while several pods hold the GPU may be any of theirs. Where nobody can say whose it was, five are DEGRADED, and
    more of them are never FATAL. DEGRADED closes after ten minutes without one; FATAL by proof of a reset.
    """
    if isinstance(seen, ApplicationError):
        judged = ctx.policy.xids.judge(seen.xid)
        return _gathered(latch, seen, ctx) if judged.repeats else latch
    if latch is None or not isinstance(seen, Sample):
        return latch
    if latch.verdict is Verdict.FATAL:
        known = after_recovery(latch, seen, ctx)
        # What failed before a reset says nothing of the GPU after it.
        return replace(known, times=(), pods=()) if known is not None and known.reset and not latch.reset else known
    return None if not seen.fault and ctx.now - _last(latch) >= WITHIN else latch


def _gathered(latch: Latch | None, seen: ApplicationError, ctx: Context) -> Latch:
    known = latch or Latch()
    times, pods = known.times, tuple((at, who) for at, who in known.pods if ctx.now - at <= WITHIN)
    if seen.pods:
        pods = _with(pods, ctx.now, ",".join(sorted(seen.pods)))
    else:
        times = (*times, ctx.now)
    times = lately(times, ctx.now, WITHIN, DEGRADED_AT)
    known = replace(known, times=times, pods=pods)
    xid = ctx.policy.xids.describe(seen.xid)
    if len(pods) >= FATAL_AT and _several(pods):
        words = f"suspected wedged GPU: {FATAL_AT} application errors within 10 minutes, by {_names(pods)}; now {xid}"
        # What made it so is forgotten: it takes as many anew to say after a reset that this was none.
        return known.again(
            verdict=Verdict.FATAL,
            detail=known.detail if known.verdict is Verdict.FATAL else words,
            since=known.since if known.verdict is not Verdict.OK else ctx.now,
            proof=Proof.RESET,
            times=(),
            pods=(),
            marks=known.marks if known.verdict is Verdict.FATAL else ctx.marks,
        )
    if known.verdict is not Verdict.OK:
        return known
    by = ""
    if len(pods) >= DEGRADED_AT and _several(pods):
        by = f"by {_names(pods)}"
    elif len(times) >= DEGRADED_AT:
        by = "and nobody can say by which pods"
    if not by:
        return known
    words = f"{DEGRADED_AT} application errors within 10 minutes, {by}; now {xid}"
    return replace(known, verdict=Verdict.DEGRADED, detail=words, since=ctx.now, proof=Proof.APPLICATION)


def _with(pods: tuple[tuple[float, str], ...], now: float, holders: str) -> tuple[tuple[float, str], ...]:
    """The errors with this one: the newest of each set of pods, as many as could matter."""
    same = [entry for entry in pods if entry[1] == holders]
    others = tuple(entry for entry in pods if entry is not same[0]) if len(same) >= FATAL_AT else pods
    return (*others, (now, holders))[-_MOST:]


def _several(pods: tuple[tuple[float, str], ...]) -> bool:
    """Whether no pod held the GPU at all of these errors."""
    return not frozenset.intersection(*(frozenset(who.split(",")) for _, who in pods))


def _names(pods: tuple[tuple[float, str], ...]) -> str:
    names = sorted({name for _, who in pods for name in who.split(",")})
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"pods {', '.join(names[:_SHOWN])}{more}"


def _last(latch: Latch) -> float:
    return max((*latch.times[-1:], *(at for at, _ in latch.pods[-1:])), default=latch.since)
