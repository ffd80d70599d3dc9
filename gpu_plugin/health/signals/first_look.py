"""A GPU that nobody has seen at work is withheld."""

from gpu_plugin.health.latch import NOTHING, Latch, Memory, Verdict
from gpu_plugin.health.observation import Observation
from gpu_plugin.health.signal import KERNEL_LOG, Context, OperatorInfluence, SignalKind, signal

NAME = "first-look"

_WORDS = "there has been no good look at it yet"


def unseen(detail: str = "", since: float = 0.0) -> Latch[Memory]:
    """The latch of a GPU of which no good sample has come since this process began, or the node was booted.

    `detail` is what the last look brought instead, `since` (Unix seconds) when the first one failed; 0: there was none.
    It is a state of the process and no evidence: not written down, no change of verdict when it begins, and it does not count
    for the flap guard. The ledger alone opens and closes it. `unanswered`, which bears with a failure now and then, is for
    GPUs that were seen.
    """
    return Latch(NOTHING, Verdict.FATAL, f"{_WORDS}: {detail}" if detail else _WORDS, since)


def withheld(why: str) -> Latch[Memory]:
    """The latch of a GPU that no look at it can release; `why` is the reason, for people."""
    return Latch(NOTHING, Verdict.FATAL, why)


@signal(NAME, SignalKind.GUARD, KERNEL_LOG, sees=(), clears="one good look", say=OperatorInfluence.NOBODY)
def first_look(latch: Latch[Memory] | None, _seen: Observation, _ctx: Context) -> Latch[Memory] | None:
    """Stays as the ledger has it."""
    return latch
