"""How often something may be done. Pure: takes the clock as an argument."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenBucket:
    """Lets `burst` through at once, and then one every `seconds`."""

    burst: int
    seconds: float
    _spent: float = field(default=0.0, init=False)
    _at: float = field(default=0.0, init=False)

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
