"""Changes of the GPUs' health: logged, counted, and passed on to whoever reports them.

The log has one line for a change of verdict, and one a minute for Xids that change none.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from gpu_plugin.devices.gpu_names import called
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Transition, Verdict
from gpu_plugin.health.policy import describe
from gpu_plugin.health.signals import SIGNALS, SignalKind
from gpu_plugin.health.signals import xid as xid_signal

log = logging.getLogger(__name__)

REPEAT_LOG = 60.0
"""Seconds between two lines that say the same."""

Subscriber = Callable[[Transition], None]
"""Is given every change of verdict, on the event loop, and must not wait."""

_LEVELS = {
    Verdict.OK: logging.INFO,
    Verdict.APP: logging.INFO,
    Verdict.DEGRADED: logging.WARNING,
    Verdict.FATAL: logging.ERROR,
}


def whose(uuid: str, gpus: Iterable[Gpu], device: str = "") -> str:
    """A GPU, or a MIG device of it, as people are told of it; by its uuid alone where it is none of these."""
    gpu = next((called(gpu) for gpu in gpus if gpu.uuid == uuid), f"GPU {uuid}")
    return f"MIG device {device} of {gpu}" if device else gpu


def tell(change: Transition, gpus: Iterable[Gpu] = ()) -> None:
    """One log line for a change of verdict: which GPU, which signal, why, and what to do. An operator's order is no alarm.

    It stays short: the commands, and what would clear it, are what `gpu-plugin explain` is for. `gpus` are those of the node.
    """
    which, detail = whose(change.uuid, gpus, change.device), change.detail or change.signal
    fields = _fields(
        uuid=change.uuid,
        mig_device=change.device,
        signal=change.signal,
        verdict=change.verdict.name,
        xid=change.xid,
    )
    known = SIGNALS.get(change.signal)
    if known is not None and known.kind is SignalKind.ORDER:
        if change.verdict is Verdict.OK:
            now = "it is Healthy again" if change.healthy_again else "it stays Unhealthy"
            log.info("%s: no longer held back by its operator (%s); %s", which, detail, now, extra=fields)
        else:
            log.info("%s is Unhealthy: held back by its operator (%s)", which, detail, extra=fields)
        return
    level = _LEVELS[change.verdict]
    again = "; it is Healthy again" if change.healthy_again else ""
    if change.verdict is Verdict.OK:
        log.log(level, "%s: over: %s (signal %s)%s", which, detail, change.signal, again, extra=fields)
    elif change.verdict is Verdict.APP:
        stays = again or "; the GPU stays as it is"
        log.log(level, "%s: %s is an application's own error%s", which, detail, stays, extra=fields)
    else:
        state = "is Unhealthy" if change.verdict is Verdict.FATAL else "is degraded"
        todo = f"; to do: {change.action}" if change.action else ""
        log.log(level, "%s %s: %s (signal %s)%s%s", which, state, detail, change.signal, again, todo, extra=fields)


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

    def count(self, uuid: str, xid: int, name: str, verdict: Verdict, gpus: Iterable[Gpu] = ()) -> None:
        """Count an Xid that changed no verdict. `name` is the Xid's, `verdict` the policy's, and `gpus` are those of the node."""
        now = self._clock()
        said, since = self._said.get((uuid, xid), (float("-inf"), 0))
        if now - said < REPEAT_LOG:
            self._said[uuid, xid] = said, since + 1
            return
        self._said[uuid, xid] = now, 0
        more = f" ({since} more since this was last said)" if since else ""
        if verdict is Verdict.OK:
            words = "is ignored by the Xid policy; the GPU stays as it is"
        elif verdict is Verdict.APP:
            words = "is an application's own error; the GPU stays as it is"
        else:
            words = "was raised again; what is held against the GPU stands"
        level, which = min(_LEVELS[verdict], logging.WARNING), whose(uuid, gpus)
        fields = _fields(uuid=uuid, signal=xid_signal.NAME, verdict=verdict.name, xid=xid)
        log.log(level, "%s: %s %s%s", which, describe(xid, name), words, more, extra=fields)


class HealthReports:
    """Counts changes of verdict and Xids, and gives each change to whoever subscribed.

    Attributes:
        transitions: changes by (GPU uuid, signal, verdict that it came to).
        xids: Xids by (GPU uuid, Xid, class).
        first: when the first of them came, in Unix time, likewise.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Takes a clock of Unix time in seconds."""
        self._clock = clock
        self.transitions: Counter[tuple[str, str, str]] = Counter()
        self.xids: Counter[tuple[str, int, str]] = Counter()
        self.first: dict[tuple[str, int, str], float] = {}
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Has every change from now on given to `subscriber`."""
        self._subscribers.append(subscriber)

    def report(self, change: Transition) -> None:
        """Takes in a change of verdict. A subscriber that fails costs the others nothing."""
        self.transitions[change.uuid, change.signal, change.verdict.name] += 1
        for subscriber in self._subscribers:
            try:
                subscriber(change)
            except Exception:
                log.exception("GPU %s: a change of health could not be reported", change.uuid)

    def count_xid(self, uuid: str, xid: int, kind: str) -> None:
        """Takes in an Xid, whatever came of it; `kind` is its class in the Xid policy."""
        self.xids[uuid, xid, kind] += 1
        if (uuid, xid, kind) not in self.first:
            self.first[uuid, xid, kind] = self._clock()

    def status(self) -> Mapping[str, object]:
        """The counters as plain data: `transitions` and `xids`, each a list in a stable order."""
        return {
            "transitions": [
                {"uuid": uuid, "signal": signal, "verdict": verdict, "total": total}
                for (uuid, signal, verdict), total in sorted(self.transitions.items())
            ],
            "xids": [
                {"uuid": uuid, "xid": xid, "class": kind, "total": total, "first": self.first[uuid, xid, kind]}
                for (uuid, xid, kind), total in sorted(self.xids.items())
            ],
        }


def _fields(**known: str | int | None) -> dict[str, str | int]:
    """The log line's own fields: those that are known."""
    return {name: value for name, value in known.items() if value not in (None, "")}
