"""A GPU's place in a node: its present state since some time, and the accounting of its hours."""

from dataclasses import dataclass, field

from bench.fleet import rates
from bench.fleet.faults import Truth
from bench.fleet.hardware import Hardware
from bench.fleet.plan import HOUR
from bench.fleet.tally import Tally


@dataclass(slots=True)
class Place:
    """A GPU's place in a node. Times are in seconds.

    Attributes:
        hardware: the GPU.
        since: the time since which `truth`, `offered`, `why` and `cause` have not changed.
        truth: the true state of the GPU.
        offered: whether the kubelet may give it to pods.
        why: the reason if it is not offered.
        cause: the kind and the number of the incident.
        watched: whether the plugin watches it, which begins with its first event.
        looked: the time of the last look.
        moved: the time of the last change.
        look: the number of the next look; 0 if no look is planned.
        step: the next step of a repair.
        stepped: the time of the last step.
        awaited: whether an operator will come because it is Unhealthy.
        complained: whether an operator will come because pods fail on it.
        trying: whether pods are started on it.
        times: the number of random values that were drawn for each purpose and incident.
        counted: what has been counted for which incident: the signal that held the GPU back, or "" for handed out.
    """

    hardware: Hardware
    since: float = 0.0
    truth: Truth = Truth.SOUND
    offered: bool = True
    why: str = ""
    cause: tuple[str, int] = ("", 0)
    watched: bool = False
    looked: float = -1.0
    moved: float = 0.0
    look: int = 0
    step: int = 0
    stepped: float = 0.0
    awaited: bool = False
    complained: bool = False
    trying: bool = False
    times: dict[str, int] = field(default_factory=dict)
    counted: set[tuple[str, int]] = field(default_factory=set)

    def account(self, tally: Tally, now: float) -> None:
        """Add the time since the last call to the tally."""
        hours, self.since = (now - self.since) / HOUR, now
        if hours <= 0:
            return
        kind, number = self.cause
        if self.truth is Truth.BROKEN:
            tally.broken += hours
            if self.offered:
                tally.handed_out[kind] = tally.handed_out.get(kind, 0.0) + hours
                tally.handed[kind] = tally.handed.get(kind, 0) + self._first("", number)
        elif not self.offered and self.why == "first-look":
            tally.first_look += hours
        elif not self.offered:
            key = (self.why, kind or "an application")
            tally.held_back[key] = tally.held_back.get(key, 0.0) + hours
            tally.held[key] = tally.held.get(key, 0) + self._first(self.why, number)
            tally.turned_away += hours * rates.UTILISATION / rates.POD_HOURS

    def _first(self, what: str, number: int) -> bool:
        known = (what, number) in self.counted
        self.counted.add((what, number))
        return not known
