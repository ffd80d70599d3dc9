"""A ledger of two GPUs under the policy that the package ships with, and what it may hear of them."""

from gpu_plugin.devices.node import Thresholds
from gpu_plugin.health.latch import Transition
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.observation import Facts, Fault, Observation, Sample
from gpu_plugin.health.policy import HealthPolicy, XidPolicy
from gpu_plugin.health.record import MigUuids
from gpu_plugin.health.xid_table import XID_TABLE

GUARDED = HealthPolicy(XidPolicy(XID_TABLE))
UNGUARDED = HealthPolicy(GUARDED.xids, flap_hold=0)
H200 = Facts(Thresholds(95, 89, 95, 87), contains_errors=True, says_action=True)
A, B = "GPU-aaaa", "GPU-bbbb"
LOST = Sample(fault=Fault.LOST, detail="the GPU is lost")
RESET_REQUIRED = Sample(fault=Fault.RESET_REQUIRED, detail="the GPU must be reset")
HUNG = Sample(fault=Fault.HUNG, detail="no answer for 30 s")
ERROR = Sample(fault=Fault.ERROR, detail="Unknown Error")
SEEN = Sample(asked=frozenset())
"""A good look that asked for nothing: the GPU is at work, and nothing more is known of it."""


def ledger(*uuids: str, policy: HealthPolicy = GUARDED, slices: MigUuids | None = None) -> HealthLedger:
    """A ledger that watches these GPUs, or the two there are; `slices` are those of each."""
    made = HealthLedger(policy, "boot-1")
    for uuid in uuids or (A, B):
        made.watch(uuid, H200, slices)
        made.observe(uuid, SEEN, 0.0)
    return made


def hear(
    to: HealthLedger, *seen: Observation, uuid: str = A, start: float = 1_000.0, every: float = 1.0
) -> list[Transition]:
    """Every verdict that these observations of a GPU change, one every so many seconds."""
    return [
        change for at, observation in enumerate(seen) for change in to.observe(uuid, observation, start + at * every)
    ]


def energies(*values: int | None) -> list[Sample]:
    """Looks that tell the energy used, and nothing else."""
    return [Sample(counting=0, energy=value) for value in values]
