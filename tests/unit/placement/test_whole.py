"""The choice of whole GPUs, compared with every set."""

from itertools import combinations, count
from math import comb

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gpu_plugin.devices.node import Link, Node
from gpu_plugin.placement.subsets import IMMEDIATE_GPUS, LARGEST, Placement, Subsets
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.whole import Budget, Choice, How, choose

from .nodes import DGX1_NVLINKS, dgx1, mesh, placement, random_nodes, topology
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


@pytest.mark.parametrize("must", [[], [0], [5], [6, 7]])
def test_four_of_a_dgx1_are_a_fully_linked_quad(must):
    found = choose(Placement.of(Topology.of(dgx1())), range(8), must, 4)
    pairs = {f"{one}-{other}" for one, other in combinations(found.gpus, 2)}
    assert pairs <= {entry.partition(":")[0] for entry in DGX1_NVLINKS.split()}
    assert found.gpus in {(0, 1, 2, 3), (4, 5, 6, 7)}


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
