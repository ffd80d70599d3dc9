from itertools import combinations

from hypothesis import given, settings

from gpu_plugin.devices.node import Link
from gpu_plugin.placement.subsets import LARGEST, Subsets, merits
from gpu_plugin.placement.topology import Topology

from .nodes import dgx1, mesh, random_nodes, topology


@settings(max_examples=25, deadline=None)
@given(random_nodes(most=8))
def test_merit_is_the_score_and_then_the_nearness_of_every_set(probed):
    found = Topology.of(probed)
    judged = Subsets.of(found)
    for size in range(len(found) + 1):
        sets = list(combinations(range(len(found)), size))
        by_rule = sorted(sets, key=lambda gpus: (-found.score(gpus), found.distance(gpus), gpus))
        assert [judged.gpus(mask) for mask in judged.best_first[size]] == by_rule
        for one in sets:
            mask = judged.mask(one)
            assert judged.gpus(mask) == one
            same = [other for other in sets if judged.merit[judged.mask(other)] == judged.merit[mask]]
            assert {(found.score(other), found.distance(other)) for other in same} == {
                (found.score(one), found.distance(one))
            }


def test_of_sets_of_one_size_the_greater_mask_has_the_lower_positions():
    judged = Subsets.of(Topology.of(dgx1()))
    sets = list(combinations(range(8), 3))
    assert sorted(sets, key=judged.mask, reverse=True) == sets


def test_distances_never_outweigh_a_score():
    found = topology([0, 1, 2], {(0, 1): Link(0, 40, numa_distance=255), (0, 2): Link(0, 50, numa_distance=10)})
    weights = merits(found)
    assert weights[0][1] > weights[0][2]
    assert weights[0][1] == weights[1][0]


def test_the_tables_of_sixteen_take_less_than_a_mebibyte():
    judged = Subsets.of(topology([0] * LARGEST, mesh(range(LARGEST), Link(1, 40))))
    tables = [memoryview(table) for table in (judged.merit, judged.remainder, *judged.best_first)]  # type: ignore[arg-type]
    assert sum(table.nbytes for table in tables) < 2**20
