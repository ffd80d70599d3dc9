"""A ledger of two GPUs under the policy that the package ships with, and observations of them."""

from gpu_plugin.devices.node import Thresholds
from gpu_plugin.health.latch import Transition
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Facts, Fault, Observation, Sample
from gpu_plugin.health.policy import HealthPolicy, XidPolicy
from gpu_plugin.health.record import MigUuids
from gpu_plugin.health.xid_table import XID_TABLE

GUARDED = HealthPolicy(XidPolicy(XID_TABLE))
UNGUARDED = HealthPolicy(GUARDED.xids, flap_hold=0)
H200 = Facts(Thresholds(95, 89, 95, 87), Thresholds(-8, -2), contains_errors=True, says_action=True)
A, B = "GPU-aaaa", "GPU-bbbb"
LOST = Sample(fault=Fault.LOST, detail="the GPU is lost")
RESET_REQUIRED = Sample(fault=Fault.RESET_REQUIRED, detail="the GPU must be reset")
HUNG = Sample(fault=Fault.HUNG, detail="no answer for 30 s")
ERROR = Sample(fault=Fault.ERROR, detail="Unknown Error")
VANISHED = Sample(fault=Fault.VANISHED, detail="no driver is bound to it")
UNLOADED = Sample(fault=Fault.DRIVER, detail="the driver is not loaded")
SEEN = Sample(asked=frozenset())  # a good look that requested no fields


def ledger(*uuids: str, policy: HealthPolicy = GUARDED, slices: MigUuids | None = None) -> HealthLedger:
    """Return a ledger that watches these GPUs, or A and B. `slices` are the MIG devices of each."""
    made = HealthLedger(policy, "boot-1")
    for uuid in uuids or (A, B):
        made.watch(uuid, H200, slices)
        made.observe(uuid, SEEN, 0.0)
    return made


def observe(
    to: HealthLedger, *seen: Observation, uuid: str = A, start: float = 1_000.0, every: float = 1.0
) -> list[Transition]:
    """Return the changes of verdicts by these observations of a GPU, one every `every` seconds."""
    return [
        change for at, observation in enumerate(seen) for change in to.observe(uuid, observation, start + at * every)
    ]


def restarted(before: HealthLedger, slices: MigUuids | None = None) -> HealthLedger:
    """Return the ledger of a new process that reads the evidence of this one."""
    new = ledger(policy=before.policy, slices=slices)
    new.replay(before.evidence())
    return new


def energies(*values: int | None) -> list[Sample]:
    """Return looks that read the energy, and nothing else."""
    return [Sample(counting=0, energy=value) for value in values]


class Killed:
    """A ledger whose process is killed: `written` is the evidence when it last had to be stored."""

    def __init__(self, of: HealthLedger) -> None:
        self.ledger, self.written, self.revision = of, of.evidence(), of.revision

    def observe(self, seen: Observation, now: float, uuid: str = A) -> None:
        """Observe this, and store the evidence if it has to be stored."""
        self.ledger.observe(uuid, seen, now)
        if self.ledger.revision != self.revision:
            self.written, self.revision = self.ledger.evidence(), self.ledger.revision
