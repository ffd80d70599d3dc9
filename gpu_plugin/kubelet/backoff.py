"""How long to wait before trying again. Pure: takes the clock and the dice as arguments."""

import msgspec

FIRST = 0.05
FACTOR = 2.0
LONGEST = 30.0
STABLE = 30.0
"""Seconds that something must have worked before a new failure counts as the first again. Waiting for it is no work."""


class Backoff(msgspec.Struct):
    """Waits 0 s after the first failure, then from `FIRST` on twice as long each time, up to `LONGEST`."""

    failures: int = 0

    def delay(self, worked_for: float, dice: float) -> float:
        """Seconds to wait after a failure, having worked for `worked_for` seconds; `dice` in [0, 1) spreads it."""
        if worked_for >= STABLE:
            self.failures = 0
        self.failures += 1
        if self.failures == 1:
            return 0.0
        return float(min(FIRST * FACTOR ** min(self.failures - 2, 16), LONGEST)) * (0.9 + 0.2 * dice)

    def forget(self) -> None:
        """What comes next is a beginning: the cause of the failures is gone."""
        self.failures = 0
