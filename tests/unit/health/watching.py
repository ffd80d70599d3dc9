"""One GPU under a ledger of its own, with a clock that the test moves."""

from collections.abc import Iterator

from gpu_plugin.health.evidence import BACKGROUND, Evidence
from gpu_plugin.health.latch import AnyLatch, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Facts, Observation
from gpu_plugin.health.policy import HealthPolicy
from tests.unit.health.ledgers import SEEN

GPU = "GPU-aaaa"
UNGUARDED = HealthPolicy(flap_hold=0)


class Watched:
    """A GPU of which one signal is looked at, by its own latch or latches, whatever others say."""

    def __init__(
        self, signal: str, facts: Facts, policy: HealthPolicy = UNGUARDED, part: str = "", *, seen: bool = True
    ) -> None:
        self.signal, self.part, self.facts, self.policy = signal, part, facts, policy
        self.now, self.seen = 1_000.0, seen
        self.ledger = self._ledger()

    def see(self, *seen: Observation, every: float = 5.0) -> Verdict:
        """Takes in these observations, one every so many seconds, and returns what the signal makes of them."""
        for _ in self.steps(*seen, every=every):
            pass
        return self.verdict

    def steps(self, *seen: Observation, every: float = 5.0) -> Iterator[Verdict]:
        """What the signal says after each of these observations."""
        for observation in seen:
            self.ledger.observe(GPU, observation, self.now)
            self.now += every
            yield self.verdict

    def vouch(self) -> Verdict:
        """What the signal says once an operator vouched for the GPU."""
        self.ledger.override(GPU)
        return self.verdict

    def restart(self) -> Verdict:
        """What a new process makes of what this one wrote down."""
        evidence = self.ledger.evidence()
        self.ledger = self._ledger()
        self.ledger.replay(evidence)
        return self.verdict

    @property
    def written(self) -> list[Evidence]:
        """What a new process would know of signals."""
        return [entry for entry in self.ledger.evidence() if entry.signal != BACKGROUND.signal]

    @property
    def verdict(self) -> Verdict:
        """The signal's own, as it stands."""
        found = [
            verdict
            for key, _, verdict in self.ledger.standing(GPU)
            if key.signal == self.signal and self.part in ("", key.part)
        ]
        return max(found, default=Verdict.OK)

    @property
    def latch(self) -> AnyLatch:
        """The signal's open latch."""
        (found,) = [latch for key, latch, _ in self.ledger.standing(GPU) if key.signal == self.signal]
        return found

    def _ledger(self) -> HealthLedger:
        made = HealthLedger(self.policy)
        made.watch(GPU, self.facts)
        if self.seen:
            made.observe(GPU, SEEN, 0.0)
        return made
