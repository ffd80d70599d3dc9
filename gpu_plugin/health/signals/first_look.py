"""Withhold a GPU until its first good look."""

from gpu_plugin.health.latch import NOTHING, Latch, Memory, Verdict
from gpu_plugin.health.observation import Observation
from gpu_plugin.health.signal import KERNEL_LOG, Context, OperatorInfluence, SignalKind, signal

NAME = "first-look"

_WORDS = "there has been no good look at it yet"


def unseen(detail: str = "", since: float = 0.0) -> Latch[Memory]:
    """Return the latch of a GPU without a good sample since this process started or the node was booted.

    `detail` is the result of the last look, `since` the Unix time in seconds of the first failed look, 0 if there was no look.
    The latch is a state of the process and no evidence: it is not stored, its start is no change of verdict, and it does not
    count for the flap guard. Only the ledger opens and closes it. `unanswered`, which tolerates single failures, is for GPUs
    that had a good look.
    """
    return Latch(NOTHING, Verdict.FATAL, f"{_WORDS}: {detail}" if detail else _WORDS, since)


def withheld(why: str) -> Latch[Memory]:
    """Return the latch of a GPU that no look can release; `why` is the reason, for people."""
    return Latch(NOTHING, Verdict.FATAL, why)


@signal(NAME, SignalKind.GUARD, KERNEL_LOG, sees=(), clears="a check succeeds", influence=OperatorInfluence.NONE)
def first_look(latch: Latch[Memory] | None, _seen: Observation, _ctx: Context) -> Latch[Memory] | None:
    """Return the latch unchanged: only the ledger changes it."""
    return latch
