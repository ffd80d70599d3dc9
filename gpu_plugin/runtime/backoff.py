"""How long to wait before what failed is tried again: twice as long each time. Pure: takes clock and dice as arguments."""

import math

import msgspec

EXACT = (1.0, 1.0)
"""The delays as they are."""

ON_NODE = (0.9, 1.0)
"""Between these multiples of a delay: what is asked serves one node, so that little has to be kept apart."""

IN_CLUSTER = (0.5, 1.0)
"""Between these multiples of a delay where every node of a cluster asks one server."""

NO_SOONER = (1.0, 1.5)
"""Between these multiples of a delay where that server may have said how long to wait at least."""


START_SPREAD = 10.0
"""Seconds over which the nodes of a cluster that begin together spread their first request to its API server."""


class Backoff(msgspec.Struct):
    """The delays between attempts at one thing. Times are in seconds, of any steady clock.

    Attributes:
        first: the first delay.
        longest: what they grow to, before they are spread; no spread but `NO_SOONER` makes more of it.
        spread: the least and the largest multiple of a delay that the dice may make of it.
        free: so many failures in a row are tried again at once, before the first delay.
        stable: who has worked for so long fails for the first time again; waiting for work is no work.
        failures: how many there were in a row.
        not_before: when the next attempt is due; the past where none has failed.
    """

    first: float
    longest: float
    spread: tuple[float, float] = EXACT
    free: int = 0
    stable: float = math.inf
    failures: int = 0
    not_before: float = -math.inf

    def failed(self, now: float, dice: float = 0.0, worked_for: float = 0.0) -> float:
        """Takes in a failure after having worked for `worked_for` seconds; gives the seconds until the next attempt.

        `dice` in [0, 1) spreads them.
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
        """The attempt did what it is for, or the cause of the failures is gone: what fails next fails for the first time."""
        self.failures, self.not_before = 0, -math.inf
