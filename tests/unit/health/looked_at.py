"""A watched GPU, with what else a test may want to know of it."""

from gpu_plugin.health.latch import AnyLatch, LatchKey, Transition, Verdict
from gpu_plugin.health.observation import Facts, Observation
from gpu_plugin.health.policy import HealthPolicy
from tests.unit.health.watching import GPU, UNGUARDED, Watched

UNKNOWN = Facts()


class LookedAt(Watched):
    """Keeps the changes of its signal's verdict."""

    def __init__(
        self, signal: str, facts: Facts = UNKNOWN, policy: HealthPolicy = UNGUARDED, *, seen: bool = True
    ) -> None:
        super().__init__(signal, facts, policy, seen=seen)
        self.changes: list[Transition] = []

    def see(self, *seen: Observation, every: float = 5.0) -> Verdict:
        for observation in seen:
            self.changes += [
                change for change in self.ledger.observe(GPU, observation, self.now) if change.signal == self.signal
            ]
            self.now += every
        return self.verdict

    def told(self, *seen: Observation, every: float = 5.0) -> list[Verdict]:
        """What the signal says after each of these observations."""
        return [self.see(observation, every=every) for observation in seen]

    @property
    def remembered(self) -> AnyLatch | None:
        """The latch, open or not."""
        return self.ledger._records[GPU].latches.get(LatchKey(self.signal))

    @property
    def detail(self) -> str:
        """Why it is open."""
        return self.latch.detail

    @property
    def overall(self) -> Verdict:
        """What all signals together come to."""
        return self.ledger.verdict(GPU)
