"""What the cluster is told of each GPU's fitness, out of what is held against it. Pure."""

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from gpu_plugin.devices.gpu_names import called
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.latch import Verdict
from gpu_plugin.health.ledger import HealthLedger
from gpu_plugin.health.signals import SIGNALS, SignalKind, advice
from gpu_plugin.health.signals.orders import MAINTENANCE


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


def fitness_of(ledger: HealthLedger, gpus: Iterable[Gpu]) -> Sequence[GpuFitness]:
    """The GPUs of the node, in the order given."""
    return tuple(_of(ledger, gpu) for gpu in gpus)


def _of(ledger: HealthLedger, gpu: Gpu) -> GpuFitness:
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
        advice(first, ledger.policy, gpu.uuid, latch),
    )
