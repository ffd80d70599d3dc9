"""Whose turn it is: everyone's each poll, and in between the GPUs that there is a reason to look at. Does no I/O.

Times are those of the event loop's clock, in seconds.
"""

import math

import msgspec

EVENT_GAP = 1.0  # seconds between two looks that events of one GPU bring: a storm of events is no storm of looks
ANYBODY = ""  # in place of a uuid: an event of a handle that is no known GPU's


class Turn(msgspec.Struct, frozen=True):
    """Whose turn it is. `whole`: everyone's, with the driver and the host. `full` are to be asked everything; None: all."""

    whole: bool
    full: frozenset[str] | None


class Schedule:
    """When the next turn is due, and what it is for. Reasons that come during a turn are for the next one."""

    def __init__(self) -> None:
        self._poll = -math.inf
        self._everyone = math.inf
        self._due: dict[str, float] = {}
        self._heard: set[str] = set()
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

    def heard(self, uuid: str, now: float) -> None:
        """An event of this GPU, or of `ANYBODY`, was heard. The first one has it looked at at once, more of them each second."""
        self._heard.add(uuid)
        self.one(uuid, max(now, self._answered.get(uuid, -math.inf) + EVENT_GAP))

    def expects(self, uuid: str) -> bool:
        """Whether events of this GPU, or of `ANYBODY`, bring a look already: another one changes nothing."""
        return uuid in self._heard

    def next(self) -> float:
        """When the next turn is due."""
        return min(self._poll, self._everyone, *self._due.values(), math.inf)

    def take(self, now: float) -> Turn:
        """The turn that is due now; one that nobody asked for is nobody's."""
        if self._everyone <= now or self._due.get(ANYBODY, math.inf) <= now:
            self._everyone = math.inf
            self._answer(frozenset(self._due), now)
            return Turn(whole=True, full=None)
        whole = self._poll <= now
        due = frozenset(uuid for uuid, at in self._due.items() if at <= now or (whole and uuid != ANYBODY))
        self._answer(due, now)
        return Turn(whole, due)

    def _answer(self, uuids: frozenset[str], now: float) -> None:
        self._answered |= dict.fromkeys(uuids & self._heard, now)
        self._heard -= uuids
        for uuid in uuids:
            del self._due[uuid]
