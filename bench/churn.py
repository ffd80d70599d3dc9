"""Pods that come and go on one node: which GPUs a rule gives them, and how well these are linked. Pure."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from bench.plan import MeasurementError
from bench.quantiles import percentile

PODS = (1, 2, 4, 8)
"""How many GPUs pods ask for, each as likely as the others."""

GROUPS = (4, 8)
"""The sizes of pods for which a fully linked group is looked for."""

Matrix = Sequence[Sequence[int]]
Linked = Sequence[Sequence[bool]]
Rule = Callable[[Sequence[int], int], Sequence[int]]
"""Gives that many of the free GPUs, which come in the order in which the kubelet would name them."""

Order = Callable[[Sequence[int]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Step:
    """A pod that arrives and asks for `size` GPUs or, where that is 0, the end of the pod at `leaves` of those there are."""

    size: int = 0
    leaves: int = 0


@dataclass(frozen=True, slots=True)
class Quality:
    """What pods got. `mean` and `tenth` are of the mean pair score within each pod of several GPUs: over all, and nearest rank.

    `linked` is the share of the pods of 4 and of 8 GPUs that got a fully linked group, out of those of a size for which
    the node has such a group; None where it has none. `pods` is how many pods of several GPUs there were.
    """

    pods: int
    mean: float
    tenth: float
    linked: float | None


def course(gpus: int, steps: int, dice: random.Random, sizes: Sequence[int] = PODS, leaving: float = 0.5) -> list[Step]:
    """The events on a node of that many GPUs: at each step a pod leaves with the probability `leaving`, or a pod arrives.

    Whoever asks for more than is free is turned away. What fits does not depend on which GPUs others got, so that one
    course suits all rules.
    """
    pods: list[int] = []
    happens: list[Step] = []
    free = gpus
    for _ in range(steps):
        if pods and dice.random() < leaving:
            leaves = dice.randrange(len(pods))
            free += pods.pop(leaves)
            happens.append(Step(leaves=leaves))
            continue
        size = dice.choice(sizes)
        if size <= free:
            free -= size
            pods.append(size)
            happens.append(Step(size))
    return happens


def played(steps: Sequence[Step], gpus: Sequence[int], rule: Rule, order: Order) -> list[tuple[int, ...]]:
    """The GPUs, ascending, that each pod gets by that rule. Raises MeasurementError where they are not what was asked for."""
    free = set(gpus)
    pods: list[tuple[int, ...]] = []
    got = []
    for step in steps:
        if not step.size:
            free.update(pods.pop(step.leaves))
            continue
        chosen = tuple(sorted(rule(order(sorted(free)), step.size)))
        if len(set(chosen)) != step.size or not free.issuperset(chosen):
            raise MeasurementError(f"{step.size} of {sorted(free)} were asked for, and {chosen} chosen")
        free.difference_update(chosen)
        pods.append(chosen)
        got.append(chosen)
    return got


def quality(got: Sequence[tuple[int, ...]], gpus: Sequence[int], scores: Matrix, linked: Linked) -> Quality:
    """How good what pods got out of these GPUs is, by pair scores and by whether two GPUs are linked.

    Raises ValueError where no pod has several GPUs.
    """
    known = {pod: _mean_score(pod, scores) for pod in set(got) if len(pod) > 1}
    means = [known[pod] for pod in got if pod in known]
    sizes = {size for size in GROUPS if any(fully_linked(group, linked) for group in combinations(gpus, size))}
    groups = {pod: fully_linked(pod, linked) for pod in set(got) if len(pod) in sizes}
    found = [groups[pod] for pod in got if pod in groups]
    share = sum(found) / len(found) if found else None
    return Quality(len(means), sum(means) / len(means), percentile(means, 10), share)


def fully_linked(gpus: Sequence[int], linked: Linked) -> bool:
    """Whether every two of them are linked."""
    return all(linked[one][other] for one, other in combinations(gpus, 2))


def _mean_score(gpus: Sequence[int], scores: Matrix) -> float:
    pairs = list(combinations(gpus, 2))
    return sum(scores[one][other] for one, other in pairs) / len(pairs)
