"""When the driver is to be closed, or closed and opened anew. Does no I/O; time is counted in rounds.

NVML finds GPUs when it is opened, and a handle stays open for as long as it does: so whatever is new, or is to be let go of,
needs that.
"""

from collections.abc import Sequence

import msgspec

from gpu_plugin.nvml.roster import Roster
from gpu_plugin.nvml.session import DriverBusy, DriverSession

REOPEN_AFTER = 6
"""Rounds in a row without an answer from any GPU after which the driver is opened anew; if in vain, more rarely."""


class Reason(msgspec.Struct, frozen=True):
    """Why, in words. `alarming` where nobody asked for it. `late`: it has opened by itself, and is taken as it is."""

    words: str
    alarming: bool = False
    late: bool = False


class Reopening(msgspec.Struct):
    """What speaks for it, and what it waits for."""

    rebooted: bool = False
    """Whether the node was booted since the driver was opened, as simulated ones are."""
    held: DriverBusy | None = None
    """What kept it from being done; None where nothing does."""
    rounds_without_answer: int = 0

    def reason(self, roster: Roster, session: DriverSession, news: Sequence[str]) -> Reason | None:
        """Why it is to be done now; None: it is not. `news` are PCI bus ids that the driver was bound to."""
        changed = roster.untouched != roster.wanted
        if self.rebooted:
            return Reason("the node was booted")
        if not roster.in_use and (session.holds or changed):
            every = all(watched.gpu.uuid in roster.wanted for watched in roster.gpus)
            return Reason(f"all GPUs{'' if every else ' that can be reached alone'} are released")
        if changed:
            return Reason("GPUs were released or resumed")
        if session.answered_late:
            return Reason("it answers now", late=roster.in_use)
        if news and session.is_open:
            return Reason(f"it was bound to {', '.join(news)}")
        if self._lost(session):
            return Reason(f"no GPU has answered for {self.rounds_without_answer} rounds", alarming=True)
        return None

    def answered(self, *, anyone: bool) -> None:
        """A round is over, in which a GPU answered, or none of those that were asked."""
        self.rounds_without_answer = 0 if anyone else self.rounds_without_answer + 1

    def _lost(self, session: DriverSession) -> bool:
        times, between = divmod(self.rounds_without_answer, REOPEN_AFTER)
        return bool(times) and not between and (not session.is_open or times in (1, 2, 4) or times % 8 == 0)
