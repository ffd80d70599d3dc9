from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gpu_plugin.devices.device import Device, whole_gpu
from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.placement.preferred import EXHAUSTIVE, preferred
from gpu_plugin.placement.scores import Scores, scores

BOUNDED = settings(max_examples=120, deadline=None)


@dataclass
class Asked:
    """A node that can be asked by GPU numbers."""

    devices: list[Device]
    scores: Scores

    @classmethod
    def of(cls, numa: Sequence[int | None], links: dict[tuple[int, int], Link]) -> "Asked":
        gpus = tuple(Gpu(uuid=f"GPU-{at:02}", index=at, numa_node=node) for at, node in enumerate(numa))
        named = {(gpus[min(pair)].uuid, gpus[max(pair)].uuid): link for pair, link in links.items()}
        return cls([whole_gpu(gpu) for gpu in gpus], scores(Node(gpus, named)))

    def __call__(self, available, size, must=()):
        order = {device.id: at for at, device in enumerate(self.devices)}
        ids = [self.devices[at].id for at in available]
        chosen = preferred(ids, [self.devices[at].id for at in must], size, self.devices, order, self.scores)
        return tuple(order[identifier] for identifier in chosen)

    def worth(self, chosen):
        """The sum of the scores of all pairs."""
        return sum(self.scores.of(self.devices[a].gpu, self.devices[b].gpu) for a, b in combinations(chosen, 2))


DGX1_NVLINKS = (
    "0-1:1 0-2:1 0-3:2 0-4:2 1-2:2 1-3:1 1-5:2 2-3:2 2-6:1 3-7:1 4-5:1 4-6:1 4-7:2 5-6:2 5-7:1 6-7:2"  # DGX-1, V100
)


def dgx1() -> Asked:
    links = {(a, b): Link(0, 40 if a // 4 == b // 4 else 50) for a, b in combinations(range(8), 2)}
    for entry in DGX1_NVLINKS.split():
        ends, _, count = entry.partition(":")
        one, other = map(int, ends.split("-"))
        links[one, other] = Link(int(count), 40 if one // 4 == other // 4 else 50)
    return Asked.of([0] * 4 + [1] * 4, links)


def two_sockets(count: int, **bridges: int) -> Asked:
    """Half the GPUs on each socket, linked by PCIe alone but for bridges such as `_0_1=4`."""
    half = count // 2
    links = {(a, b): Link(0, 40 if a // half == b // half else 50) for a, b in combinations(range(count), 2)}
    for pair, nvlinks in bridges.items():
        one, other = map(int, pair.strip("_").split("_"))
        links[one, other] = Link(nvlinks, links[one, other].ancestor)
    return Asked.of([at // half for at in range(count)], links)


# Whatever is asked


@dataclass
class Question:
    node: Asked
    available: list[int]
    must: list[int]
    size: int


@st.composite
def questions(draw: st.DrawFn, most: int = 16) -> Question:
    count = draw(st.integers(1, most))
    random = Random(draw(st.integers(0, 2**32)))
    numa: list[int | None] = [random.choice([None, 0, 0, 1, 1]) for _ in range(count)]
    links = {
        pair: Link(random.choice([0, 0, 0, 1, 2, 4, 18]), random.choice([0, 10, 20, 30, 40, 50]))
        for pair in combinations(range(count), 2)
        if random.random() < 0.8
    }
    available = draw(st.lists(st.integers(0, count - 1), max_size=count + 2))
    must: list[int] = []
    some: bool = draw(st.booleans())
    if available and some:
        must = draw(st.lists(st.sampled_from(available), max_size=3))
    if draw(st.integers(0, 9)) == 0:
        must.append(draw(st.integers(0, count - 1)))
    return Question(Asked.of(numa, links), available, must, draw(st.integers(-1, count + 1)))


@BOUNDED
@given(questions())
def test_the_answer_is_of_the_size_asked_for_from_what_is_available_with_what_must_be_in_it(asked):
    answer = asked.node(asked.available, asked.size, asked.must)
    pool, must = set(asked.available), set(asked.must)
    possible = 0 < asked.size <= len(pool) and must <= pool and len(must) <= asked.size
    event(f"possible: {possible}")
    assert bool(answer) is possible
    if possible:
        assert len(answer) == len(set(answer)) == asked.size
        assert must <= set(answer) <= pool
        assert list(answer) == sorted(answer)


@BOUNDED
@given(questions(), st.randoms(use_true_random=False))
def test_the_order_in_which_ids_are_named_changes_nothing(asked, random):
    answer = asked.node(asked.available, asked.size, asked.must)
    for _ in range(2):
        available, must = list(asked.available), list(asked.must)
        random.shuffle(available)
        random.shuffle(must)
        assert asked.node(available + available[:2], asked.size, must + must[:1]) == answer


@BOUNDED
@given(questions(most=9))
def test_where_every_choice_can_be_looked_at_the_answer_is_the_best_one_and_the_first_of_equals(asked):
    answer = asked.node(asked.available, asked.size, asked.must)
    pool, must = sorted(set(asked.available)), set(asked.must)
    candidates = [chosen for chosen in combinations(pool, max(asked.size, 0)) if must <= set(chosen)] if answer else []
    assert len(candidates) <= EXHAUSTIVE
    if answer:
        assert answer == max(candidates, key=asked.node.worth)


@BOUNDED
@given(questions(), st.integers(1, 3))
def test_a_few_of_sixteen_are_the_best_ones_too(asked, size):
    pool = sorted(set(asked.available))
    if size <= len(pool) and comb(len(pool), size) <= EXHAUSTIVE:
        assert asked.node(asked.available, size) == max(combinations(pool, size), key=asked.node.worth)
    elif size <= len(pool):
        assert len(asked.node(asked.available, size)) == size
    else:
        assert asked.node(asked.available, size) == ()


@settings(max_examples=25, deadline=None)
@given(st.integers(12, 16), st.randoms(use_true_random=False))
def test_more_than_can_be_looked_at_is_never_worse_than_taking_the_best_next_one(count, random):
    assert comb(count - 1, 5) > EXHAUSTIVE
    links = {pair: Link(random.choice([0, 0, 1, 2, 4]), 50) for pair in combinations(range(count), 2)}
    node = Asked.of([None] * count, links)
    first = node.worth(grown_from_first(node, count, 6))
    assert node.worth(node(range(count), 6, [0])) >= first
    assert node.worth(node(range(count), 6)) >= first


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 15), min_size=8, max_size=8))
def test_eight_of_sixteen_that_are_linked_to_each_other_are_found_wherever_they_lie(eight):
    node = Asked.of([None] * 16, {pair: Link(1, 50) for pair in combinations(sorted(eight), 2)})
    assert node(range(16), 8) == tuple(sorted(eight))
    assert node(range(16), 8, [max(eight)]) == tuple(sorted(eight))


def grown_from_first(node: Asked, count: int, size: int) -> list[int]:
    """What taking the best next one, from the first one on, gives."""
    chosen = [0]
    while len(chosen) < size:
        chosen.append(max((at for at in range(count) if at not in chosen), key=lambda at: node.worth([*chosen, at])))
    return chosen


# What cannot be answered


@pytest.mark.parametrize(
    ("available", "size", "must"),
    [
        pytest.param([0, 1], 0, [], id="nothing asked for"),
        pytest.param([0, 1], -1, [], id="less than nothing"),
        pytest.param([0, 1], 3, [], id="more than there is"),
        pytest.param([0, 0, 1], 3, [], id="more than there is, one named twice"),
        pytest.param([], 1, [], id="nothing available"),
        pytest.param([0, 1, 2], 1, [0, 1], id="more required than asked for"),
        pytest.param([0, 1, 2], 2, [3], id="a required one is not available"),
    ],
)
def test_the_impossible_is_answered_with_nothing(available, size, must):
    assert dgx1()(available, size, must) == ()


@pytest.mark.parametrize(("available", "must"), [(["GPU-00", "GPU-xx"], []), (["GPU-00", "GPU-01"], ["GPU-xx"])])
def test_an_id_that_is_none_of_ours_is_answered_with_nothing(available, must):
    node = dgx1()
    order = {device.id: at for at, device in enumerate(node.devices)}
    assert preferred(available, must, 1, node.devices, order, node.scores) == ()


# Real machines


@pytest.mark.parametrize("must", [[], [0], [5], [6, 7]])
def test_four_of_a_dgx1_are_a_fully_linked_quad(must):
    answer = dgx1()(range(8), 4, must)
    pairs = {f"{one}-{other}" for one, other in combinations(answer, 2)}
    assert pairs <= {entry.partition(":")[0] for entry in DGX1_NVLINKS.split()}
    assert answer in {(0, 1, 2, 3), (4, 5, 6, 7)}


@pytest.mark.parametrize("taken", range(8))
def test_two_of_a_dgx1_with_one_taken_have_two_links_between_them(taken):
    one, other = dgx1()([at for at in range(8) if at != taken], 2)
    assert f"{one}-{other}:2" in DGX1_NVLINKS.split()


@pytest.mark.parametrize("count", [4, 8, 16])
def test_where_links_are_equal_one_numa_node_is_preferred(count):
    switched = {pair: Link(0, 50) for pair in combinations(range(count), 2)}
    node = Asked.of([at % 2 for at in range(count)], switched)
    for size in range(2, count // 2 + 1):
        assert {at % 2 for at in node(range(count), size)} == {0}
        assert {at % 2 for at in node(range(count), size, [1])} == {1}
        assert {at % 2 for at in node(range(2, count), size)} == ({0} if size < count // 2 else {0, 1})


def test_a_gpu_with_no_known_links_changes_nothing_for_the_others():
    whole = dgx1()
    for lost in range(8):
        uuid = whole.devices[lost].gpu
        rows = {
            one: {b: s for b, s in row.items() if b != uuid} for one, row in whole.scores.rows.items() if one != uuid
        }
        broken = Asked(whole.devices, Scores(rows))
        others = [at for at in range(8) if at != lost]
        for size in range(1, 8):
            assert broken(others, size) == whole(others, size)  # outside of what is available
        for size in range(2, 8):
            assert broken(range(8), size) == whole(others, size)  # inside: chosen last
        assert broken(range(8), 8) == tuple(range(8))
        assert lost in broken(range(8), 3, [lost])


def test_a_bridged_pair_and_three_on_the_other_socket_leave_a_request_for_three_whole():
    node = two_sockets(6, _0_1=4)
    answer = node([0, 1, 3, 4, 5], 3)
    assert len(set(answer)) == 3
    assert set(answer) <= {0, 1, 3, 4, 5}
    assert node.worth(answer) == max(node.worth(chosen) for chosen in combinations([0, 1, 3, 4, 5], 3))


def test_a_pair_out_of_fourteen_is_the_bridged_one_wherever_it_lies():
    for one, other in combinations(range(14), 2):
        node = two_sockets(14, **{f"_{one}_{other}": 2})
        assert node(range(14), 2) == (one, other)


def test_seven_out_of_fourteen_hold_the_bridged_pairs():
    node = two_sockets(14, _0_1=2, _2_3=2, _4_5=2, _7_8=2, _9_10=2, _11_12=2)
    assert comb(14, 7) > EXHAUSTIVE
    answer = node(range(14), 7)
    assert len(set(answer)) == 7
    assert sum({a, b} <= set(answer) for a, b in [(0, 1), (2, 3), (4, 5), (7, 8), (9, 10), (11, 12)]) == 3


def test_several_devices_of_one_gpu_are_devices_like_others():
    gpus = [Gpu(uuid=f"GPU-{at}", index=at, numa_node=0) for at in range(2)]
    found = scores(Node(tuple(gpus), {("GPU-0", "GPU-1"): Link(2, 50)}))
    devices = [Device(f"{gpu.uuid}::{copy}", gpu.uuid, gpu.uuid, str(gpu.index)) for gpu in gpus for copy in range(3)]
    order = {device.id: at for at, device in enumerate(devices)}
    answer = preferred(list(order), ["GPU-1::2"], 3, devices, order, found)
    assert len(set(answer)) == 3
    assert "GPU-1::2" in answer


def test_sixty_thousand_ids():
    devices = [Device(f"GPU-{at}", f"GPU-{at}", f"GPU-{at}", str(at), numa=(at % 2,)) for at in range(60_000)]
    order = {device.id: at for at, device in enumerate(devices)}
    ids = [device.id for device in reversed(devices)]

    def ask(size: int, must: tuple[str, ...] = ()) -> tuple[str, ...]:
        return preferred(ids, must, size, devices, order, Scores())

    assert ask(1) == ("GPU-0",)
    assert ask(30_000) == tuple(f"GPU-{at}" for at in range(0, 60_000, 2))
    assert ask(3, ("GPU-5",)) == ("GPU-1", "GPU-3", "GPU-5")
    assert len(set(ask(59_999))) == 59_999
    assert ask(60_000) == tuple(order)
    assert ask(60_001) == ()
