"""The benchmark's reference rule against a literal walk through all partitions."""

import random
from itertools import combinations

import pytest

from bench.partition import BestPartition, known_scores
from gpu_plugin.devices.node import Gpu, Link, Node


def score(scores, gpus):
    return sum(scores[one][other] for one, other in combinations([gpu for gpu in gpus if gpu is not None], 2))


def partitions(devices, size, filling):
    """All partitions in order, as lists of sets; a set is a list, and `None` in it is filling."""
    if len(devices) == size:
        yield [devices]
        return
    for picked in combinations(range(1, len(devices)), size - 1):
        chosen = [devices[at] for at in (0, *picked)]
        if chosen.count(None) in (0, filling):
            rest = [gpu for at, gpu in enumerate(devices) if at not in (0, *picked)]
            for further in partitions(rest, size, filling):
                yield [chosen, *further]


def literally(scores, available, size):
    filling = -len(available) % size
    best, most = None, 0
    for partition in partitions([*available, *[None] * filling], size, filling):
        total = sum(score(scores, one) for one in partition)
        if any(None not in one for one in partition) and (best is None or total > most):
            best, most = partition, total
    assert best is not None
    return tuple(max((one for one in best if None not in one), key=lambda one: score(scores, one)))


def matrix(count, values, dice):
    scores = [[0] * count for _ in range(count)]
    for one, other in combinations(range(count), 2):
        scores[one][other] = scores[other][one] = dice.choice(values)
    return scores


@pytest.mark.parametrize("values", [range(10, 400), (10, 20), (10, 110), (10, 20, 120, 220), (10,)])
def test_the_reference_chooses_what_a_walk_through_all_partitions_does(values):
    dice = random.Random(len(values))
    for _ in range(12):
        count = dice.randint(2, 8)
        scores = matrix(count, values, dice)
        rule = BestPartition(scores)  # one rule for many requests, which tests its cache
        for _ in range(6):
            available = dice.sample(range(count), dice.randint(1, count))
            size = dice.randint(1, len(available))
            expected = (available[0],) if size == 1 else literally(scores, available, size)
            assert rule.choose(available, size) == expected


def test_a_bridged_pair_and_filling_is_no_answer():
    """Five GPUs, a bridged pair on one socket and three on the other: the set with the greatest score is filled up."""
    scores = [[20 if (one < 2) == (other < 2) else 10 for other in range(5)] for one in range(5)]
    scores[0][1] = scores[1][0] = 1220
    assert BestPartition(scores).choose(range(5), 3) == (2, 3, 4)


def test_the_reference_counts_direct_nvlinks_alone():
    gpus = tuple(Gpu(uuid, index) for index, uuid in enumerate("cab"))
    links = {
        ("a", "b"): Link(nvlinks=2, ancestor=10),
        ("a", "c"): Link(nvlinks=6, ancestor=20, switched=True),
        ("b", "c"): Link(ancestor=77),
    }
    assert known_scores(Node(gpus, links)) == [[0, 40, 10], [40, 0, 250], [10, 250, 0]]
