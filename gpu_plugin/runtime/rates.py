"""Limits on the rate of calls and log lines. Pure: takes the clock as an argument."""

import logging

import msgspec

# The number of similar log lines at once, and the seconds after which one more may follow.
BURST = 20
REFILL_SECONDS = 30.0


class TokenBucket(msgspec.Struct):
    """Lets `burst` through at once, and then one every `seconds`."""

    burst: int
    seconds: float
    _spent: float = 0.0
    _at: float = 0.0

    def take(self, now: float) -> bool:
        """Whether one more may pass at `now`, in seconds of a steady clock; it has passed then."""
        if self.wait(now) > 0:
            return False
        self._spent += 1
        return True

    def wait(self, now: float) -> float:
        """Seconds from `now` until one may pass."""
        self._spent = max(0.0, self._spent - max(0.0, now - self._at) / self.seconds)
        self._at = now
        return max(0.0, self._spent - (self.burst - 1)) * self.seconds


class LogThrottle:
    """Log lines of a kind that a peer can have written at will: some at once, then few."""

    def __init__(self) -> None:
        self._bucket = TokenBucket(BURST, REFILL_SECONDS)
        self._kept = 0

    def next(self, now: float) -> tuple[int, str]:
        """The level of a line at `now`, in seconds of a steady clock, and what to add to it: how many lines are missing."""
        if not self._bucket.take(now):
            self._kept += 1
            return logging.DEBUG, ""
        kept, self._kept = self._kept, 0
        return logging.WARNING, f" ({kept} more like this were not logged)" if kept else ""
