"""Nodes to choose GPUs of: by their links, by number."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from random import Random

from hypothesis import strategies as st

from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology

DGX1_NVLINKS = (
    "0-1:1 0-2:1 0-3:2 0-4:2 1-2:2 1-3:1 1-5:2 2-3:2 2-6:1 3-7:1 4-5:1 4-6:1 4-7:2 5-6:2 5-7:1 6-7:2"  # DGX-1, V100
)


def node(numa: Sequence[int | None], links: Mapping[tuple[int, int], Link]) -> Node:
    """GPUs 0 and up on these NUMA nodes, those without a link between them as far apart as can be."""
    gpus = tuple(Gpu(uuid=f"GPU-{at:02}", index=at, numa_node=on) for at, on in enumerate(numa))
    return Node(gpus, {(gpus[min(pair)].uuid, gpus[max(pair)].uuid): link for pair, link in links.items()})


def topology(numa: Sequence[int | None], links: Mapping[tuple[int, int], Link]) -> Topology:
    return Topology.of(node(numa, links))


def placement(numa: Sequence[int | None], links: Mapping[tuple[int, int], Link]) -> Placement:
    return Placement.of(topology(numa, links))


def mesh(gpus: Iterable[int], link: Link) -> dict[tuple[int, int], Link]:
    """The same link between every two of them."""
    return dict.fromkeys(combinations(sorted(gpus), 2), link)


def dgx1() -> Node:
    """The hybrid cube mesh; within a socket all are under one host bridge."""
    links = {(a, b): Link(0, 30 if a // 4 == b // 4 else 50) for a, b in combinations(range(8), 2)}
    for entry in DGX1_NVLINKS.split():
        ends, _, count = entry.partition(":")
        one, other = map(int, ends.split("-"))
        links[one, other] = Link(int(count), links[one, other].ancestor)
    return node([0] * 4 + [1] * 4, links)


def two_sockets(count: int, **bridges: int) -> Node:
    """Half the GPUs on each socket, linked by PCIe alone but for bridges such as `_0_1=4`."""
    half = count // 2
    links = {(a, b): Link(0, 40 if a // half == b // half else 50) for a, b in combinations(range(count), 2)}
    for pair, nvlinks in bridges.items():
        one, other = map(int, pair.strip("_").split("_"))
        links[one, other] = Link(nvlinks, links[one, other].ancestor)
    return node([at // half for at in range(count)], links)


def flat(count: int, level: int, sockets: int = 2) -> Node:
    """The same PCIe relation (nvmlGpuTopologyLevel_t) between all pairs, and as many GPUs on each socket."""
    return node([at * sockets // count for at in range(count)], mesh(range(count), Link(0, level)))


@st.composite
def random_nodes(draw: st.DrawFn, most: int = 16, least: int = 1) -> Node:
    """Few different links or a single one, so that there are many equals; few NUMA nodes or many, distances known or not."""
    count = draw(st.integers(least, most))
    random = Random(draw(st.integers(0, 2**32)))
    kinds = (
        ([0], [50]),
        ([0], [30]),
        ([0], [40, 50]),
        ([0, 1, 2], [10, 50]),
        ([0, 0, 0, 1, 2, 4, 18], [0, 10, 20, 30, 40, 50]),
    )
    counts, levels = random.choice(kinds)
    told: list[list[int | None]] = [[None], [10, 12, 32]]
    distances = random.choice(told)
    links = {
        pair: Link(random.choice(counts), random.choice(levels), random.random() < 0.2, random.choice(distances))
        for pair in combinations(range(count), 2)
        if len(levels) == 1 or random.random() < 0.9
    }
    nodes: list[list[int | None]] = [[None, 0, 0, 1, 1], [0, 1], [0, 1, 2, 3], [0], [None]]
    on = random.choice(nodes)
    return node([random.choice(on) for _ in range(count)], links)
