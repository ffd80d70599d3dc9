"""GetPreferredAllocation by device ids, for GPUs that are given out once."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.devices.device import Device, whole_gpu
from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.placement.preferred import preferred
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.whole import Budget, choose

from .nodes import dgx1, random_nodes, two_sockets

BOUNDED = settings(max_examples=100, deadline=None)


@dataclass
class Asked:
    """A resource that can be asked by GPU numbers."""

    devices: list[Device]
    placement: Placement

    @classmethod
    def of(cls, probed: Node) -> "Asked":
        return cls([whole_gpu(gpu) for gpu in probed.gpus], Placement.of(Topology.of(probed)))

    def __call__(self, available: Iterable[int], size: int, must: Iterable[int] = ()) -> tuple[int, ...]:
        order = {device.id: at for at, device in enumerate(self.devices)}
        ids = [self.devices[at].id for at in available]
        required = [self.devices[at].id for at in must]
        chosen = preferred(ids, required, size, self.devices, order, self.placement)
        return tuple(order[identifier] for identifier in chosen)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Asked, list[int], list[int], int]:
    probed = draw(random_nodes(most=9))
    gpus = st.integers(0, len(probed.gpus) - 1)
    available = draw(st.lists(gpus, max_size=len(probed.gpus) + 2))
    must: list[int] = draw(st.lists(st.sampled_from(available), max_size=3)) if available else []
    if draw(st.integers(0, 9)) == 0:
        must.append(draw(gpus))
    return Asked.of(probed), available, must, draw(st.integers(-1, len(probed.gpus) + 1))


@BOUNDED
@given(questions())
def test_the_answer_is_of_the_size_asked_for_from_what_is_available_with_what_must_be_in_it(question):
    asked, available, must, size = question
    answer = asked(available, size, must)
    pool = set(available)
    possible = 0 < size <= len(pool) and set(must) <= pool and len(set(must)) <= size
    event(f"possible: {possible}")
    assert bool(answer) is possible
    if possible:
        assert len(answer) == len(set(answer)) == size
        assert set(must) <= set(answer) <= pool
        assert list(answer) == sorted(answer)


@BOUNDED
@given(questions())
def test_it_is_the_choice_of_whole_gpus(question):
    asked, available, must, size = question
    assert asked(available, size, must) == choose(asked.placement, available, must, size).gpus


@BOUNDED
@given(questions(), st.randoms(use_true_random=False))
def test_the_order_in_which_ids_are_named_changes_nothing(question, random):
    asked, available, must, size = question
    answer = asked(available, size, must)
    for _ in range(2):
        random.shuffle(available)
        random.shuffle(must)
        assert asked(available + available[:2], size, must + must[:1]) == answer


@BOUNDED
@given(questions(), st.randoms(use_true_random=False))
def test_the_order_in_which_devices_are_listed_changes_nothing_but_where_all_is_equal(question, random):
    asked, available, must, size = question
    gpus = asked(available, size, must)
    listed = list(range(len(asked.devices)))
    random.shuffle(listed)
    other = Asked([asked.devices[at] for at in listed], asked.placement)
    at = {gpu: place for place, gpu in enumerate(listed)}
    again = other([at[gpu] for gpu in available], size, [at[gpu] for gpu in must])
    assert sorted(listed[place] for place in again) == list(gpus)  # the GPU's number counts, and not its line


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
    assert Asked.of(dgx1())(available, size, must) == ()


@pytest.mark.parametrize(("available", "must"), [(["GPU-00", "GPU-xx"], []), (["GPU-00", "GPU-01"], ["GPU-xx"])])
def test_an_id_that_is_none_of_ours_is_answered_with_nothing(available, must):
    asked = Asked.of(dgx1())
    order = {device.id: at for at, device in enumerate(asked.devices)}
    assert preferred(available, must, 1, asked.devices, order, asked.placement) == ()


def test_a_budget_that_is_used_up_still_brings_an_answer():
    asked = Asked.of(dgx1())
    order = {device.id: at for at, device in enumerate(asked.devices)}
    times = iter((0.0, 9.0))
    answer = preferred(list(order), [], 4, asked.devices, order, asked.placement, budget=Budget(lambda: next(times), 1))
    assert answer == ("GPU-00", "GPU-01", "GPU-02", "GPU-03")


# GPUs that nothing is known of


def test_gpus_of_a_bridged_pair_and_unknown_ones():
    asked = Asked.of(two_sockets(6, _4_5=4))
    strangers = [Device(f"GPU-old-{at}", f"GPU-old-{at}", f"GPU-old-{at}", str(at)) for at in range(3)]
    both = Asked([*strangers, *asked.devices], asked.placement)
    assert both(range(9), 2) == (7, 8)
    assert both(range(3), 2) == (0, 1)
    assert both([0, 1, 2, 7, 8], 3, [1]) == (1, 7, 8)


def test_sixty_thousand_ids():
    devices = [Device(f"GPU-{at}", f"GPU-{at}", f"GPU-{at}", str(at), numa=(at % 2,)) for at in range(60_000)]
    order = {device.id: at for at, device in enumerate(devices)}
    ids = [device.id for device in reversed(devices)]

    def ask(size: int, must: tuple[str, ...] = ()) -> tuple[str, ...]:
        return preferred(ids, must, size, devices, order, Placement())

    assert ask(1) == ("GPU-0",)
    assert ask(30_000) == tuple(order)[:30_000]
    assert ask(3, ("GPU-5",)) == ("GPU-0", "GPU-1", "GPU-5")
    assert len(set(ask(59_999))) == 59_999
    assert ask(60_000) == tuple(order)
    assert ask(60_001) == ()


def test_a_gpu_is_known_by_its_uuid_whatever_its_device_is_called():
    gpus = [Gpu(uuid=f"GPU-{at}", index=at) for at in range(4)]
    probed = Node(tuple(gpus), {("GPU-1", "GPU-3"): Link(2, 50)})
    devices = [Device(str(gpu.index), gpu.uuid, gpu.uuid, str(gpu.index)) for gpu in gpus]
    order = {device.id: at for at, device in enumerate(devices)}
    assert preferred(list(order), [], 2, devices, order, Placement.of(Topology.of(probed))) == ("1", "3")


@pytest.mark.parametrize("shared", [False, True])
def test_a_device_that_is_unhealthy_by_now_comes_last(shared):
    sharing = SharedResource("a", "a", 2) if shared else None
    devices = [
        Device(str(at), f"GPU-{at}", f"GPU-{at}", str(at), reason="Xid 79" if at < 2 else "", sharing=sharing)
        for at in range(5)
    ]
    order = {device.id: at for at, device in enumerate(devices)}

    def ask(size: int, must: tuple[str, ...] = ()) -> set[str]:
        return set(preferred(list(order), must, size, devices, order, Placement()))

    assert ask(2) < {"2", "3", "4"}
    assert ask(3) == {"2", "3", "4"}
    assert ask(2, ("0",)) - {"2", "3", "4"} == {"0"}
    assert ask(3, ("0",)) - {"2", "3", "4"} == {"0"}, "also if as many healthy ones are free as asked for"
    assert len(ask(4)) == 4
    assert ask(4) > {"2", "3", "4"}
    assert ask(5) == set(order)
