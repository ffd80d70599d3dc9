"""Explanations of choices of whole GPUs, compared with the rule for every set."""

from itertools import combinations

from hypothesis import event, given, settings
from hypothesis import strategies as st

from gpu_plugin.devices.node import Link
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views import explain
from gpu_plugin.placement.whole import Trace, choose
from tests.unit.placement.nodes import mesh, placement, random_nodes, two_sockets
from tests.unit.placement.rule import Rule


def traced(made: Placement, available, size: int, required=()) -> Trace:
    trace = Trace()
    assert choose(made, available, required, size, trace=trace) == choose(made, available, required, size)
    return trace


def why(made: Placement, available, size: int, required=()) -> str:
    return explain.why(traced(made, available, size, required))


def difference(rule: Rule, gpus: int, pool: set[int], chosen: tuple[int, ...], second: tuple[int, ...]) -> str:
    """The first number by which two sets differ, in the words for it."""
    pods = [size for size in (8, 4, 2) if size < gpus]
    words = [
        "a total score of {0}, {2} more than the runner-up's",
        "on nearer NUMA nodes, with distances of {0} in all instead of {1}",
        *(
            f"what stays free gives pods of {size} {gives}"
            for size in pods
            for gives in ("a total score of {0} instead of {1}", "distances of {0} in all instead of {1}")
        ),
        "the pairs that stay free score {0} in all instead of {1}",
        "the pairs that stay free have distances of {0} in all instead of {1}",
        "what stays free lies more evenly on NUMA nodes: the squares of their counts add up to {0} instead of {1}",
    ]
    numbers = zip(words, rule.rank(pool, chosen), rule.rank(pool, second), strict=False)
    lower = "index is" if len(chosen) == 1 else "indices are"
    told = next(
        (text.format(abs(one), abs(other), one - other) for text, one, other in numbers if one != other),
        f"the two are equal in links, distance and what they leave; the lower {lower} taken",
    )
    score, less = (rule.linked(each)[0] for each in (chosen, second))
    return told if len(chosen) == 1 or score > less else f"both score {score}; {told}"


@settings(max_examples=150, deadline=None)
@given(random_nodes(most=9, least=2), st.data())
def test_what_came_second_and_why_is_what_the_rule_says_of_every_set(probed, data):
    made = Placement.of(Topology.of(probed))
    pool = data.draw(st.sets(st.integers(0, len(probed.gpus) - 1), min_size=2), label="available")
    must = data.draw(st.sets(st.sampled_from(sorted(pool)), max_size=2), label="required")
    size = data.draw(st.integers(max(1, len(must)), len(pool)), label="size")
    trace = traced(made, pool, size, must)
    assert trace.choice == choose(made, pool, must, size)
    sets = [one for one in combinations(sorted(pool), size) if must <= set(one) and one != trace.choice.gpus]
    event(trace.choice.how.name)
    if not sets:
        forced = "it is all that is available" if size == len(pool) else "it is all that must be included"
        assert (trace.runner_up, explain.how(trace), explain.why(trace)) == (None, "there is no other", forced)
        return
    event(trace.criterion.name)
    rule = Rule(made.topology)
    second = max(sets, key=lambda chosen: rule.rank(pool, chosen))
    assert trace.runner_up == second
    assert explain.why(trace) == difference(rule, len(probed.gpus), pool, trace.choice.gpus, second)
    equal = "all pairs of GPUs are equal, so the first ones are taken"
    assert explain.how(trace) in {equal, f"the best of {len(sets) + 1} sets"}


def test_what_was_only_searched_for_has_no_runner_up_and_says_why_it_was():
    large = placement([0] * 18, mesh(range(18), Link(1, 40)))
    trace = traced(large, range(18), 3)
    assert (trace.runner_up, explain.why(trace)) == (None, "a bounded search does not say what came second")
    assert explain.how(trace) == "a bounded search, since 18 GPUs are more than 16"
    assert why(large, range(18), 18) == "it is all that is available"
    early = traced(Placement(Topology.of(two_sockets(6))), range(6), 3)
    assert explain.how(early) == "a bounded search, since the sets of this node's GPUs are not judged yet"
