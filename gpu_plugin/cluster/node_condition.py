"""What the condition GPUHealthy and the taint of our Node are to say, and when they are written. Pure.

The condition is True while no GPU is Unhealthy, False while one is, and Unknown where nobody can say. It is left as it stands
when the daemon ends: a rolling update is no news, and what repairs nodes would take Unknown for one. Its heartbeat tells how old
it is, as with node-problem-detector's.
"""

from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Final

import msgspec

from gpu_plugin.cluster.node_api import Condition
from gpu_plugin.config.times import rfc3339
from gpu_plugin.config.words import are, shortened
from gpu_plugin.devices.gpu_names import called
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.signals import SIGNALS, SignalKind, advice
from gpu_plugin.health.signals.orders import MAINTENANCE
from gpu_plugin.runtime.rates import TokenBucket

CONDITION: Final = "GPUHealthy"
TAINT: Final = "nvidia.com/gpu-unhealthy"

HEARTBEAT = 300.0
"""Seconds between two heartbeats of the condition at least. node-problem-detector's is 5 minutes
(--k8s-exporter-heartbeat-period), and so is the kubelet's own where nothing changes."""

SPREAD = 0.2
"""How much longer that may be, as a share of it, so that nodes do not write together."""

# Changes of the condition that are written at once, and seconds for each further one: a GPU that flaps is no storm.
BURST = 5
PER = 60.0

PATIENCE = 60.0
"""Seconds after the start until it is said that nothing is known; until then what an earlier process said stands."""

# Characters of the message, of what it says of one GPU, and GPUs that are named.
LONGEST_MESSAGE = 1024
LONGEST_OF_ONE = 240
MAX_NAMED_GPUS = 4


class Fitness(Enum):
    """How fit for use a GPU is, as far as remedies of a cluster are concerned."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """Handed out, and worth an operator's look; so is a GPU of which only a MIG device is Unhealthy."""
    HELD_BACK = "held back"
    """Cordoned or released by an operator, and sound as far as anybody knows: that is no fault and calls for no remedy."""
    UNHEALTHY = "unhealthy"
    UNSEEN = "unseen"
    """This process has had no good look at it yet, so nothing can be said."""


class GpuFitness(msgspec.Struct, frozen=True):
    """One GPU.

    `name` is as people are told of it; `why` what makes it so, in words, the worst first; `causes` the same as names of
    signals, which do not change with what is read; `action` what an operator is advised to do, empty for nothing.
    """

    name: str
    fitness: Fitness
    why: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    action: str = ""


_SAYS = {
    Fitness.UNHEALTHY: ("False", "GPUUnhealthy", "Unhealthy"),
    Fitness.UNSEEN: ("Unknown", "GPUNotSeen", "not looked at yet"),
    Fitness.DEGRADED: ("True", "GPUDegraded", "degraded and still given to pods"),
    Fitness.HELD_BACK: ("True", "GPUHeldBack", "held back by an operator and otherwise sound"),
}
"""What the condition is where the worst of the GPUs is such: its status, its reason, and words for it; the worst first."""


class ConditionContent(msgspec.Struct, frozen=True):
    """What the condition is to say. `cause` changes with what is wrong, and not with what is read of it."""

    status: str
    reason: str
    message: str
    cause: object = None


def wanted(gpus: Sequence[GpuFitness], trouble: str | None, age: float) -> ConditionContent | None:
    """What the condition is to say; None: what it says already may stay.

    Args:
        gpus: those of the node.
        trouble: why no GPU can be reached, empty if a GPU can be reached or the node has none, None if neither is known yet.
        age: seconds since the daemon began.
    """
    if not gpus and trouble == "":
        return None
    if not gpus or (trouble and all(gpu.fitness is Fitness.UNSEEN for gpu in gpus)):
        if age < PATIENCE:
            return None
        return ConditionContent(
            "Unknown", "DriverUnavailable", shortened(trouble or "no GPU is known yet", LONGEST_MESSAGE), trouble
        )
    worst = next((each for each in _SAYS if any(gpu.fitness is each for gpu in gpus)), None)
    if worst is None:
        return ConditionContent("True", "AllGPUsHealthy", f"All GPUs are Healthy: {len(gpus)}")
    if worst is Fitness.UNSEEN and age < PATIENCE:
        return None
    status, reason, words = _SAYS[worst]
    told = [gpu for gpu in gpus if gpu.fitness is worst]
    more = f"; and {len(told) - MAX_NAMED_GPUS} more" if len(told) > MAX_NAMED_GPUS else ""
    listed = "; ".join(shortened(_one(gpu), LONGEST_OF_ONE) for gpu in told[:MAX_NAMED_GPUS])
    message = f"{len(told)} of {len(gpus)} GPUs {are(len(told))} {words}: {listed}{more}"
    return ConditionContent(
        status, reason, shortened(message, LONGEST_MESSAGE), tuple((gpu.name, gpu.causes) for gpu in told)
    )


def tainted(gpus: Sequence[GpuFitness]) -> bool | None:
    """Whether the Node is to carry the taint; None: nobody can say, and it stays as it is."""
    if any(gpu.fitness is Fitness.UNHEALTHY for gpu in gpus):
        return True
    return None if not gpus or any(gpu.fitness is Fitness.UNSEEN for gpu in gpus) else False


class ConditionClock:
    """Says when the condition is to be written, and with which times."""

    def __init__(self) -> None:
        self._known: Condition | None = None
        self._cause: object = None
        self._bucket = TokenBucket(BURST, PER)
        self._spread = 0.0

    @property
    def known(self) -> bool:
        """Whether the API server has the condition, as far as is known."""
        return self._known is not None

    def remember(self, known: Condition | None) -> None:
        """Takes what the API server has, at the start or after somebody else wrote it."""
        self._known = known

    def due(self, wants: ConditionContent, now: float, unix: float) -> float:
        """Seconds until it is to be written, 0 for now. `now` is a steady clock, `unix` the wall clock."""
        if self._news(wants):
            return self._bucket.wait(now)
        assert self._known is not None
        age = unix - parsed(self._known.last_heartbeat_time)
        return max(0.0, HEARTBEAT * (1 + self._spread) - age) if age >= 0 else 0.0

    def next(self, wants: ConditionContent, unix: float, dice: float) -> Condition:
        """The condition as it is to be written now; `dice` in [0, 1) spreads the next heartbeat."""
        self._spread = SPREAD * dice
        known, at = self._known, rfc3339(unix)
        since = known.last_transition_time if known is not None and known.status == wants.status else None
        return Condition(CONDITION, wants.status, wants.reason, wants.message, at, since or at)

    def written(self, condition: Condition, wants: ConditionContent, now: float) -> None:
        """Notes that this condition was written to the Node at `now`, in seconds of a steady clock."""
        if self._news(wants):
            self._bucket.take(now)
        self._known, self._cause = condition, wants.cause

    def _news(self, wants: ConditionContent) -> bool:
        known = self._known
        if known is None or (known.status, known.reason) != (wants.status, wants.reason):
            return True
        return self._cause != wants.cause and known.message != wants.message


def parsed(text: str | None) -> float:
    """The Unix time of RFC 3339; that of long ago where it is none."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return 0.0


def _one(gpu: GpuFitness) -> str:
    why = "; ".join(gpu.why)
    return f"{gpu.name}: {why}{f' ({gpu.action})' if gpu.action else ''}"


def fitness_of(ledger: HealthLedger, gpu: Gpu) -> GpuFitness:
    """The fitness of a GPU of the node."""
    standing = sorted(
        ((key, latch, verdict) for key, latch, verdict in ledger.standing(gpu.uuid, None) if verdict > Verdict.APP),
        key=lambda one: (bool(one[0].device), -one[2], one[1].since, one[0]),
    )
    unseen = [one for one in standing if SIGNALS[one[0].signal].of_process]
    orders = [one for one in standing if SIGNALS[one[0].signal].kind is SignalKind.ORDER]
    faults = [one for one in standing if one not in unseen and one not in orders]
    if any(verdict is Verdict.FATAL and not key.device for key, _, verdict in faults):
        fitness, telling = Fitness.UNHEALTHY, faults
    elif unseen and not any(key.signal == MAINTENANCE for key, _, _ in orders):  # who is released is not looked at
        fitness, telling = Fitness.UNSEEN, unseen
    elif orders:
        fitness, telling = Fitness.HELD_BACK, orders
    elif faults:
        fitness, telling = Fitness.DEGRADED, faults
    else:
        return GpuFitness(called(gpu), Fitness.HEALTHY)
    first, latch, _ = telling[0]
    return GpuFitness(
        called(gpu),
        fitness,
        tuple(dict.fromkeys(each.detail or key.signal for key, each, _ in telling)),
        tuple(dict.fromkeys(" ".join(filter(None, key)) for key, _, _ in telling)),
        advice(first, ledger.policy, gpu.uuid, latch, ledger.facts(gpu.uuid)),
    )
