"""The common rule of signals that judge by their own readings: so many bad ones in a row open, so much good closes."""

from dataclasses import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.latch import Latch, Proof, Verdict


def level(
    latch: Latch | None,
    ctx: Context,
    *,
    bad: bool | None,
    verdict: Verdict,
    detail: str,
    enter: int = 1,
    leave: int = 1,
    leave_seconds: float = 0.0,
    proof: Proof = Proof.READING,
) -> Latch | None:
    """The latch after a reading that was `bad`, good (False), or not to be had (None).

    Opens after `enter` bad readings in a row, with the words of the last. Closes after `leave` good ones in a row or, with
    `leave_seconds`, once they have been good for so long; a latch of Proof.RMA only once the GPU was enumerated anew, or an
    operator vouches for it. A reading that is not to be had ends every row and proves nothing. A worse verdict is taken over
    at once, with its words and its proof, a better one never.
    """
    if latch is None or latch.verdict is Verdict.OK:
        if not bad:
            return None
        streak = 1 + (latch.streak if latch else 0)
        return Latch(streak=streak) if streak < enter else Latch(verdict, detail, ctx.now, proof, marks=ctx.marks)
    if bad and verdict > latch.verdict:
        return latch.again(verdict=verdict, detail=detail, proof=proof, marks=ctx.marks)
    if bad or bad is None:
        return unproven(latch)
    if latch.proof is Proof.RMA and not (latch.rebound or latch.overridden):
        return latch
    if not leave_seconds:
        return None if latch.streak + 1 >= leave else replace(latch, streak=latch.streak + 1)
    since = ctx.now if latch.quiet_since is None else latch.quiet_since
    if ctx.now - since >= leave_seconds:
        return None
    return latch if since == latch.quiet_since else replace(latch, quiet_since=since)


def unproven(latch: Latch) -> Latch:
    """The latch with nothing gathered yet of what closes it; the very same one where nothing was."""
    return replace(latch, streak=0, quiet_since=None) if latch.streak or latch.quiet_since is not None else latch


def lately(times: tuple[float, ...], now: float, within: float, most: int = 64) -> tuple[float, ...]:
    """Of these times (Unix seconds, oldest first) the last `most` that are not older than `within` seconds."""
    return tuple(at for at in times if now - at <= within)[-most:]
