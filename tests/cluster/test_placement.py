"""The choice of GPUs for pods on a node whose GPUs have different links."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import combinations

import pytest

from gpu_plugin.cli.topology_source import simulated_node
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.whole import choose
from gpu_plugin.simulation import profile

from .harness.cluster import Cluster
from .harness.plugin import GPUS
from .harness.pods import Pod
from .harness.wait import expect, wait_until

SIMULATED_NODE = "dgx1-v100"
"""A hybrid cube mesh with GPUs 0 to 3 on one socket. GPU 0 has two NVLinks to 3 and to 4, one to 1 and to 2, and no others."""

SIZES = [1] * 6 + [2] * 8 + [4] * 6
"""The number of GPUs of each of twenty pods."""

SEED = 224
"""The seed for the order of these pods. With this order, the first free GPUs are often not the best GPUs."""


@cache
def placement() -> Placement:
    """Return the placement for the node without faults, probed as the daemon does."""
    return Placement.of(Topology.of(simulated_node(SIMULATED_NODE)))


@pytest.fixture
def meshed(cluster: Cluster) -> Cluster:
    """The cluster with a daemon that serves the hybrid cube mesh."""
    cluster.plugin.simulate = SIMULATED_NODE
    cluster.plugin.restart()
    cluster.wait_allocatable(GPUS)
    return cluster


def held(cluster: Cluster, pod: Pod) -> set[int]:
    """Return the numbers of the GPUs in a pod's container."""
    position = placement().topology.position
    return {position[uuid] for uuid in cluster.pods.environment(pod)["NVIDIA_VISIBLE_DEVICES"].split(",")}


def test_twenty_pods_that_come_and_go_get_the_best_of_what_is_free(meshed: Cluster) -> None:
    topology = placement().topology
    scores = {pair: topology.score(pair) for pair in combinations(range(GPUS), 2)}
    assert {pair: link["score"] for pair, link in meshed.plugin.topology().items()} == scores

    order = random.Random(SEED)
    running: dict[str, set[int]] = {}
    not_the_first = 0
    for number, size in enumerate(order.sample(SIZES, len(SIZES))):
        leaving = []
        while GPUS - sum(map(len, running.values())) < size:
            leaving.append(order.choice(sorted(running)))
            del running[leaving[-1]]
        meshed.pods.delete(*leaving)
        free = sorted(set(range(GPUS)).difference(*running.values()))
        best = choose(placement(), free, (), size).gpus
        assert topology.score(best) == max(map(topology.score, combinations(free, size)))

        name = f"pod-{number:02}"
        running[name] = held(meshed, meshed.pods.run(name, gpus=size))
        holding = f"{name} holds {sorted(running[name])} of {free}, which score {topology.score(running[name])}"
        assert running[name] == set(best), f"{holding}; {best} score {topology.score(best)}"
        not_the_first += topology.score(free[:size]) < topology.score(best)
    assert not_the_first > len(SIZES) // 2  # otherwise the order of pods would be too easy


def leave_free(cluster: Cluster, *gpus: int) -> None:
    """Start pods of one GPU each, so that only these GPUs stay free."""
    names = [f"holder-{count}" for count in range(GPUS)]
    for name in names:
        cluster.pods.create(name, gpus=1)
    holders = {name: held(cluster, cluster.pods.wait_running(name)) for name in names}
    assert set().union(*holders.values()) == set(range(GPUS))
    cluster.pods.delete(*(name for name, holds in holders.items() if not holds.isdisjoint(gpus)))


def given(cluster: Cluster, size: int) -> set[int]:
    """Start a pod, delete it, and return the GPUs that it got."""
    pod = cluster.pods.run("asking", gpus=size)
    gpus = held(cluster, pod)
    cluster.pods.delete(pod.name)
    return gpus


def switch_links(cluster: Cluster, one: int, other: int, *, up: bool) -> None:
    """Take all NVLinks from one GPU to another down, or up again, and wait until the daemon reports the change."""
    node = profile.load(SIMULATED_NODE)
    links = [link for link, far_end in enumerate(node.remotes[one]) if far_end == node.gpus[other].pci_bus_id]
    for link in links:
        cluster.plugin.fault(one, f"--nvlink-{'up' if up else 'down'}={link}")

    def seen() -> None:
        pair = cluster.plugin.topology()[one, other]
        expect(holds=pair["nvlinks"] == (len(links) if up else 0), seen=pair)

    wait_until(seen, f"the daemon counts the NVLinks between GPUs {one} and {other} anew", within=15)


def test_gpus_are_not_paired_for_nvlinks_that_are_down(meshed: Cluster) -> None:
    leave_free(meshed, 0, 1, 3)
    assert given(meshed, 2) == {0, 3}
    switch_links(meshed, 0, 3, up=False)
    assert given(meshed, 2) == {0, 1}
    meshed.wait_allocatable(GPUS)  # the GPUs are otherwise unchanged
    switch_links(meshed, 0, 3, up=True)
    assert given(meshed, 2) == {0, 3}


@contextmanager
def topology_manager(cluster: Cluster, policy: str) -> Iterator[None]:
    """Run the kubelet with this policy of the topology manager inside the context."""
    usual = cluster.kubelet.topology_manager_policy
    cluster.kubelet.topology_manager_policy = policy
    try:
        cluster.kubelet.restart()
        cluster.wait_allocatable(GPUS)
        yield
    finally:
        cluster.kubelet.topology_manager_policy = usual
        if cluster.kubelet.running:
            cluster.kubelet.restart()
            cluster.wait_allocatable(GPUS)


def test_the_best_pair_on_the_numa_node_that_the_topology_manager_chose(meshed: Cluster) -> None:
    switch_links(meshed, 0, 1, up=False)
    switch_links(meshed, 0, 3, up=False)
    leave_free(meshed, 0, 1, 3, 4)
    assert given(meshed, 2) == {0, 4}
    with topology_manager(meshed, "best-effort"):
        # 0, 1 and 3 are on one NUMA node: the kubelet offers only these GPUs to the daemon.
        assert given(meshed, 2) == {1, 3}
