"""Pods that come and go in the benchmark, and how good what they got is."""

import random

import pytest

from bench import churn, quality
from bench.churn import Quality, Step, course, played
from bench.plan import MeasurementError
from bench.probed import probed, whole_gpus


def test_a_course_fits_whatever_gpus_others_got():
    steps = course(8, 2000, random.Random(4))
    free, pods = 8, []
    for step in steps:
        if step.size:
            pods.append(step.size)
            free -= step.size
        else:
            free += pods.pop(step.leaves)
        assert 0 <= free <= 8
    assert {step.size for step in steps} == {0, *churn.PODS}
    assert steps == course(8, 2000, random.Random(4)) != course(8, 2000, random.Random(5))


def test_pods_get_what_the_rule_chooses_and_give_it_back():
    steps = [Step(4), Step(2), Step(leaves=0), Step(4), Step(1)]
    named = []

    def order(free):
        named.append(list(free))
        return list(reversed(free))

    got = played(steps, range(8), lambda free, size: free[:size], order)
    assert got == [(4, 5, 6, 7), (2, 3), (4, 5, 6, 7), (1,)]
    assert named == [list(range(8)), [0, 1, 2, 3], [0, 1, 4, 5, 6, 7], [0, 1]]


@pytest.mark.parametrize("chosen", [(0,), (0, 0), (0, 9), (0, 1, 2)])
def test_a_rule_that_gives_something_else_is_not_measured(chosen):
    with pytest.raises(MeasurementError, match="2 of"):
        played([Step(2)], range(4), lambda free, size: chosen, sorted)


def test_quality_is_of_pods_with_several_gpus():
    scores = [[0, 90, 10, 10], [90, 0, 10, 10], [10, 10, 0, 30], [10, 10, 30, 0]]
    pairs = [[score >= 30 for score in row] for row in scores]
    got = [(0, 1)] * 8 + [(2, 3)] * 2 + [(0, 1, 2, 3), (0,)]
    assert churn.quality(got, range(4), scores, pairs) == Quality(11, (8 * 90 + 2 * 30 + 160 / 6) / 11, 30, None)
    mesh = [[True] * 4] * 4
    assert churn.quality(got, range(4), scores, mesh).linked == 1
    assert churn.quality(got, range(3), scores, mesh).linked is None, "the fourth GPU is not given out whole"


def test_shares_count_sizes_of_which_there_is_a_linked_group():
    scores = [[0] * 8 for _ in range(8)]
    halves = [[one // 4 == other // 4 for other in range(8)] for one in range(8)]
    got = [(0, 1, 2, 3), (0, 1, 2, 4), tuple(range(8))]
    assert churn.quality(got, range(8), scores, halves).linked == 0.5


def test_links_are_nvlinks_and_switches_where_there_are_none():
    cube = quality.links(probed("dgx1-v100"))
    assert [other for other in range(8) if cube[0][other]] == [1, 2, 3, 4]
    cards = quality.links(probed("l40s-pcie-8"))
    assert [other for other in range(1, 8) if cards[0][other]] == [1]


def test_gpus_in_mig_mode_are_given_out_in_slices():
    node = probed("a100-mig-mixed")
    whole = whole_gpus(node)
    assert {device.gpu for device in whole} == {gpu.uuid for gpu in node.gpus if not gpu.mig_enabled}
    assert 1 < len(whole) < len(node.gpus)


def test_placement_is_not_below_the_other_rules_on_a_dgx1():
    *each, found = quality.outcomes(probed("dgx1-v100"), 1500, (7, 8))
    ours = found[quality.OURS]
    assert ours.pods == sum(one[quality.OURS].pods for one in each)
    for rule in quality.JUDGED:
        other = found[rule]
        assert other.pods == ours.pods > 400
        assert ours.mean > other.mean
        assert ours.tenth >= other.tenth
        assert ours.linked is not None
        assert other.linked is not None
        assert ours.linked > other.linked
