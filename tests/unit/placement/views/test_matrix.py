"""The topology as text: the matrix of nvidia-smi, and words."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views.groups import LinkGroups
from gpu_plugin.placement.views.matrix import (
    CHANGES,
    LONGEST_REASON,
    changed_links,
    held_back_words,
    legend,
    matrix,
    scores,
    word,
    words,
)
from gpu_plugin.placement.views.report import Offered
from tests.unit.placement.nodes import dgx1, mesh, node, two_sockets

RECORDED = Path(__file__).parents[1] / "recorded"


def groups_of(made):
    return LinkGroups.of(made)


def test_the_matrix_of_the_cube_mesh_is_what_nvidia_smi_shows():
    recorded = (RECORDED / "dgx1-v100.txt").read_text().splitlines()[1:]
    headings, *rows = (line.split() for line in matrix(groups_of(dgx1())))
    assert [headings[:-1], *rows] == [line.split() for line in recorded]


@pytest.mark.parametrize(
    ("level", "shown"), [(0, "PIX"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"), (99, "SYS")]
)
def test_a_pair_has_nvidia_smis_word_and_nvlinks_take_its_place(level, shown):
    assert word(Link(0, level)) == shown
    assert word(Link(4, level)) == "NV4"


def test_an_unknown_numa_node_is_not_applicable_and_indices_are_the_drivers():
    made = Node((Gpu("GPU-b", 12, numa_node=1), Gpu("GPU-a", 3)))
    assert matrix(groups_of(made)) == [
        "       GPU3   GPU12  NUMA Affinity",
        "GPU3    X     SYS    N/A",
        "GPU12  SYS     X     1",
    ]


def test_scores_stand_where_the_words_do():
    made = two_sockets(4, _0_1=2)
    assert scores(groups_of(made), Topology.of(made).scores) == [
        "      GPU0  GPU1  GPU2  GPU3  NUMA Affinity",
        "GPU0   X    220   10    10    0",
        "GPU1  220    X    10    10    0",
        "GPU2  10    10     X    20    1",
        "GPU3  10    10    20     X    1",
    ]


def test_the_legend_has_what_occurs_the_worst_first():
    terms = [line.split()[0] for line in legend(groups_of(two_sockets(4, _0_1=2)))[1:]]
    assert terms == ["X", "SYS", "NODE", "NV#"]
    pcie = mesh((0, 1, 2), Link(0, 20)) | {(0, 1): Link(0, 10), (2, 3): Link(0, 30)}
    assert [line.split()[0] for line in legend(groups_of(node([0] * 4, pcie)))[1:]] == ["X", "SYS", "PHB", "PXB", "PIX"]


def test_words_of_the_cube_mesh():
    assert list(words(groups_of(dgx1()))) == [
        "NVLink: GPUs 0-7: NV1 to NV2, 16 of 28 pairs; every pair of 0-3 and of 4-7",
        "PCIe host bridge: GPUs 0-3; 4-7",
        "NUMA node 0: GPUs 0-3",
        "NUMA node 1: GPUs 4-7",
    ]


def test_groups_that_are_alike_share_a_line():
    assert next(words(groups_of(two_sockets(6, _0_1=12, _2_3=4, _4_5=12)))) == "NVLink: GPUs 0-1; 4-5: NV12 each"


@pytest.mark.parametrize(
    ("mesh_name", "more"), [("nvswitch", ""), ("nvswitch.3", ""), ("c0ffee.2", ", NVLink domain c0ffee.2"), ("", "")]
)
def test_a_mesh_of_switches_is_one_and_a_named_domain_is_named(mesh_name, more):
    made = node([None], {})
    links = mesh(range(3), Link(18, 40, switched=True)) | {(0, 2): Link(17, 40, switched=True)}
    made = node([None] * 3, links)
    told = list(words(groups_of(Node(made.gpus, made.links, cliques={"GPU-00": mesh_name} if mesh_name else {}))))
    assert told == [f"NVLink: GPUs 0-2: NV17 to NV18 each through switches{more}", "NUMA node unknown: GPUs 0-2"]


def test_one_gpu_is_one_and_one_out_of_reach_is_said():
    assert list(words(groups_of(Node((Gpu("GPU-a", 0, numa_node=0, unreadable="it does not answer"),))))) == [
        "NUMA node 0: GPU 0",
        "GPU 0: its links are shown as they were last known: it does not answer",
    ]


def test_what_is_held_back_is_told_by_reason_and_long_ones_are_cut():
    held = [
        Offered("GPU-c", "GPU-c", "2", "gpu", healthy=0, reason="cordoned"),
        Offered("GPU-d", "GPU-d", "3", "gpu", healthy=0, reason="x" * (2 * LONGEST_REASON)),
        Offered("GPU-f", "GPU-f", "5", "gpu", healthy=0, reason="cordoned"),
        Offered("MIG-a", "MIG-a", "0:1", "mig", healthy=0, reason="Xid 94"),
        Offered("MIG-b", "MIG-b", "0:3", "mig", healthy=0, reason="Xid 94"),
        Offered("MIG-c", "MIG-c", "0:4", "mig", healthy=0, reason="Xid 94"),
        Offered("GPU-gone", "GPU-gone", "", "gpu", healthy=0, reason="it is not on this node any more"),
    ]
    short = "x" * (LONGEST_REASON - 3)
    assert held_back_words(held) == (
        f"GPUs 2,5 (cordoned), GPU 3 ({short}...), MIG devices 0:1,0:3-4 (Xid 94), GPU-gone (it is not on this node any more)"
    )


def test_links_that_changed_are_told_up_to_as_many_as_eight_gpus_have():
    before = dgx1()
    gone = {pair: replace(link, nvlinks=0) if "GPU-03" in pair else link for pair, link in before.links.items()}
    after = replace(before, links=gone)
    assert changed_links(before, after) == "0-3 NV2, now PHB; 1-3 NV1, now PHB; 2-3 NV2, now PHB; 3-7 NV1, now SYS"
    assert changed_links(after, before).startswith("0-3 PHB, now NV2; ")
    assert changed_links(before, before) == changed_links(Node(before.gpus), before) == ""
    fewer = replace(
        before, gpus=before.gpus[:3], links={("GPU-00", "GPU-01"): Link(0, 50), ("GPU-00", "GPU-99"): Link()}
    )
    assert changed_links(before, replace(fewer, gpus=(*fewer.gpus, Gpu("GPU-99", 9)))) == "0-1 NV1, now SYS"
    large, larger = (topology_node(9, Link(count)) for count in (1, 2))
    told = changed_links(large, larger).split("; ")
    assert (len(told), told[-1]) == (CHANGES + 1, "and 8 pairs more")


def topology_node(count: int, link: Link) -> Node:
    return node([None] * count, mesh(range(count), link))
