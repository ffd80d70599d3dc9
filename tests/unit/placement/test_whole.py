"""The choice of whole GPUs, held against every set there is."""

from itertools import combinations, count
from math import comb

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gpu_plugin.devices.node import Link, Node
from gpu_plugin.placement.subsets import IMMEDIATE_GPUS, LARGEST, Placement, Subsets
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.whole import Budget, Choice, How, choose

from .nodes import DGX1_NVLINKS, dgx1, flat, mesh, placement, random_nodes, topology, two_sockets
from .rule import Rule

# The exact choice


def compared(probed: Node, data: st.DataObject) -> None:
    """Holds a choice from random GPUs of a node against the rule for every set."""
    made = Placement.of(Topology.of(probed))
    gpus = st.integers(0, len(probed.gpus) - 1)
    pool = data.draw(st.sets(gpus, min_size=1), label="available")
    must = data.draw(st.sets(st.sampled_from(sorted(pool)), max_size=3), label="required")
    size = data.draw(st.integers(max(1, len(must)), len(pool)), label="size")
    found = choose(made, pool, must, size)
    event(found.how.name)
    assert found.exact
    assert found.gpus == Rule(made.topology).best(pool, must, size)


@settings(max_examples=200, deadline=None)
@given(random_nodes(most=10), st.data())
def test_it_is_the_best_of_all_sets_in_everything_that_counts(probed, data):
    compared(probed, data)


@settings(max_examples=20, deadline=None)
@given(random_nodes(least=11, most=LARGEST), st.data())
def test_it_is_the_best_of_all_sets_of_up_to_sixteen_too(probed, data):
    compared(probed, data)


@settings(max_examples=100, deadline=None)
@given(random_nodes(most=9), st.data())
def test_exactly_as_many_as_asked_for_out_of_what_is_available_or_none(probed, data):
    made = Placement.of(Topology.of(probed))
    gpus = st.integers(0, len(probed.gpus) - 1)
    pool = data.draw(st.sets(gpus), label="available")
    must = data.draw(st.sets(gpus, max_size=3), label="required")
    size = data.draw(st.integers(-1, 10), label="size")
    found = choose(made, pool, must, size)
    if 0 < size <= len(pool) and must <= pool and len(must) <= size:
        assert len(set(found.gpus)) == len(found.gpus) == size
        assert must <= set(found.gpus) <= pool
        assert list(found.gpus) == sorted(found.gpus)
    else:
        assert found == Choice((), How.IMPOSSIBLE)


# What stays free


@pytest.mark.parametrize("level", [10, 20, 30, 40, 50])
@pytest.mark.parametrize("count", [4, 8, 16])
def test_where_all_pcie_relations_are_the_same_pods_stay_on_one_socket(count, level):
    made = Placement.of(Topology.of(flat(count, level)))
    free, half = set(range(count)), count // 2
    sockets = []
    for size in (1, 1, half):
        chosen = choose(made, free, [], size).gpus
        sockets.append([made.topology.numa[gpu] for gpu in chosen])
        free.difference_update(chosen)
    assert sockets == [[0], [0], [1] * half]


def test_a_pod_that_fits_on_one_socket_leaves_the_fewest_gpus_there():
    made = Placement.of(Topology.of(flat(8, 50)))
    assert choose(made, {0, 1, 4, 5, 6}, [], 2).gpus == (0, 1)
    assert choose(made, {0, 1, 2, 4, 5}, [], 2).gpus == (4, 5)
    assert choose(made, {0, 1, 2, 4, 5, 6, 7}, [], 1).gpus == (0,)
    assert choose(made, {0, 1, 2, 3, 4, 6}, [], 1).gpus == (4,)


def test_a_pod_gets_near_gpus_before_anything_that_it_leaves():
    """The pair on one NUMA node, though the groups that it leaves are linked worse."""
    links = mesh(range(4), Link(0, 40)) | {(2, 3): Link(0, 30)}
    made = placement([0, 1, 0, 1], links)
    assert choose(made, {0, 1, 2}, [], 2).gpus == (0, 2)
    assert choose(made, {0, 1, 3}, [], 2).gpus == (1, 3)
    assert choose(made, range(4), [0], 2).gpus == (0, 2)


def test_single_gpus_keep_the_largest_groups_whole():
    made = Placement.of(Topology.of(dgx1()))
    free = set(range(8))
    taken = []
    for _ in range(5):
        [gpu] = choose(made, free, [], 1).gpus
        free.remove(gpu)
        taken.append(gpu)
    assert taken == [0, 3, 2, 1, 4]  # the first quad is used up before the second is touched


def test_a_single_gpu_comes_from_a_broken_pair():
    made = Placement.of(Topology.of(two_sockets(8, _0_1=4, _2_3=4, _4_5=4, _6_7=4)))
    assert choose(made, {0, 1, 2, 3, 5, 6, 7}, [], 1).gpus == (5,)
    assert choose(made, {0, 1, 3, 4, 5, 6, 7}, [], 3).gpus[-1] in {1, 3}


def test_a_pair_out_of_a_mesh_comes_from_the_broken_quad():
    links = mesh(range(8), Link(12, 50, switched=True)) | mesh(range(4), Link(12, 40, switched=True))
    made = placement([0] * 4 + [1] * 4, links | mesh(range(4, 8), Link(12, 40, switched=True)))
    assert choose(made, set(range(8)) - {5}, [], 1).gpus == (4,)
    assert choose(made, set(range(8)) - {5}, [], 2).gpus == (4, 6)
    assert choose(made, set(range(8)) - {5}, [], 4).gpus == (0, 1, 2, 3)


def test_where_nothing_else_tells_them_apart_numa_nodes_are_kept_even():
    made = placement([0, 0, 0, 1, 1], mesh(range(5), Link(0, 50, numa_distance=10)))  # as firmware may have it
    assert choose(made, range(5), [], 1).gpus == (0,)
    assert choose(made, {1, 2, 3, 4}, [], 1).gpus == (1,)
    assert choose(made, {1, 3, 4}, [], 1).gpus == (3,)


def test_where_links_are_equal_near_numa_nodes_are_preferred():
    made = placement([at % 2 for at in range(8)], mesh(range(8), Link()))
    for size in range(2, 5):
        assert {at % 2 for at in choose(made, range(8), [], size).gpus} == {0}
        assert {at % 2 for at in choose(made, range(8), [1], size).gpus} == {1}
    assert choose(made, range(2, 8), [], 3).gpus == (2, 4, 6)
    sockets = {(a, b): Link(numa_distance=12 if a // 2 == b // 2 else 32) for a, b in combinations(range(4), 2)}
    four = placement([0, 1, 2, 3], sockets)  # a NUMA node each, two to a socket
    assert choose(four, {0, 2, 3}, [], 2).gpus == (2, 3)


def test_groups_of_eight_count_for_more_than_groups_of_four():
    links = mesh(range(8), Link(6, 10, switched=True)) | mesh(range(8, 12), Link(12, 10, switched=True))
    made = placement([0] * 16, mesh(range(16), Link(0, 10)) | links)
    assert choose(made, range(12), [], 1).gpus == (8,)  # eight stay whole, though the quad was linked better
    assert choose(made, range(2, 12), [], 1).gpus == (2,)  # the best eight have the quad in them


@pytest.mark.parametrize("size", [7, 8, 9])
def test_of_thousands_of_sets_with_equal_links_and_distances_it_is_the_one_that_leaves_the_nodes_even(size):
    made = placement([0] * 6 + [1] * 10, mesh(range(16), Link(2, 10, numa_distance=10)))
    found = made.topology
    assert len({(found.score(gpus), found.distance(gpus)) for gpus in combinations(range(16), size)}) == 1
    for pool, must in ((range(16), []), (range(2, 16), []), (range(16), [0, 15])):
        chosen = choose(made, pool, must, size).gpus

        def even(gpus: tuple[int, ...], pool=pool) -> tuple[object, ...]:
            left = [found.numa[gpu] for gpu in pool if gpu not in gpus]
            return -(left.count(0) ** 2 + left.count(1) ** 2), [-gpu for gpu in gpus]

        assert chosen == max((gpus for gpus in combinations(pool, size) if {*must} <= {*gpus}), key=even)


# The short way


@pytest.mark.parametrize("numa", [[0] * 16, [None] * 16, list(range(16))])
def test_of_gpus_that_are_all_equal_it_is_the_first_ones(numa):
    made = placement(numa, mesh(range(16), Link(6, 20, switched=True)))
    assert made.subsets is not None
    assert made.subsets.uniform
    assert choose(made, range(16), [], 5).gpus == (0, 1, 2, 3, 4)
    found = choose(made, {3, 7, 9, 12, 15}, [15], 3, Budget(count().__next__, 0))
    assert found == Choice((3, 7, 15), How.FIRST_OF_EQUALS)  # without looking at the clock


def test_gpus_are_not_all_equal_where_a_link_or_a_numa_node_differs():
    same = mesh(range(4), Link(6, 20))
    for numa, links in (
        ([0] * 4, same | {(1, 3): Link(5, 20)}),
        ([0] * 4, same | {(1, 3): Link(6, 20, numa_distance=12)}),
        ([0, 0, 1, 1], same | mesh(range(4), Link(6, 20, numa_distance=10))),
    ):
        assert not Subsets.of(topology(numa, links)).uniform


def test_all_that_is_available_and_all_that_is_required_need_no_choice():
    made = Placement.of(Topology.of(dgx1()))
    spent = Budget(count().__next__, 0)
    assert choose(made, {1, 5, 6}, [], 3, spent) == Choice((1, 5, 6), How.ALL_AVAILABLE)
    assert choose(made, range(8), {6, 2}, 2, spent) == Choice((2, 6), How.ALL_REQUIRED)


# Recorded defects of others


def test_five_free_with_a_bridged_pair_and_three_on_the_other_socket_give_three():
    made = Placement.of(Topology.of(two_sockets(6, _0_1=4)))  # NVIDIA's plugin died of this one
    found = choose(made, [0, 1, 3, 4, 5], [], 3)
    assert len(set(found.gpus)) == 3
    assert made.topology.score(found.gpus) == max(map(made.topology.score, combinations([0, 1, 3, 4, 5], 3))) == 440


@settings(max_examples=6, deadline=None)
@given(random_nodes(least=14, most=14))
def test_a_pair_of_fourteen_is_the_best_pair(probed):  # from seven sets on, NVIDIA's plugin overwrote what it had found
    made = Placement.of(Topology.of(probed))
    score = made.topology.score
    assert score(choose(made, range(14), [], 2).gpus) == max(map(score, combinations(range(14), 2)))


@pytest.mark.parametrize("must", [[], [0], [5], [6, 7]])
def test_four_of_a_dgx1_are_a_fully_linked_quad(must):
    found = choose(Placement.of(Topology.of(dgx1())), range(8), must, 4)
    pairs = {f"{one}-{other}" for one, other in combinations(found.gpus, 2)}
    assert pairs <= {entry.partition(":")[0] for entry in DGX1_NVLINKS.split()}
    assert found.gpus in {(0, 1, 2, 3), (4, 5, 6, 7)}


@pytest.mark.parametrize("taken", range(8))
def test_two_of_a_dgx1_with_one_taken_have_two_links_between_them(taken):
    one, other = choose(Placement.of(Topology.of(dgx1())), set(range(8)) - {taken}, [], 2).gpus
    assert f"{one}-{other}:2" in DGX1_NVLINKS.split()


def test_one_unreadable_gpu_is_chosen_last_and_changes_nothing_for_others():
    whole, links = Placement.of(Topology.of(dgx1())), dict(dgx1().links)
    for lost in range(8):
        name = f"GPU-{lost:02}"
        probed = {pair: Link() if name in pair else link for pair, link in links.items()}
        made = Placement.of(Topology.of(type(dgx1())(dgx1().gpus, probed)))
        others = sorted(set(range(8)) - {lost})
        for size in range(2, 8):
            assert choose(made, others, [], size).gpus == choose(whole, others, [], size).gpus
            assert lost not in choose(made, range(8), [], size).gpus
        assert lost in choose(made, range(8), [lost], 3).gpus


# The bounded search


def test_more_than_sixteen_gpus_are_searched_and_it_says_so():
    links = mesh(range(20), Link(0, 40)) | mesh([3, 7, 11, 19], Link(2, 40)) | {(0, 1): Link(1, 40)}
    made = placement([0] * 20, links)
    assert made.ready
    assert made.subsets is None
    found = choose(made, range(20), [], 4)
    assert found == Choice((3, 7, 11, 19), How.TOO_MANY_GPUS)
    assert not found.exact
    assert choose(made, range(20), [0], 2).gpus == (0, 1)
    assert choose(made, range(20), [], 20).exact
    with pytest.raises(ValueError, match="20 GPUs have too many sets"):
        Subsets.of(made.topology)


def test_a_budget_that_is_used_up_ends_in_a_search_that_says_so():
    made = placement([0] * 12 + [1] * 4, mesh(range(12), Link(1, 40)) | mesh(range(12, 16), Link(4, 20)))
    ticks = count()
    found = choose(made, range(16), [], 8, Budget(lambda: next(ticks), 0.5))
    assert (found.how, found.exact) == (How.TOO_LATE, False)
    assert made.topology.score(found.gpus) == made.topology.score(choose(made, range(16), [], 8).gpus)
    assert choose(made, range(16), [], 8, Budget(lambda: 0.0, 0)).exact  # a clock that does not move
    assert next(ticks) < 10


def test_a_placement_that_is_not_ready_is_searched_and_it_says_so():
    made = Placement(Topology.of(dgx1()))
    assert not made.ready
    assert Placement.of(Topology()).ready
    found = choose(made, range(8), [], 4)
    assert found == Choice((0, 1, 2, 3), How.NOT_JUDGED_YET)
    assert not found.exact
    assert IMMEDIATE_GPUS < LARGEST


@settings(max_examples=60, deadline=None)
@given(random_nodes(least=2), st.data())
def test_a_bounded_search_is_valid_and_never_worse_than_taking_the_best_next_one(probed, data):
    made = Placement(Topology.of(probed))
    pool = data.draw(st.sets(st.integers(0, len(probed.gpus) - 1), min_size=1), label="available")
    must = data.draw(st.sets(st.sampled_from(sorted(pool)), max_size=3), label="required")
    size = data.draw(st.integers(max(1, len(must)), len(pool)), label="size")
    found = choose(made, pool, must, size)
    assert must <= set(found.gpus) <= pool
    assert len(found.gpus) == size
    grown = sorted(must) or [min(pool)]
    while len(grown) < size:
        left = sorted(pool.difference(grown))
        grown.append(max(left, key=lambda one: made.topology.score([*grown, one])))
    assert made.topology.score(found.gpus) >= made.topology.score(grown)


def test_a_bounded_search_takes_nearer_gpus_only_where_scores_are_equal():
    links = mesh(range(18), Link(0, 50, numa_distance=10))
    far = Link(0, 40, numa_distance=255)
    assert choose(placement([0] * 18, links | {(4, 9): far}), range(18), [], 2).gpus == (4, 9)
    near = {(4, 9): Link(0, 50, numa_distance=9)}
    assert choose(placement([0] * 18, links | near), range(18), [], 2).gpus == (4, 9)


def test_a_bounded_search_looks_at_a_bounded_number_of_gpus():
    made = placement([0] * 64, {pair: Link(sum(pair) % 3, 40) for pair in combinations(range(64), 2)})
    assert comb(64, 32) > 10**18
    assert len(choose(made, range(64), [], 32).gpus) == 32
