from itertools import combinations

from hypothesis import given, settings

from gpu_plugin.devices.node import Link
from gpu_plugin.placement.subsets import LARGEST, Subsets
from gpu_plugin.placement.topology import Topology

from .nodes import dgx1, mesh, random_nodes, topology


@settings(max_examples=25, deadline=None)
@given(random_nodes(most=8))
def test_every_set_is_there_with_its_totals_the_best_first(probed):
    found = Topology.of(probed)
    judged = Subsets.of(found)
    for size in range(len(found) + 1):
        sets = list(combinations(range(len(found)), size))
        by_rule = sorted(sets, key=lambda gpus: (-found.score(gpus), found.distance(gpus), gpus))
        assert [judged.gpus(mask) for mask in judged.best_first[size]] == by_rule
        for one in sets:
            mask = judged.mask(one)
            assert judged.gpus(mask) == one
            assert found.parts(judged.weight[mask]) == (found.score(one), found.distance(one))
            nodes = [found.numa[gpu] for gpu in one]
            squares = sum(nodes.count(node) ** 2 for node in set(nodes))
            assert judged.evenness[mask] == len(found) ** 2 - squares


def test_of_sets_of_one_size_the_greater_mask_has_the_lower_positions():
    judged = Subsets.of(Topology.of(dgx1()))
    sets = list(combinations(range(8), 3))
    assert sorted(sets, key=judged.mask, reverse=True) == sets


def test_the_tables_of_sixteen_take_about_a_mebibyte():
    judged = Subsets.of(topology([0] * LARGEST, mesh(range(LARGEST), Link(1, 40))))
    tables = (judged.weight, judged.remainder, judged.evenness, *judged.best_first)
    assert sum(memoryview(table).nbytes for table in tables) <= 2**20
