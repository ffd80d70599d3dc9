"""Log lines that a peer can have written at will: some at once, then few. Takes the time as an argument."""

import logging

import msgspec

from gpu_plugin.runtime.backoff import TokenBucket

BURST = 20
REFILL_SECONDS = 30.0
"""So many lines of a kind at once, and one more whenever so many seconds have passed."""


class LogThrottle(msgspec.Struct):
    """Says on which level the next line of a kind is to be logged. Calls from several threads do no harm."""

    level: int = logging.WARNING
    _lines: TokenBucket = msgspec.field(default_factory=lambda: TokenBucket(BURST, REFILL_SECONDS))
    _kept: int = 0

    def next(self, now: float) -> tuple[int, str]:
        """The level of a line at `now`, in seconds of a steady clock, and what to add to it: how many lines are missing."""
        if not self._lines.take(now):
            self._kept += 1
            return logging.DEBUG, ""
        kept, self._kept = self._kept, 0
        return self.level, f" ({kept} more like this were not logged)" if kept else ""
