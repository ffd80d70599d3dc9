"""Schedules looks: all GPUs at each poll, and single GPUs in between if there is a reason. Does no I/O.

Times are in seconds of the event loop's clock.
"""

import math

import msgspec

EVENT_GAP = 1.0  # least seconds between two looks at one GPU because of events, so that many events cause few looks
UNKNOWN_GPU = ""  # used as uuid for an event of an unknown handle


class Turn(msgspec.Struct, frozen=True):
    """The GPUs to look at. `whole`: all GPUs, the driver and the host. `full`: GPUs for a full look; None: all GPUs."""

    whole: bool
    full: frozenset[str] | None


class Schedule:
    """When the next turn is due, and for which GPUs. Reasons that arise during a turn count for the next turn."""

    def __init__(self) -> None:
        self._poll = -math.inf
        self._everyone = math.inf
        self._due: dict[str, float] = {}
        self._with_event: set[str] = set()
        self._answered: dict[str, float] = {}

    def poll_at(self, at: float) -> None:
        """Schedules a turn of every GPU at that time."""
        self._poll = at

    def everyone(self, at: float) -> None:
        """Schedules a full look at every GPU, at that time at the latest."""
        self._everyone = min(self._everyone, at)

    def one(self, uuid: str, at: float) -> None:
        """Schedules a full look at this GPU, at that time at the latest."""
        self._due[uuid] = min(self._due.get(uuid, math.inf), at)

    def event_arrived(self, uuid: str, now: float) -> None:
        """Schedule a look for an event of this GPU or of `UNKNOWN_GPU`: at once for the first event, then each second at most."""
        self._with_event.add(uuid)
        self.one(uuid, max(now, self._answered.get(uuid, -math.inf) + EVENT_GAP))

    def expects(self, uuid: str) -> bool:
        """Return whether a look for an event of this GPU or of `UNKNOWN_GPU` is scheduled already."""
        return uuid in self._with_event

    def next(self) -> float:
        """Return the time of the next turn."""
        return min(self._poll, self._everyone, *self._due.values(), math.inf)

    def take(self, now: float) -> Turn:
        """Remove and return the turn that is due now; an empty turn if none is due."""
        if self._everyone <= now or self._due.get(UNKNOWN_GPU, math.inf) <= now:
            self._everyone = math.inf
            self._answer(frozenset(self._due), now)
            return Turn(whole=True, full=None)
        whole = self._poll <= now
        due = frozenset(uuid for uuid, at in self._due.items() if at <= now or (whole and uuid != UNKNOWN_GPU))
        self._answer(due, now)
        return Turn(whole, due)

    def _answer(self, uuids: frozenset[str], now: float) -> None:
        self._answered |= dict.fromkeys(uuids & self._with_event, now)
        self._with_event -= uuids
        for uuid in uuids:
            del self._due[uuid]
