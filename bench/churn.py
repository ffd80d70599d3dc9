"""Simulates pods that start and end on a node: the GPUs that a rule gives them, and how well these are linked. Pure."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from bench.plan import MeasurementError
from bench.quantiles import percentile

PODS = (1, 2, 4, 8)
"""The numbers of GPUs that pods request, with equal probability."""

GROUPS = (4, 8)
"""The sizes of pods for which fully linked groups are counted."""

Matrix = Sequence[Sequence[int]]
Linked = Sequence[Sequence[bool]]
Rule = Callable[[Sequence[int], int], Sequence[int]]
"""Returns that many of the free GPUs, which are in the order in which the kubelet would send them."""

Order = Callable[[Sequence[int]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Step:
    """A pod that starts and requests `size` GPUs. If `size` is 0, the end of the pod at position `leaves`."""

    size: int = 0
    leaves: int = 0


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of the GPUs that pods got.

    Attributes:
        pods: the number of pods with several GPUs.
        mean: the mean, over these pods, of the mean pair score within a pod.
        tenth: the 10th percentile of the same, by nearest rank.
        linked: the share of pods of 4 and 8 GPUs with a fully linked group, among the sizes for which the node has such a group;
            None if the node has no such group.
    """

    pods: int
    mean: float
    tenth: float
    linked: float | None


def course(gpus: int, steps: int, dice: random.Random, sizes: Sequence[int] = PODS, leaving: float = 0.5) -> list[Step]:
    """Return the events on a node with this number of GPUs.

    At each step a pod ends with the probability `leaving`, else a pod starts. A pod that requests more than the free GPUs is left
    out. This does not depend on the GPUs that other pods got, so the same course is valid for all rules.
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
    """Return the GPUs that each pod gets by this rule, ascending. Raises MeasurementError if they do not match the request."""
    free = set(gpus)
    pods: list[tuple[int, ...]] = []
    got = []
    for step in steps:
        if not step.size:
            free.update(pods.pop(step.leaves))
            continue
        chosen = tuple(sorted(rule(order(sorted(free)), step.size)))
        if len(set(chosen)) != step.size or not free.issuperset(chosen):
            raise MeasurementError(f"{step.size} of {sorted(free)} were requested, and {chosen} chosen")
        free.difference_update(chosen)
        pods.append(chosen)
        got.append(chosen)
    return got


def quality(got: Sequence[tuple[int, ...]], gpus: Sequence[int], scores: Matrix, linked: Linked) -> Quality:
    """Return the quality of the GPUs that pods got, by pair scores and by whether two GPUs are linked.

    Raises ValueError if no pod has several GPUs.
    """
    known = {pod: _mean_score(pod, scores) for pod in set(got) if len(pod) > 1}
    means = [known[pod] for pod in got if pod in known]
    sizes = {size for size in GROUPS if any(fully_linked(group, linked) for group in combinations(gpus, size))}
    groups = {pod: fully_linked(pod, linked) for pod in set(got) if len(pod) in sizes}
    found = [groups[pod] for pod in got if pod in groups]
    share = sum(found) / len(found) if found else None
    return Quality(len(means), sum(means) / len(means), percentile(means, 10), share)


def fully_linked(gpus: Sequence[int], linked: Linked) -> bool:
    """Whether every pair of these GPUs is linked."""
    return all(linked[one][other] for one, other in combinations(gpus, 2))


def _mean_score(gpus: Sequence[int], scores: Matrix) -> float:
    pairs = list(combinations(gpus, 2))
    return sum(scores[one][other] for one, other in pairs) / len(pairs)
