"""What the log says of health: one line for a change of verdict, one a minute for Xids that change none."""

import logging
import time
from collections.abc import Callable

from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.ledger import Transition
from gpu_plugin.health.signals import SIGNALS, SignalKind
from gpu_plugin.health.xids import describe

log = logging.getLogger(__name__)

REPEAT_LOG = 60.0
"""Seconds between two lines that say the same."""

_LEVELS = {
    Verdict.OK: logging.INFO,
    Verdict.APP: logging.INFO,
    Verdict.DEGRADED: logging.WARNING,
    Verdict.FATAL: logging.ERROR,
}


def tell(change: Transition) -> None:
    """One log line for a change of verdict: which GPU, which signal, why, and what to do. An operator's order is no alarm.

    It stays short: the commands, and what would clear it, are what `gpu-plugin explain` is for.
    """
    whose = f"MIG device {change.device} of GPU {change.uuid}" if change.device else f"GPU {change.uuid}"
    detail = change.detail or change.signal
    known = SIGNALS.get(change.signal)
    if known is not None and known.kind is SignalKind.ORDER:
        words = "is no longer" if change.verdict is Verdict.OK else "is"
        log.info("%s %s held back by its operator (%s)", whose, words, change.signal)
        return
    level = _LEVELS[change.verdict]
    again = "; it is fit for use again" if change.before is Verdict.FATAL and change.standing < Verdict.FATAL else ""
    if change.verdict is Verdict.OK:
        log.log(level, "%s: no longer so: %s (signal %s)%s", whose, detail, change.signal, again)
    elif change.verdict is Verdict.APP:
        log.log(level, "%s: %s is an application's own error; the GPU stays as it is", whose, detail)
    else:
        state = "is not fit for use" if change.verdict is Verdict.FATAL else "is degraded"
        todo = f"; to do: {change.action}" if change.action else ""
        log.log(level, "%s %s: %s (signal %s)%s%s", whose, state, detail, change.signal, again, todo)


class RepeatedXids:
    """Says Xids that change no verdict once a minute for each GPU and Xid, with how many there were.

    A failing pod raises hundreds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes a steady clock in seconds."""
        self._clock = clock
        self._said: dict[tuple[str, int], tuple[float, int]] = {}

    def told(self, uuid: str, xid: int) -> None:
        """Takes in that a change of verdict told of one just now."""
        self._said[uuid, xid] = self._clock(), 0

    def count(self, uuid: str, xid: int, name: str, verdict: Verdict) -> None:
        """Takes in one that changed nothing; `name` is what it is called, `verdict` what the policy makes of it."""
        now = self._clock()
        said, since = self._said.get((uuid, xid), (float("-inf"), 0))
        if now - said < REPEAT_LOG:
            self._said[uuid, xid] = said, since + 1
            return
        self._said[uuid, xid] = now, 0
        more = f" ({since} more since this was last said)" if since else ""
        if verdict is Verdict.OK:
            words = "counts for nothing by the Xid policy; the GPU stays as it is"
        elif verdict is Verdict.APP:
            words = "is an application's own error; the GPU stays as it is"
        else:
            words = "was raised again; what is held against the GPU stands"
        log.log(min(_LEVELS[verdict], logging.WARNING), "GPU %s: %s %s%s", uuid, describe(xid, name), words, more)
