"""How well the pods' GPUs are linked, in comparison with two other rules, while pods start and end on every simulated node."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.churn import Linked, Order, Quality, Rule, course, played, quality
from bench.partition import BestPartition, known_scores
from bench.plan import Plan
from bench.probed import probed, whole_gpus
from bench.table import Comparison
from gpu_plugin.devices.node import Node
from gpu_plugin.devices.nvml_h import TopologyLevel
from gpu_plugin.placement.preferred import preferred
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.simulation.profile import names

STEPS = 10_000
SEEDS = tuple(range(1, 11))
"""There are many, since the result of a single course depends on chance."""

OURS, FIRST, PARTITION, SORTED = "ours", "first", "partition", "sorted"
"""The rules: placement; the free GPUs of the lowest indices; the best partition, in the kubelet's order and in index order."""

JUDGED = (FIRST, PARTITION)
"""The rules that ours must not be worse than."""


def pods_at_random(plan: Plan, directory: Path) -> list[Comparison]:
    """Compare the rules on every profile with two or more whole GPUs. GPUs in MIG mode are left out, as slices have no links."""
    del plan, directory
    nodes = {name: probed(name) for name in names()}
    return [_comparison(name, node) for name, node in nodes.items() if len(whole_gpus(node)) > 1]


def links(node: Node) -> Linked:
    """Return, by position, whether two GPUs are linked: by NVLink or, if the node has no NVLink, through PCIe switches only."""
    uuids = Topology.of(node).uuids
    if any(link.nvlinks for link in node.links.values()):
        return [[bool(node.link(one, other).nvlinks) for other in uuids] for one in uuids]
    return [[node.link(one, other).ancestor <= TopologyLevel.MULTIPLE for other in uuids] for one in uuids]


def outcomes(node: Node, steps: int, seeds: Sequence[int]) -> list[Mapping[str, Quality]]:
    """Return the quality by rule, by our pair scores: for the pods of each seed, and last for the pods of all seeds."""
    topology = Topology.of(node)
    gpus = [topology.position[device.gpu] for device in whole_gpus(node)]
    partition = BestPartition(known_scores(node)).choose
    rules: Mapping[str, Rule] = {
        OURS: _placement(node),
        FIRST: lambda free, size: sorted(free)[:size],
        PARTITION: partition,
        SORTED: partition,
    }
    got: list[dict[str, list[tuple[int, ...]]]] = []
    for seed in seeds:
        happens = course(len(gpus), steps, random.Random(seed))
        got.append(
            {
                name: played(happens, gpus, rule, sorted if name == SORTED else _kubelets_order(seed))
                for name, rule in rules.items()
            }
        )
    got.append({name: [pod for one in got for pod in one[name]] for name in rules})
    linked = links(node)
    return [{name: quality(pods, gpus, topology.scores, linked) for name, pods in one.items()} for one in got]


def _placement(node: Node) -> Rule:
    """Return our rule, which uses device ids as in a request of the kubelet."""
    placement = Placement.of(Topology.of(node))
    uuids, position = placement.topology.uuids, placement.topology.position
    devices = whole_gpus(node)
    order = {device.id: at for at, device in enumerate(devices)}

    def rule(free: Sequence[int], size: int) -> Sequence[int]:
        chosen = preferred([uuids[at] for at in free], (), size, devices, order, placement)
        return [position[identifier] for identifier in chosen]

    return rule


def _kubelets_order(seed: int) -> Order:
    """Return random orders, since the kubelet has the free devices in a set of Go, which has no order."""
    dice = random.Random(seed)
    return lambda free: dice.sample(free, len(free))


def _comparison(profile: str, node: Node) -> Comparison:
    *each, found = [Comparison(profile, one[OURS].pods, _values(one), JUDGED) for one in outcomes(node, STEPS, SEEDS)]
    below = sum(bool(one.missed()) for one in each)
    return replace(found, note=f"below with {below} of {len(SEEDS)} seeds alone" if below else "")


def _values(found: Mapping[str, Quality]) -> Mapping[str, Mapping[str, float | None]]:
    return {
        "mean pair score": {rule: each.mean for rule, each in found.items()},
        "10th percentile": {rule: each.tenth for rule, each in found.items()},
        "fully linked": {rule: each.linked for rule, each in found.items()},
    }
