from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_plugin.devices.node import Link
from gpu_plugin.placement.prepared import Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.whole import choose
from gpu_plugin.placement_views.explain import explain
from tests.unit.placement.nodes import dgx1, mesh, placement, random_nodes, two_sockets


def why(made: Placement, available, size: int, required=()) -> str:
    return explain(made, available, required, size).why


@settings(max_examples=80, deadline=None)
@given(random_nodes(most=8, least=2), st.data())
def test_the_runner_up_is_what_would_be_chosen_next(probed, data):
    made = Placement.of(Topology.of(probed))
    pool = data.draw(st.sets(st.integers(0, len(probed.gpus) - 1), min_size=2), label="available")
    must = data.draw(st.sets(st.sampled_from(sorted(pool)), max_size=2), label="required")
    size = data.draw(st.integers(max(1, len(must)), len(pool)), label="size")
    told = explain(made, pool, must, size)
    assert told.choice == choose(made, pool, must, size)
    sets = [one for one in combinations(sorted(pool), size) if must <= set(one) and one != told.choice.gpus]
    if not sets:
        assert (told.runner_up, told.why) == (
            None,
            "it is all that is available" if size == len(pool) else "it is all that must be included",
        )
        return
    assert told.runner_up is not None
    assert told.runner_up.gpus in sets
    assert told.runner_up.score == max(map(made.topology.score, sets))
    assert ("more than the runner-up" in told.why) is (told.choice.score > told.runner_up.score)
    assert ("the lower ind" in told.why) <= (told.choice.gpus < told.runner_up.gpus)


def test_each_thing_that_counts_has_its_words():
    dgx = Placement.of(Topology.of(dgx1()))
    assert why(dgx, [0, 1, 3], 2, [0]) == "a total score of 230, 100 more than the runner-up's"
    assert why(dgx, [0, 4, 5, 6, 7], 1) == ("what stays free gives pods of 4 a total score of 1080 instead of 820")
    assert why(dgx, [0, 1, 5], 1) == ("what stays free gives pods of 2 a total score of 210 instead of 130")
    fork = placement([0] * 4, {(0, 1): Link(1), (0, 2): Link(1), (0, 3): Link(1), (1, 2): Link(1)})
    assert why(fork, [0, 1, 2, 3], 2, [3]) == "a total score of 110, 100 more than the runner-up's"
    assert why(fork, [0, 1, 2, 3], 1) == "the pairs that stay free score 330 in all instead of 230"
    numa = placement([at % 2 for at in range(4)], mesh(range(4), Link()))
    assert why(numa, [0, 1, 2], 2) == ("both score 10; on nearer NUMA nodes, with distances of 10 in all instead of 20")


def test_where_nothing_tells_two_apart_the_lower_numbers_do():
    made = placement([0] * 4, mesh(range(4), Link(12, 20, switched=True)))
    assert why(made, range(4), 2) == (
        "both score 1240; the two are equal in links, distance and what they leave; the lower indices are taken"
    )
    assert why(made, range(4), 1) == (
        "the two are equal in links, distance and what they leave; the lower index is taken"
    )


def test_what_is_impossible_or_only_searched_for_has_no_runner_up():
    made = Placement.of(Topology.of(two_sockets(6)))
    told = explain(made, [0, 1], [], 3)
    assert (told.choice.gpus, told.runner_up, told.why) == ((), None, "3 are asked for and 2 are available")
    large = placement([0] * 18, mesh(range(18), Link(1, 40)))
    told = explain(large, range(18), [], 3)
    assert (told.runner_up, told.why) == (None, "a bounded search does not say what came second")
    assert explain(large, range(18), [], 18).why == "it is all that is available"
