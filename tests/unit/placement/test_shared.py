"""Which GPUs shared devices and MIG devices are taken from."""

from collections import Counter
from dataclasses import dataclass
from random import Random
from time import perf_counter

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gpu_plugin.config.sharing import MPS, TIME_SLICING, SharedResource
from gpu_plugin.devices.device import MIG, Device
from gpu_plugin.placement.preferred import preferred
from gpu_plugin.placement.scores import Scores
from gpu_plugin.placement.shared import DISTRIBUTED, PACKED, POLICIES

BOUNDED = settings(max_examples=120, deadline=None)
BOTH = pytest.mark.parametrize("policy", list(POLICIES))


def replicas(gpus, count, strategy=TIME_SLICING):
    """GPUs given out so often each, in the order of a real list."""
    sharing = SharedResource("nvidia.com/gpu", "nvidia.com/gpu", count, strategy)
    return [
        Device(f"GPU-{gpu}::{copy}", f"GPU-{gpu}", f"GPU-{gpu}", str(gpu), sharing=sharing)
        for gpu in range(gpus)
        for copy in range(count)
    ]


def slices(gpus, count, times=1):
    """MIG devices of GPUs, perhaps given out several times each."""
    sharing = SharedResource("nvidia.com/mig-1g.10gb", "nvidia.com/mig-1g.10gb", times) if times > 1 else None
    return [
        Device(
            f"MIG-{gpu}.{at}::{copy}" if times > 1 else f"MIG-{gpu}.{at}",
            f"GPU-{gpu}",
            f"MIG-{gpu}.{at}",
            f"{gpu}:{at}",
            kind=MIG,
            sharing=sharing,
        )
        for gpu in range(gpus)
        for at in range(count)
        for copy in range(times)
    ]


@dataclass
class Kubelet:
    """Hands out devices one container after the other, as preferred."""

    devices: list[Device]
    policy: str = DISTRIBUTED

    def __post_init__(self):
        self.order = {device.id: at for at, device in enumerate(self.devices)}
        self.free = set(self.order)

    def ask(self, size=1, must=()):
        return preferred(sorted(self.free), must, size, self.devices, self.order, Scores(), self.policy)

    def admit(self, size=1, must=()):
        """The GPU of each device that a container got."""
        got = self.ask(size, must)
        assert len(got) == size
        self.free -= set(got)
        return [self.devices[self.order[identifier]].gpu for identifier in got]

    def take(self, *ids):
        """Devices that are given out already."""
        assert self.free >= set(ids)
        self.free -= set(ids)


def test_mig_devices_fill_one_gpu_when_packed_and_alternate_when_distributed():
    packed, distributed = Kubelet(slices(2, 7), PACKED), Kubelet(slices(2, 7), DISTRIBUTED)
    assert [gpu for _ in range(14) for gpu in packed.admit()] == ["GPU-0"] * 7 + ["GPU-1"] * 7
    assert [gpu for _ in range(14) for gpu in distributed.admit()] == ["GPU-0", "GPU-1"] * 7


@pytest.mark.parametrize("strategy", [TIME_SLICING, MPS])
def test_replicas_fill_one_gpu_when_packed_and_go_round_when_distributed(strategy):
    packed, distributed = (Kubelet(replicas(3, 4, strategy), policy) for policy in (PACKED, DISTRIBUTED))
    assert [gpu for _ in range(12) for gpu in packed.admit()] == ["GPU-0"] * 4 + ["GPU-1"] * 4 + ["GPU-2"] * 4
    assert [gpu for _ in range(12) for gpu in distributed.admit()] == ["GPU-0", "GPU-1", "GPU-2"] * 4


def test_what_is_given_out_already_decides():
    for policy, gpu in ((DISTRIBUTED, "GPU-2"), (PACKED, "GPU-1")):
        kubelet = Kubelet(replicas(3, 4), policy)
        kubelet.take("GPU-0::0", "GPU-1::1", "GPU-1::3")
        assert kubelet.admit() == [gpu]


def test_packed_passes_over_a_gpu_without_room():
    kubelet = Kubelet(replicas(3, 2), PACKED)
    kubelet.take("GPU-0::0", "GPU-0::1", "GPU-2::0")
    assert kubelet.admit() == ["GPU-2"]
    assert kubelet.admit() == ["GPU-1"]


def test_a_device_that_is_not_available_counts_as_given_out_wherever_it_went():
    kubelet = Kubelet(slices(2, 3))
    kubelet.take("MIG-0.0")  # unhealthy, say
    assert kubelet.admit() == ["GPU-1"]


def test_several_for_one_container_are_several_gpus_when_distributed():
    kubelet = Kubelet(replicas(4, 4))
    kubelet.take("GPU-1::0", "GPU-1::1", "GPU-1::2", "GPU-3::0")
    assert kubelet.admit(3) == ["GPU-0", "GPU-2", "GPU-3"]  # three of GPU-0 would have been the least used each time
    assert sorted(Counter(kubelet.admit(4)).values()) == [1, 1, 1, 1]
    assert Counter(Kubelet(replicas(2, 4)).admit(5)) == {"GPU-0": 3, "GPU-1": 2}


def test_several_for_one_container_are_one_gpu_when_packed():
    kubelet = Kubelet(slices(3, 4), PACKED)
    kubelet.take("MIG-1.0")
    assert kubelet.admit(3) == ["GPU-1"] * 3
    assert kubelet.admit(5) == ["GPU-0"] * 4 + ["GPU-2"]


@BOTH
def test_required_ones_are_in_the_answer_and_count_as_picked(policy):
    kubelet = Kubelet(replicas(2, 3), policy)
    answer = kubelet.ask(2, ["GPU-1::2"])
    assert answer == {DISTRIBUTED: ("GPU-0::0", "GPU-1::2"), PACKED: ("GPU-1::0", "GPU-1::2")}[policy]


def test_where_all_is_equal_what_the_container_has_least_of_goes_before_the_position():
    devices = replicas(2, 3)
    kubelet = Kubelet(devices, PACKED)
    kubelet.take("GPU-1::0")
    assert kubelet.ask(2, ["GPU-0::0"]) == ("GPU-0::0", "GPU-1::1")


@BOTH
def test_the_replicas_of_one_gpus_mig_devices_are_told_apart(policy):
    kubelet = Kubelet(slices(1, 2, times=3), policy)
    got = [kubelet.admit() and sorted(set(kubelet.order) - kubelet.free) for _ in range(4)][-1]
    assert (
        Counter(identifier.partition("::")[0] for identifier in got)
        == {
            DISTRIBUTED: {"MIG-0.0": 2, "MIG-0.1": 2},
            PACKED: {"MIG-0.0": 3, "MIG-0.1": 1},
        }[policy]
    )


def test_a_gpu_that_is_given_out_once_beside_shared_ones_is_one_more_piece_of_hardware():
    whole = [Device(f"GPU-{at}", f"GPU-{at}", f"GPU-{at}", str(at)) for at in (7, 8)]
    kubelet = Kubelet([*replicas(1, 2), *whole])
    assert kubelet.admit(3) == ["GPU-0", "GPU-7", "GPU-8"]


def test_distributed_is_what_there_is_where_nothing_is_asked_for():
    devices = slices(2, 7)
    order = {device.id: at for at, device in enumerate(devices)}
    assert preferred(list(order), [], 2, devices, order, Scores()) == ("MIG-0.0", "MIG-1.0")


@st.composite
def nodes(draw: st.DrawFn) -> Kubelet:
    """A node in any state, with some devices given out."""
    make = draw(st.sampled_from([replicas, slices, lambda g, c: slices(g, c, times=2)]))
    devices = make(draw(st.integers(1, 5)), draw(st.integers(1, 4)))
    kubelet = Kubelet(devices, draw(st.sampled_from([DISTRIBUTED, PACKED])))
    random = Random(draw(st.integers(0, 2**32)))
    kubelet.take(*(d.id for d in devices if random.random() < 0.4))
    return kubelet


def reference(kubelet: Kubelet, size: int, must: tuple[str, ...]) -> set[str]:
    """The rule as it is told, one device after the other."""
    chosen = list(must)

    def used(word: str, value: str) -> tuple[int, int]:
        same = [d.id for d in kubelet.devices if getattr(d, word) == value]
        picked = sum(i in chosen for i in same)
        return picked, sum(i not in kubelet.free for i in same) + picked

    def rank(device: Device) -> tuple[int, ...]:
        ranks: list[int] = []
        for word in ("gpu", "visible_id"):
            picked, load = used(word, getattr(device, word))
            ranks += [picked, load] if kubelet.policy == DISTRIBUTED else [-load, picked]
        return tuple(ranks)

    while len(chosen) < size:
        left = [d for d in kubelet.devices if d.id in kubelet.free and d.id not in chosen]
        best_gpu = min(left, key=lambda d: (rank(d)[:2], first(d, left, rank)))
        chosen.append(min((d for d in left if d.gpu == best_gpu.gpu), key=rank).id)
    return set(chosen)


def first(device, left, rank):
    """The position of the device that its GPU would give next."""
    return left.index(min((d for d in left if d.gpu == device.gpu), key=rank))


@BOUNDED
@given(nodes(), st.data())
def test_the_answer_is_that_of_the_rule_told_step_by_step(kubelet, data):
    size = data.draw(st.integers(1, 6))
    must = tuple(
        data.draw(st.lists(st.sampled_from(sorted(kubelet.free)), max_size=2, unique=True)) if kubelet.free else ()
    )
    answer = kubelet.ask(size, must)
    possible = size <= len(kubelet.free) and len(must) <= size
    event(f"possible: {possible}")
    assert bool(answer) is possible
    if possible:
        assert set(answer) == reference(kubelet, size, must)
        assert list(answer) == sorted(answer, key=kubelet.order.__getitem__)


@BOUNDED
@given(nodes(), st.randoms(use_true_random=False))
def test_the_order_in_which_ids_are_named_changes_nothing(kubelet, random):
    size = max(1, len(kubelet.free) // 2)
    answer = kubelet.ask(size)
    shuffled = list(kubelet.free)
    random.shuffle(shuffled)
    again = preferred(shuffled, [], size, kubelet.devices, kubelet.order, Scores(), kubelet.policy)
    assert again == answer


@BOTH
@pytest.mark.parametrize(("gpus", "times"), [(8, 7500), (60_000, 1)])
def test_sixty_thousand_ids(policy, gpus, times):
    kubelet = Kubelet(slices(gpus, 1, times=times), policy)
    began = perf_counter()
    answer = kubelet.ask(30_000)
    assert len(set(answer)) == 30_000
    assert perf_counter() - began < 5  # a second on the slowest machine, and quadratic work takes minutes
    spread = Counter(kubelet.devices[kubelet.order[i]].gpu for i in answer)
    if policy == DISTRIBUTED:
        assert max(spread.values()) - min(spread.values()) <= 1
    else:
        assert sorted(spread.values())[1:] == [times] * (30_000 // times - 1)
