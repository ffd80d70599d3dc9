from itertools import combinations

from hypothesis import given

from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.placement.topology import Topology

from .nodes import dgx1, node, random_nodes, topology


@given(random_nodes(most=8))
def test_a_pair_is_the_same_from_both_ends_and_a_gpu_is_nothing_to_itself(probed):
    found = Topology.of(probed)
    for one in range(len(found)):
        assert found.scores[one][one] == found.distances[one][one] == 0
        for other in range(one):
            assert found.scores[one][other] == found.scores[other][one] >= 10
            assert found.distances[one][other] == found.distances[other][one] >= 10


def test_positions_are_in_the_order_of_the_index_however_gpus_are_listed():
    probed = dgx1()
    mixed = Node(probed.gpus[::-1], probed.links)
    found = Topology.of(mixed)
    assert found == Topology.of(probed)
    assert found.uuids == tuple(f"GPU-{at:02}" for at in range(8))
    assert found.position == {uuid: at for at, uuid in enumerate(found.uuids)}
    assert found.numa == (0, 0, 0, 0, 1, 1, 1, 1)


def test_the_distance_is_what_firmware_says_else_what_the_numa_nodes_say():
    links = {(0, 1): Link(numa_distance=12), (0, 2): Link(numa_distance=32)}
    found = topology([0, 1, 2], links)
    assert (found.distances[0][1], found.distances[0][2], found.distances[1][2]) == (12, 32, 20)
    assert topology([0, 0], {}).distances[0][1] == 10
    assert topology([0, None], {}).distances[0][1] == 255
    assert topology([None, None], {}).distances[0][1] == 255


def test_a_set_has_the_scores_and_distances_of_all_its_pairs():
    found = Topology.of(dgx1())
    assert found.score([0]) == found.score([]) == found.distance([7]) == 0
    for gpus in combinations(range(8), 3):
        a, b, c = gpus
        assert found.score(gpus) == found.scores[a][b] + found.scores[b][c] + found.scores[a][c]
    assert found.score(range(4)) == 9 * 100 + 6 * 30
    assert found.distance([0, 1, 4]) == 10 + 20 + 20


def test_a_node_without_gpus_or_with_one():
    assert len(Topology.of(Node())) == 0
    assert Topology.of(node([3], {})).scores == ((0,),)
    assert Topology.of(Node((Gpu(uuid="GPU-x", index=4),))).position == {"GPU-x": 0}
