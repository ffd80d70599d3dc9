"""What happened to the health of the GPUs since the start: counted, kept for a while, and passed on to who reports it."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

from gpu_plugin.health.transition import Transition

log = logging.getLogger(__name__)

KEPT = 256
"""Changes that are kept at most."""

Subscriber = Callable[[Transition], None]
"""Is given every change of verdict, on the event loop, and must not wait."""


class HealthReports:
    """Counts changes of verdict and Xids, keeps the newest changes, and gives each to whoever subscribed.

    Attributes:
        transitions: changes by (GPU uuid, signal, verdict that it came to).
        xids: Xids by (GPU uuid, Xid, class).
        first: when the first of them came, in Unix time, likewise.
        latest: the newest changes, the oldest first.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Takes a clock of Unix time in seconds."""
        self._clock = clock
        self.transitions: Counter[tuple[str, str, str]] = Counter()
        self.xids: Counter[tuple[str, int, str]] = Counter()
        self.first: dict[tuple[str, int, str], float] = {}
        self.latest: deque[Transition] = deque(maxlen=KEPT)
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> None:
        """Has every change from now on given to `subscriber`."""
        self._subscribers.append(subscriber)

    def report(self, change: Transition) -> None:
        """Takes in a change of verdict. A subscriber that fails costs the others nothing."""
        self.transitions[change.uuid, change.signal, change.verdict.name] += 1
        self.latest.append(change)
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
