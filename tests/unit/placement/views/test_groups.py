"""Which GPUs hang together, found of matrices that are known by heart and of any others."""

from itertools import combinations

import pytest
from hypothesis import given

from gpu_plugin.devices.node import Link, Node
from gpu_plugin.devices.nvml_h import TopologyLevel
from gpu_plugin.placement.views.groups import LinkGroups, spans
from tests.unit.placement.nodes import dgx1, mesh, node, random_nodes

SWITCHED = Link(18, 40, switched=True)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [((), ""), ((5,), "5"), ((0, 1), "0-1"), ((0, 1, 2, 4), "0-2,4"), ((1, 3, 5), "1,3,5"), ((0, 2, 3, 9), "0,2-3,9")],
)
def test_runs_are_shortened(numbers, words):
    assert spans(numbers) == words


def test_the_hybrid_cube_mesh_is_one_group_with_two_complete_quads():
    groups = LinkGroups.of(dgx1())
    [group] = groups.nvlink
    assert (group.gpus, group.switched, group.fewest, group.most, group.pairs) == (tuple(range(8)), False, 1, 2, 16)
    assert not group.whole
    assert group.complete == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups.numa == ((0, (0, 1, 2, 3)), (1, (4, 5, 6, 7)))
    assert groups.pcie == {TopologyLevel.HOSTBRIDGE: ((0, 1, 2, 3), (4, 5, 6, 7))}


def test_meshes_of_one_node_are_told_apart_by_their_links():
    made = node([0] * 5, mesh((0, 2, 4), SWITCHED) | mesh((1, 3), SWITCHED))
    groups = LinkGroups.of(
        Node(made.gpus, made.links, cliques={"GPU-00": "nvswitch", "GPU-01": "a.1", "GPU-03": "a.1"})
    )
    assert [(group.gpus, group.mesh, group.whole, group.switched) for group in groups.nvlink] == [
        ((0, 2, 4), "nvswitch", True, True),
        ((1, 3), "a.1", True, True),
    ]
    assert groups.nvlink[0].complete == ((0, 2, 4),)


def test_what_is_nearer_is_not_told_again_further_out():
    near = mesh(range(4), Link(0, TopologyLevel.MULTIPLE)) | {
        (0, 1): Link(0, TopologyLevel.INTERNAL),
        (2, 3): Link(0, TopologyLevel.SINGLE),
    }
    groups = LinkGroups.of(node([None] * 5, near))
    assert groups.pcie == {
        TopologyLevel.INTERNAL: ((0, 1),),
        TopologyLevel.SINGLE: ((2, 3),),
        TopologyLevel.MULTIPLE: ((0, 1, 2, 3),),
    }
    assert groups.numa == ((None, (0, 1, 2, 3, 4)),)


def test_one_unreadable_pair_splits_no_group():
    links = mesh(range(4), Link(0, TopologyLevel.SINGLE)) | {(0, 3): Link()}
    assert LinkGroups.of(node([0] * 4, links)).pcie == {TopologyLevel.SINGLE: ((0, 1, 2, 3),)}


@given(random_nodes())
def test_groups_of_any_node_hold_what_they_say(made):
    groups = LinkGroups.of(made)
    assert sorted(gpu for _, gpus in groups.numa for gpu in gpus) == list(range(len(made.gpus)))
    found = []
    for group in groups.nvlink:
        linked = [
            (a, b)
            for a, b in combinations(group.gpus, 2)
            if groups.links[a][b].nvlinks and groups.links[a][b].switched == group.switched
        ]
        found += linked
        assert (group.pairs, group.whole) == (len(linked), len(linked) * 2 == len(group.gpus) * (len(group.gpus) - 1))
        counts = [groups.links[a][b].nvlinks for a, b in linked]
        assert (group.fewest, group.most) == (min(counts), max(counts))
        inside = [gpu for complete in group.complete for gpu in complete]
        assert len(inside) == len(set(inside))
        assert all(set(combinations(complete, 2)) <= set(linked) for complete in group.complete)
        sizes = [len(complete) for complete in group.complete]
        assert sizes == sorted(sizes, reverse=True)
        left = [gpu for gpu in group.gpus if gpu not in inside]
        assert not any({(a, b), (a, c), (b, c)} <= set(linked) for a, b, c in combinations(left, 3))
    every = combinations(range(len(made.gpus)), 2)
    assert sorted(found) == [(a, b) for a, b in every if groups.links[a][b].nvlinks]


def test_numa_nodes_come_in_the_order_of_their_first_gpu():
    assert LinkGroups.of(node([3, 1, 3, None], {})).numa == ((3, (0, 2)), (1, (1,)), (None, (3,)))
