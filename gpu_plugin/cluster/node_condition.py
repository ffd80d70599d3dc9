"""The content of the condition GPUHealthy and of the taint of our Node, and the times to write them. Pure.

The condition is True while no GPU is Unhealthy, False while a GPU is Unhealthy, and Unknown if the health is not known. It does
not change when the daemon ends: programs that repair nodes would treat Unknown as a fault during each rolling update. The
heartbeat shows the condition's age, as in conditions of node-problem-detector.
"""

from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Final

import msgspec

from gpu_plugin.cluster.node_api import Condition
from gpu_plugin.config.times import rfc3339
from gpu_plugin.config.words import are, shortened
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.signals import SIGNALS, SignalKind
from gpu_plugin.health.signals.orders import MAINTENANCE
from gpu_plugin.runtime.rates import TokenBucket
from gpu_plugin.status.model import Gpu

CONDITION: Final = "GPUHealthy"
TAINT: Final = "nvidia.com/gpu-unhealthy"

# The least seconds between two heartbeats of the condition. node-problem-detector uses 5 minutes
# (--k8s-exporter-heartbeat-period), and so does the kubelet while nothing changes.
HEARTBEAT = 300.0
SPREAD = 0.2  # the largest random addition to HEARTBEAT, as a share of it: nodes should not write at the same moment

# Changes of the condition that are written at once, and seconds for each further change. They limit the requests for a GPU that
# flaps.
BURST = 5
PER = 60.0

PATIENCE = 60.0  # seconds until the condition may become Unknown; until then the condition of an earlier process stays

# The most characters of the message, the most characters about one GPU, and the most GPUs that are named.
LONGEST_MESSAGE = 1024
LONGEST_OF_ONE = 240
MAX_NAMED_GPUS = 4


class Fitness(Enum):
    """The state of a GPU for programs that repair the nodes of a cluster."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"  # pods get it, but an operator should check it; also a GPU with an Unhealthy MIG device
    HELD_BACK = "held back"  # an operator has cordoned or released it, and no fault is known: it needs no repair
    UNHEALTHY = "unhealthy"
    UNSEEN = "unseen"  # this process has not checked it successfully yet, so its health is not known


class GpuFitness(msgspec.Struct, frozen=True):
    """The fitness of one GPU.

    Attributes:
        name: the GPU's name in messages.
        fitness: its state.
        why: the reasons for the state as sentences, the worst first.
        causes: the names of the signals with these reasons, which do not change with each reading.
        action: the advice to the operator; empty if there is no advice.
    """

    name: str
    fitness: Fitness
    why: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    action: str = ""


# The condition's status, its reason, and words for its message, by the worst fitness of all GPUs; the worst first.
_SAYS = {
    Fitness.UNHEALTHY: ("False", "GPUUnhealthy", "Unhealthy"),
    Fitness.UNSEEN: ("Unknown", "GPUNotSeen", "not checked yet"),
    Fitness.DEGRADED: ("True", "GPUDegraded", "degraded and still given to pods"),
    Fitness.HELD_BACK: ("True", "GPUHeldBack", "held back by an operator and otherwise sound"),
}


class ConditionContent(msgspec.Struct, frozen=True):
    """The wanted content of the condition. `cause` changes with the fault, and stays the same if only a reading changes."""

    status: str
    reason: str
    message: str
    cause: object = None


def wanted(gpus: Sequence[GpuFitness], trouble: str | None, age: float) -> ConditionContent | None:
    """Return the wanted content of the condition; None if the condition should stay unchanged.

    Args:
        gpus: the GPUs of the node.
        trouble: why no GPU can be reached; empty if a GPU can be reached or the node has no GPU; None if this is not known yet.
        age: seconds since the daemon started.
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
    affected = [gpu for gpu in gpus if gpu.fitness is worst]
    more = f"; and {len(affected) - MAX_NAMED_GPUS} more" if len(affected) > MAX_NAMED_GPUS else ""
    described = [
        f"{gpu.name}: {'; '.join(gpu.why)}{f' ({gpu.action})' if gpu.action else ''}"
        for gpu in affected[:MAX_NAMED_GPUS]
    ]
    listed = "; ".join(shortened(each, LONGEST_OF_ONE) for each in described)
    message = f"{len(affected)} of {len(gpus)} GPUs {are(len(affected))} {words}: {listed}{more}"
    return ConditionContent(
        status, reason, shortened(message, LONGEST_MESSAGE), tuple((gpu.name, gpu.causes) for gpu in affected)
    )


def tainted(gpus: Sequence[GpuFitness]) -> bool | None:
    """Whether the Node should have the taint; None if this is not known, and the taint should stay unchanged."""
    if any(gpu.fitness is Fitness.UNHEALTHY for gpu in gpus):
        return True
    return None if not gpus or any(gpu.fitness is Fitness.UNSEEN for gpu in gpus) else False


class ConditionClock:
    """Computes when to write the condition, and with which times."""

    def __init__(self) -> None:
        self._known: Condition | None = None
        self._cause: object = None
        self._bucket = TokenBucket(BURST, PER)
        self._spread = 0.0

    @property
    def known(self) -> bool:
        """Whether the Node had the condition when it was last read or written."""
        return self._known is not None

    def update(self, known: Condition | None) -> None:
        """Store the condition as it was read from the API server; None if the Node does not have it."""
        self._known = known

    def due(self, wants: ConditionContent, now: float, unix: float) -> float:
        """Return the seconds until the next write, 0 for now.

        `now` is in seconds of a monotonic clock, `unix` is Unix time in seconds.
        """
        if self._has_changed(wants):
            return self._bucket.wait(now)
        assert self._known is not None
        age = unix - parsed(self._known.last_heartbeat_time)
        return max(0.0, HEARTBEAT * (1 + self._spread) - age) if age >= 0 else 0.0

    def next(self, wants: ConditionContent, unix: float, dice: float) -> Condition:
        """Return the condition to write now. `dice` in [0, 1) spreads the next heartbeat."""
        self._spread = SPREAD * dice
        known, at = self._known, rfc3339(unix)
        since = known.last_transition_time if known is not None and known.status == wants.status else None
        return Condition(CONDITION, wants.status, wants.reason, wants.message, at, since or at)

    def written(self, condition: Condition, wants: ConditionContent, now: float) -> None:
        """Record that this condition was written to the Node at `now`, in seconds of a monotonic clock."""
        if self._has_changed(wants):
            self._bucket.take(now)
        self._known, self._cause = condition, wants.cause

    def _has_changed(self, wants: ConditionContent) -> bool:
        known = self._known
        if known is None or (known.status, known.reason) != (wants.status, wants.reason):
            return True
        return self._cause != wants.cause and known.message != wants.message


def parsed(text: str | None) -> float:
    """Return an RFC 3339 time as Unix time in seconds; 0 if the text is not a time."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return 0.0


def fitness_of(name: str, gpu: Gpu) -> GpuFitness:
    """Return the fitness of a GPU in the status. `name` is its name in messages."""
    open_ = [signal for signal in gpu.signals if Verdict[signal.verdict] > Verdict.APP]
    unseen = [each for each in open_ if (of := SIGNALS.get(each.name)) is not None and of.of_process]
    orders = [each for each in open_ if (of := SIGNALS.get(each.name)) is not None and of.kind is SignalKind.ORDER]
    faults = [each for each in open_ if each not in unseen and each not in orders]
    faults.sort(key=lambda each: bool(each.device))
    if any(each.verdict == Verdict.FATAL.name and not each.device for each in faults):
        fitness, reasons = Fitness.UNHEALTHY, faults
    elif unseen and not any(each.name == MAINTENANCE for each in orders):  # a released GPU is not checked
        fitness, reasons = Fitness.UNSEEN, unseen
    elif orders:
        fitness, reasons = Fitness.HELD_BACK, orders
    elif faults:
        fitness, reasons = Fitness.DEGRADED, faults
    else:
        return GpuFitness(name, Fitness.HEALTHY)
    return GpuFitness(
        name,
        fitness,
        tuple(dict.fromkeys(each.detail for each in reasons)),
        tuple(dict.fromkeys(" ".join(filter(None, (each.name, str(each.xid or ""), each.device))) for each in reasons)),
        reasons[0].action,
    )
