"""The common rule of signals that judge by their own readings: so many bad ones in a row open, so much good closes."""

from typing import Self, TypeVar

from msgspec.structs import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.latch import Latch, Memory, Proof, Recovery, Verdict

MINUTE = 60.0
"""Seconds: how finely the time of the last of many events is written down."""


class Level(Memory, frozen=True):
    """How long readings were alike: bad ones in a row before it opens, good ones since (`row`, or from `quiet_since` on)."""

    row: int = 0
    quiet_since: float | None = None

    @property
    def gathering(self) -> bool:
        """Whether a row has begun."""
        return self.row > 0

    @property
    def lasting(self) -> bool:
        """Whether there were bad readings, which are not enough yet: the next process goes on from them."""
        return self.row > 0

    def stored_open(self) -> Self:
        """The memory without the good readings since."""
        return _restarted(self)


LEVEL = Level()

L = TypeVar("L", bound=Level)


def level(
    latch: Latch[L] | None,
    ctx: Context,
    fresh: L,
    *,
    bad: bool | None,
    verdict: Verdict,
    detail: str,
    enter: int = 1,
    leave: int = 1,
    leave_seconds: float = 0.0,
    proof: Proof = Proof.READING,
) -> Latch[L] | None:
    """The latch after a reading that was `bad`, good (False), or not to be had (None). `fresh` is the memory of a new one.

    Opens after `enter` bad readings in a row, with the words of the last. Closes after `leave` good ones in a row or, with
    `leave_seconds`, once they have been good for so long; a latch of Proof.RMA only once the GPU was enumerated again, or an
    operator overrides it. A reading that is not to be had ends every row and proves nothing. A worse verdict is taken over
    at once, with its words and its proof, a better one never.
    """
    if latch is None or latch.verdict is Verdict.OK:
        if not bad:
            return None
        row = 1 + (latch.memory.row if latch else 0)
        if row < enter:
            return Latch(replace(latch.memory if latch else fresh, row=row))
        return Latch(fresh, verdict, detail, ctx.now, proof, Recovery(ctx.marks))
    if bad and verdict > latch.verdict:
        return latch.renewed(_restarted(latch.memory), ctx.marks, verdict=verdict, detail=detail, proof=proof)
    if bad or bad is None:
        return unproven(latch)
    if latch.proof is Proof.RMA and not (latch.recovery.rebound or latch.overridden):
        return latch
    memory = latch.memory
    if not leave_seconds:
        return None if memory.row + 1 >= leave else replace(latch, memory=replace(memory, row=memory.row + 1))
    since = ctx.now if memory.quiet_since is None else memory.quiet_since
    if ctx.now - since >= leave_seconds:
        return None
    return latch if since == memory.quiet_since else replace(latch, memory=replace(memory, quiet_since=since))


def unproven(latch: Latch[L]) -> Latch[L]:
    """The latch with nothing gathered yet of what closes it; the very same one where nothing was."""
    memory = _restarted(latch.memory)
    return latch if memory is latch.memory else replace(latch, memory=memory)


def lately(times: tuple[float, ...], now: float, within: float, most: int = 64) -> tuple[float, ...]:
    """Of these times (Unix seconds, oldest first) the last `most` that are not older than `within` seconds."""
    return tuple(at for at in times if now - at <= within)[-most:]


def _restarted(memory: L) -> L:
    return replace(memory, row=0, quiet_since=None) if memory.row or memory.quiet_since is not None else memory
