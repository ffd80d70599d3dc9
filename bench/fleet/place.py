"""A GPU in its place in a node: how it stands since when, and what of it is taken down in the accounts."""

from dataclasses import dataclass, field

from bench.fleet import rates
from bench.fleet.faults import Truth
from bench.fleet.hardware import Hardware
from bench.fleet.plan import HOUR
from bench.fleet.tally import Tally


@dataclass(slots=True)
class Place:
    """A GPU in its place. Times are in seconds.

    `truth`, `offered`, `why` it is not, and the `cause` of it (a kind of incident, and its number) are those since `since`.

    The plugin: `watched` since something happened to it; `looked` at last; `moved` is when anything changed; `look` is the
    number of the next look, 0 where none is to come.
    Operators: the next `step` of a repair, and when the last one was taken (`stepped`); `awaited` where somebody will come for
    an Unhealthy GPU, `complained` where somebody will for pods that fail on it, which are `trying`. `times` is how often
    chance had a say in what on account of which incident. `told` is what has been counted of which incident: what held its
    GPU back, "" for that it was handed out.
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
    told: set[tuple[str, int]] = field(default_factory=set)

    def account(self, tally: Tally, now: float) -> None:
        """Takes down the time since the last account, as it stood in it."""
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
        known = (what, number) in self.told
        self.told.add((what, number))
        return not known
