"""Log lines that a peer can have written at will: some at once, then few. Takes the time as an argument."""

import logging

import msgspec

BURST = 20
REFILL_SECONDS = 30.0
"""So many lines of a kind at once, and one more whenever so many seconds have passed."""


class LogThrottle(msgspec.Struct):
    """Says on which level the next line of a kind is to be logged. Calls from several threads do no harm."""

    level: int = logging.WARNING
    _left: float = BURST
    _since: float = float("-inf")
    _kept: int = 0

    def next(self, now: float) -> tuple[int, str]:
        """The level of a line at `now`, in seconds of a steady clock, and what to add to it: how many lines are missing."""
        self._left = min(BURST, self._left + (now - self._since) / REFILL_SECONDS)
        self._since = now
        if self._left < 1:
            self._kept += 1
            return logging.DEBUG, ""
        self._left -= 1
        kept, self._kept = self._kept, 0
        return self.level, f" ({kept} more like this were not logged)" if kept else ""
