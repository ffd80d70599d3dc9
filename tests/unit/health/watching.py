"""One GPU with a ledger of its own and a clock that the test moves, for tests of one signal."""

from gpu_plugin.health.evidence import BACKGROUND, Evidence
from gpu_plugin.health.latch import AnyLatch, LatchKey, Transition, Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Facts, Observation
from gpu_plugin.health.policy import HealthPolicy
from tests.unit.health.ledgers import SEEN

GPU = "GPU-aaaa"
UNGUARDED = HealthPolicy(flap_hold=0)
UNKNOWN = Facts()


class Watched:
    """A GPU with one signal under test. `changes` are the changes of its verdict.

    With `seen`, the GPU had a good look before.
    """

    def __init__(
        self,
        signal: str,
        facts: Facts = UNKNOWN,
        policy: HealthPolicy = UNGUARDED,
        part: str = "",
        *,
        seen: bool = True,
    ) -> None:
        self.signal, self.part, self.facts, self.policy = signal, part, facts, policy
        self.now, self.seen = 1_000.0, seen
        self.changes: list[Transition] = []
        self.ledger = self.new_ledger()

    def see(self, *seen: Observation, every: float = 5.0) -> Verdict:
        """Observe these, one every `every` seconds, and return the signal's verdict."""
        for observation in seen:
            changes = self.ledger.observe(GPU, observation, self.now)
            self.changes += [change for change in changes if change.signal == self.signal]
            self.now += every
        return self.verdict

    def steps(self, *seen: Observation, every: float = 5.0) -> list[Verdict]:
        """Return the signal's verdict after each of these observations."""
        return [self.see(observation, every=every) for observation in seen]

    def override(self) -> Verdict:
        """Return the signal's verdict after an operator's override."""
        self.ledger.override(GPU)
        return self.verdict

    def restart(self) -> Verdict:
        """Return the signal's verdict in a new process that reads the evidence of this one."""
        evidence = self.ledger.evidence()
        self.ledger = self.new_ledger()
        self.ledger.replay(evidence)
        return self.verdict

    def new_ledger(self) -> HealthLedger:
        """Return the ledger of a new process, without evidence."""
        made = HealthLedger(self.policy)
        made.watch(GPU, self.facts)
        if self.seen:
            made.observe(GPU, SEEN, 0.0)
        return made

    @property
    def written(self) -> list[Evidence]:
        """The evidence for a new process, without the GPU's marks."""
        return [entry for entry in self.ledger.evidence() if entry.signal != BACKGROUND.signal]

    @property
    def verdict(self) -> Verdict:
        """The verdict of the signal, or of its latch for `part`."""
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

    @property
    def stored(self) -> AnyLatch | None:
        """The signal's latch, open or not."""
        return self.ledger._records[GPU].latches.get(LatchKey(self.signal))

    @property
    def overall(self) -> Verdict:
        """The verdict of all signals together."""
        return self.ledger.verdict(GPU)
