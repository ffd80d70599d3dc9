"""The share of 2-GPU pods with GPUs of two sockets, on nodes whose links do not show the sockets. In this process."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from bench.churn import Rule, course, played
from bench.plan import Plan
from bench.table import Row
from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.devices.nvml_h import TopologyLevel
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.whole import choose

STEPS = 15_000
SEEDS = tuple(range(1, 6))

PODS = (1, 2)
LEAVING = 0.2
"""Sizes of pods, and the probability that a step ends a pod. Most of the time, almost no GPU is free."""

BUDGETS: Mapping[int, float] = {4: 18, 8: 22, 16: 19}
"""The greatest share in per cent, by the number of the node's GPUs."""


def pods_across_sockets(plan: Plan, directory: Path) -> list[Row]:
    """Return a row for each size of node."""
    del plan, directory
    return [_row(gpus, budget) for gpus, budget in BUDGETS.items()]


def flat(gpus: int) -> Topology:
    """Return a node with half of the GPUs on each of two sockets and equal PCIe links of all pairs, as in a virtual machine."""
    found = tuple(Gpu(uuid=f"GPU-{at:02}", index=at, numa_node=at * 2 // gpus) for at in range(gpus))
    host_bridge = Link(0, TopologyLevel.HOSTBRIDGE)
    return Topology.of(Node(found, {(one.uuid, other.uuid): host_bridge for one, other in combinations(found, 2)}))


def across(topology: Topology, rule: Rule) -> tuple[int, float]:
    """Return the number of pods of two GPUs, and the per cent of these pods with GPUs of both sockets."""
    gpus = range(len(topology))
    courses = [course(len(topology), STEPS, random.Random(seed), PODS, LEAVING) for seed in SEEDS]
    got = [pod for steps in courses for pod in played(steps, gpus, rule, sorted) if len(pod) == 2]
    return len(got), 100 * sum(len({topology.numa[gpu] for gpu in pod}) > 1 for pod in got) / len(got)


def ours(topology: Topology) -> Rule:
    """Return our rule."""
    placement = Placement.of(topology)
    return lambda free, size: choose(placement, free, (), size).gpus


def links_alone(topology: Topology) -> Rule:
    """Return the former rule: compare the remaining GPUs by score only, then the pod's NUMA distance, then evenness."""
    nowhere = tuple((0,) * len(topology) for _ in topology.uuids)
    subsets = Placement.of(replace(topology, distances=nowhere)).subsets
    assert subsets is not None

    def ranked(free: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
        def rank(gpus: tuple[int, ...]) -> tuple[int, ...]:
            mask = subsets.mask(gpus)
            left = free ^ mask
            return (
                subsets.weight[mask],
                subsets.remainder[left],
                -topology.distance(gpus),
                subsets.evenness[left],
                mask,
            )

        return rank

    def rule(free: Sequence[int], size: int) -> Sequence[int]:
        return max(combinations(free, size), key=ranked(subsets.mask(free)))

    return rule


def _row(gpus: int, budget: float) -> Row:
    topology = flat(gpus)
    (pods, share), (_, before) = (across(topology, rule(topology)) for rule in (ours, links_alone))
    return Row(
        f"2-GPU pods across sockets, 2 x {gpus // 2} GPUs",
        "%",
        pods,
        share,
        budget=budget,
        bare=before,
        ratio=share / before,
        note="bare: the former rule, by which NUMA distance did not count for the GPUs that stay free",
    )
