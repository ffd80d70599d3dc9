"""Delays before the next attempt after a failure: each is twice the last. Pure: takes the clock and a random number."""

import math

import msgspec

# The smallest and the largest multiple of a delay.
EXACT = (1.0, 1.0)
IN_CLUSTER = (0.5, 1.0)  # if every node of a cluster asks one server
NO_SOONER = (1.0, 1.5)  # if the server may have named the shortest delay

# Seconds over which the nodes of a cluster that begin together spread their first request to its API server.
START_SPREAD = 10.0


class Backoff(msgspec.Struct):
    """The delays between attempts. Times are in seconds of a steady clock.

    Attributes:
        first: the first delay.
        longest: the longest delay, before the spread. Only `NO_SOONER` makes it longer.
        spread: the smallest and the largest multiple of a delay.
        free: the number of failures in a row that have no delay.
        stable: reset the failure count after this many seconds of success. Waiting for work does not count.
        failures: the number of failures in a row.
        not_before: the time of the next attempt; in the past if none has failed.
    """

    first: float
    longest: float
    spread: tuple[float, float] = EXACT
    free: int = 0
    stable: float = math.inf
    failures: int = 0
    not_before: float = -math.inf

    def failed(self, now: float, dice: float = 0.0, worked_for: float = 0.0) -> float:
        """Count a failure after `worked_for` seconds of success, and return the seconds until the next attempt.

        `dice`, a random number in [0, 1), spreads them.
        """
        if worked_for >= self.stable:
            self.failures = 0
        doublings = self.failures - self.free
        self.failures += 1
        least, largest = self.spread
        whole = 0.0 if doublings < 0 else min(math.ldexp(self.first, min(doublings, 64)), self.longest)
        delay = whole * (least + (largest - least) * dice)
        self.not_before = now + delay
        return delay

    def due(self, now: float) -> bool:
        """Whether the next attempt may be made."""
        return now >= self.not_before

    def succeeded(self) -> None:
        """Reset the failure count: the attempt succeeded, or the cause of the failures is gone."""
        self.failures, self.not_before = 0, -math.inf
