"""Logs and counts changes of the GPUs' health, and passes them on to subscribers.

Each change of verdict is one log line. Xids that change no verdict are logged once a minute.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from gpu_plugin.devices.gpu_names import called
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import XID, Transition, Verdict
from gpu_plugin.health.policy import describe
from gpu_plugin.health.wording import Change, news

log = logging.getLogger(__name__)

REPEAT_LOG = 60.0  # seconds between two log lines with the same content

Subscriber = Callable[[Transition], None]  # called with each change of verdict, on the event loop. It must not block.

_LEVELS = {
    Verdict.OK: logging.INFO,
    Verdict.APP: logging.INFO,
    Verdict.DEGRADED: logging.WARNING,
    Verdict.FATAL: logging.ERROR,
}


def whose(uuid: str, gpus: Iterable[Gpu], device: str = "") -> str:
    """Return a GPU's name for people, or the name of its MIG device. A GPU outside `gpus` is named by its uuid."""
    gpu = next((called(gpu) for gpu in gpus if gpu.uuid == uuid), f"GPU {uuid}")
    return f"MIG device {device} of {gpu}" if device else gpu


def tell(change: Transition, gpus: Iterable[Gpu] = ()) -> None:
    """Log a change of verdict in one line: the change, its signal, and the advice. Orders are logged as information.

    The line is short: `gpu-plugin explain` shows commands and conditions of recovery. `gpus` are the node's GPUs.
    """
    told = news(change, whose(change.uuid, gpus, change.device))
    fields = _fields(
        uuid=change.uuid,
        mig_device=change.device,
        signal=change.signal,
        verdict=change.verdict.name,
        xid=change.xid,
    )
    order = told.change in (Change.CORDONED, Change.UNCORDONED, Change.RELEASED, Change.RESUMED)
    level = logging.INFO if order else _LEVELS[change.verdict]
    signal = "" if order or change.verdict is Verdict.APP else f" (signal {change.signal})"
    todo = f"; to do: {change.action}" if change.action and change.verdict >= Verdict.DEGRADED and not order else ""
    log.log(level, "%s%s%s", told.text, signal, todo, extra=fields)


class RepeatedXids:
    """Logs Xids that change no verdict once a minute for each GPU and Xid, with their number.

    A failing pod causes hundreds of Xids.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Store a steady clock in seconds."""
        self._clock = clock
        self._logged: dict[tuple[str, int], tuple[float, int]] = {}

    def told(self, uuid: str, xid: int) -> None:
        """Record that a change of verdict with this Xid was logged just now."""
        self._logged[uuid, xid] = self._clock(), 0

    def count(self, uuid: str, xid: int, name: str, verdict: Verdict, gpus: Iterable[Gpu] = ()) -> None:
        """Count an Xid that changed no verdict. `name` is the Xid's, `verdict` the policy's, and `gpus` has the node's GPUs."""
        now = self._clock()
        logged_at, since = self._logged.get((uuid, xid), (float("-inf"), 0))
        if now - logged_at < REPEAT_LOG:
            self._logged[uuid, xid] = logged_at, since + 1
            return
        self._logged[uuid, xid] = now, 0
        more = f" ({since} more since the last log line)" if since else ""
        if verdict is Verdict.OK:
            words = "is ignored by the Xid policy; the GPU stays as it is"
        elif verdict is Verdict.APP:
            words = "is an application's own error; the GPU stays as it is"
        else:
            words = "was raised again; the GPU's verdict stays"
        level, which = min(_LEVELS[verdict], logging.WARNING), whose(uuid, gpus)
        fields = _fields(uuid=uuid, signal=XID, verdict=verdict.name, xid=xid)
        log.log(level, "%s: %s %s%s", which, describe(xid, name), words, more, extra=fields)


class HealthReports:
    """Counts changes of verdict and Xids, and passes each change to the subscribers.

    Attributes:
        transitions: number of changes by (GPU uuid, signal, new verdict).
        xids: number of Xids by (GPU uuid, Xid, class).
        first: Unix time of the first Xid, by the same keys.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Store a clock of Unix time in seconds."""
        self._clock = clock
        self.transitions: Counter[tuple[str, str, str]] = Counter()
        self.xids: Counter[tuple[str, int, str]] = Counter()
        self.first: dict[tuple[str, int, str], float] = {}
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` for each change from now on."""
        self._subscribers.append(subscriber)

    def report(self, change: Transition) -> None:
        """Count a change of verdict and pass it on. A subscriber that fails does not affect the others."""
        self.transitions[change.uuid, change.signal, change.verdict.name] += 1
        for subscriber in self._subscribers:
            try:
                subscriber(change)
            except Exception:
                log.exception("GPU %s: a change of health could not be reported", change.uuid)

    def count_xid(self, uuid: str, xid: int, kind: str) -> None:
        """Count an Xid, whether or not it changed a verdict. `kind` is its class in the Xid policy."""
        self.xids[uuid, xid, kind] += 1
        if (uuid, xid, kind) not in self.first:
            self.first[uuid, xid, kind] = self._clock()

    def as_data(self) -> Mapping[str, tuple[Mapping[str, str | int | float], ...]]:
        """Return the counters as plain data: `transitions` and `xids`, in a stable order."""
        return {
            "transitions": tuple(
                {"uuid": uuid, "signal": signal, "verdict": verdict, "total": total}
                for (uuid, signal, verdict), total in sorted(self.transitions.items())
            ),
            "xids": tuple(
                {"uuid": uuid, "xid": xid, "class": kind, "total": total, "first": self.first[uuid, xid, kind]}
                for (uuid, xid, kind), total in sorted(self.xids.items())
            ),
        }


def _fields(**known: str | int | None) -> dict[str, str | int]:
    """Return the fields of a log line that have a value."""
    return {name: value for name, value in known.items() if value not in (None, "")}
