"""Which GPUs shared devices and MIG devices are taken from."""

from collections import Counter
from dataclasses import dataclass
from itertools import combinations, count
from random import Random
from time import thread_time

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_plugin.config.sharing import DISTRIBUTED, PACKED, TIME_SLICING, SharedResource
from gpu_plugin.devices.device import MIG, Device
from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.placement.preferred import preferred
from gpu_plugin.placement.shared import POLICIES
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.whole import Budget, choose

BOUNDED = settings(max_examples=120, deadline=None)
EACH = pytest.mark.parametrize("policy", list(POLICIES))


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


def placement(gpus, links=()):
    """GPUs on two sockets, and the NVLinks between some of them, such as "0-1:2"."""
    half = (gpus + 1) // 2
    nvlinks = {ends: int(count) for ends, _, count in (link.partition(":") for link in links)}
    pairs = {
        (f"GPU-{a}", f"GPU-{b}"): Link(nvlinks.get(f"{a}-{b}", 0), 40 if a // half == b // half else 50)
        for a, b in combinations(range(gpus), 2)
    }
    return Placement.of(
        Topology.of(Node(tuple(Gpu(f"GPU-{at}", at, numa_node=at // half) for at in range(gpus)), pairs))
    )


NVLINKS = "0-1:1 0-2:1 0-3:2 0-4:2 1-2:2 1-3:1 1-5:2 2-3:2 2-6:1 3-7:1 4-5:1 4-6:1 4-7:2 5-6:2 5-7:1 6-7:2"  # V100
DGX1 = NVLINKS.split()
UNLINKED = Placement()


@dataclass
class Kubelet:
    """Hands out devices one container after the other, as preferred."""

    devices: list[Device]
    policy: str = DISTRIBUTED
    placement: Placement = UNLINKED

    def __post_init__(self):
        self.order = {device.id: at for at, device in enumerate(self.devices)}
        self.free = set(self.order)

    def ask(self, size=1, must=()):
        return preferred(sorted(self.free), must, size, self.devices, self.order, self.placement, self.policy)

    def ask_gpus(self, size, must=()):
        return [self.devices[self.order[identifier]].gpu for identifier in self.ask(size, must)]

    def admit(self, size=1, must=()):
        """The GPU of each device that a container got."""
        got = self.ask(size, must)
        assert len(got) == size
        self.free -= set(got)
        return [self.devices[self.order[identifier]].gpu for identifier in got]

    def places(self, ids):
        """The positions of devices."""
        return [self.order[identifier] for identifier in ids]

    def take(self, *ids):
        """Devices that are given out already."""
        assert self.free >= set(ids)
        self.free -= set(ids)


def test_mig_devices_fill_one_gpu_when_packed_and_alternate_when_distributed():
    packed, distributed = Kubelet(slices(2, 7), PACKED), Kubelet(slices(2, 7), DISTRIBUTED)
    assert [gpu for _ in range(14) for gpu in packed.admit()] == ["GPU-0"] * 7 + ["GPU-1"] * 7
    assert [gpu for _ in range(14) for gpu in distributed.admit()] == ["GPU-0", "GPU-1"] * 7


# Several devices for one container


def test_of_gpus_used_equally_packed_fills_the_one_with_the_least_room():
    devices = [device for device in slices(3, 4) if device.id not in {"MIG-1.2", "MIG-1.3"}]
    assert Kubelet(devices, PACKED).admit(2) == ["GPU-1", "GPU-1"]
    assert Kubelet(devices, PACKED).admit(5) == ["GPU-0", "GPU-0", "GPU-0", "GPU-1", "GPU-1"]


def test_packed_takes_the_most_used_gpu_before_the_gpu_with_the_least_room():
    kubelet = Kubelet([device for device in slices(2, 7) if device.id not in {"MIG-1.4", "MIG-1.5", "MIG-1.6"}], PACKED)
    kubelet.take("MIG-0.0", "MIG-0.1", "MIG-0.2", "MIG-1.0", "MIG-1.1")  # four are free of GPU 0 and two of GPU 1
    assert kubelet.admit(2) == ["GPU-0", "GPU-0"]


def test_a_gpu_that_is_given_out_once_beside_shared_ones_is_one_more_piece_of_hardware():
    whole = [Device(f"GPU-{at}", f"GPU-{at}", f"GPU-{at}", str(at)) for at in (7, 8)]
    kubelet = Kubelet([*replicas(1, 2), *whole])
    assert kubelet.admit(3) == ["GPU-0", "GPU-7", "GPU-8"]


def test_distributed_is_what_there_is_where_nothing_is_asked_for():
    devices = slices(2, 7)
    order = {device.id: at for at, device in enumerate(devices)}
    assert preferred(list(order), [], 2, devices, order, UNLINKED) == ("MIG-0.0", "MIG-1.0")


# Links


def test_pods_of_two_replicas_get_two_nvlinks_each_as_long_as_the_policy_leaves_pairs_with_them():
    kubelet = Kubelet(replicas(8, 2), DISTRIBUTED, placement(8, DGX1))
    for _ in range(8):
        one, other = (gpu.removeprefix("GPU-") for gpu in kubelet.admit(2))
        assert f"{one}-{other}:2" in DGX1
    assert not kubelet.free


def test_of_each_rank_the_gpus_linked_best_are_packed_on():
    """Of the GPUs that have room for the four that GPU 2 lacks, the one with NVLinks to it."""
    kubelet = Kubelet(replicas(8, 4), PACKED, placement(8, ["2-6:2"]))
    kubelet.take(*(f"GPU-{gpu}::{copy}" for gpu in range(4) for copy in range(2)))
    assert Counter(kubelet.ask_gpus(6, ["GPU-2::3"])) == {"GPU-2": 2, "GPU-6": 4}


def test_links_to_the_gpus_that_are_packed_on_anyway_decide():
    kubelet = Kubelet(replicas(4, 4), PACKED, placement(4, ["0-3:2"]))
    kubelet.take("GPU-0::0", "GPU-0::1", "GPU-0::2")
    assert Counter(kubelet.ask_gpus(5)) == {"GPU-0": 1, "GPU-3": 4}


def test_a_gpu_that_the_topology_does_not_know_does_no_harm_and_comes_last_of_equals():
    devices = replicas(4, 2)
    gone = [replace(device, id=f"x-{device.id}", gpu="GPU-x", visible_id="GPU-x") for device in replicas(1, 2)]
    for policy in POLICIES:
        kubelet = Kubelet([*gone, *devices], policy, placement(4, ["1-3:2"]))
        several = 2 if policy == PACKED else 1  # devices of a GPU
        assert set(kubelet.ask_gpus(2 * several)) == {"GPU-1", "GPU-3"}
        assert set(kubelet.ask_gpus(4 * several)) == {"GPU-0", "GPU-1", "GPU-2", "GPU-3"}
        assert "GPU-x" in kubelet.ask_gpus(4 * several + 1)
        had = [f"x-GPU-0::{copy}" for copy in range(several)]
        assert set(kubelet.ask_gpus(3 * several, had)) == {"GPU-x", "GPU-1", "GPU-3"}
        retired = Kubelet(
            [*devices, *(replace(d, retired=True, reason="gone") for d in gone)], policy, kubelet.placement
        )
        retired.take("x-GPU-0::0", "x-GPU-0::1")
        assert set(retired.ask_gpus(2 * several)) == {"GPU-1", "GPU-3"}


@EACH
def test_sets_of_gpus_are_compared_once_a_request_at_most(policy, monkeypatch):
    calls = []

    def counted(*args):
        calls.append(args)
        return choose(*args)

    monkeypatch.setattr("gpu_plugin.placement.whole.choose", counted)
    for devices in (replicas(8, 3), slices(8, 3), slices(8, 3, times=2)):
        for size in range(1, len(devices)):
            calls.clear()
            assert len(Kubelet(devices, policy, placement(8, DGX1)).ask(size)) == size
            assert len(calls) <= 1  # a node that nothing is given out of has one rank


# The rule, step by step


@st.composite
def nodes(draw: st.DrawFn) -> Kubelet:
    """A node in any state, with some devices given out, whose GPUs are perhaps linked."""
    make = draw(st.sampled_from([replicas, slices, lambda g, c: slices(g, c, times=2)]))
    gpus = draw(st.integers(2, 6))
    devices = make(gpus, draw(st.integers(1, 4)))
    random = Random(draw(st.integers(0, 2**32)))
    linked = draw(st.booleans())
    known = placement(gpus, [f"{a}-{b}:{random.choice([0, 1, 2])}" for a, b in combinations(range(gpus), 2)])
    kubelet = Kubelet(devices, draw(st.sampled_from(list(POLICIES))), known if linked else UNLINKED)
    given_out = draw(st.sampled_from([0, 0.15, 0.5]))
    kubelet.take(*(d.id for d in devices if random.random() < given_out))
    return kubelet


def outcomes(kubelet: Kubelet, size: int, must: tuple[str, ...]) -> set[frozenset[str]]:
    """Every answer that the rule allows, with any of the GPUs that rank equal."""
    if kubelet.policy == PACKED:
        return packed(kubelet, size, must)
    reached = {frozenset(must)}
    for _ in range(size - len(must)):
        reached = {chosen | {identifier} for chosen in reached for identifier in following(kubelet, chosen)}
    return reached


def following(kubelet: Kubelet, chosen: frozenset[str]) -> list[str]:
    """The next devices: the first device of each GPU of the lowest rank."""
    left = [d for d in kubelet.devices if d.id in kubelet.free and d.id not in chosen]
    for word in ("visible_id", "gpu"):
        had = {getattr(d, word) for d in kubelet.devices if d.id in chosen}
        left = [d for d in left if getattr(d, word) not in had] or left

    def rank(device: Device, word: str) -> tuple[int, ...]:
        same = [d for d in kubelet.devices if getattr(d, word) == getattr(device, word)]
        picked = sum(d.id in chosen for d in same)
        load = sum(d.id not in kubelet.free for d in same) + picked
        return (load, picked) if kubelet.policy == DISTRIBUTED else (picked, load)

    lowest = min(rank(d, "gpu") for d in left)
    firsts: dict[str, Device] = {}
    for device in sorted(left, key=lambda d: rank(d, "visible_id")):
        firsts.setdefault(device.gpu, device)
    return [d.id for d in firsts.values() if rank(d, "gpu") == lowest]


@dataclass(frozen=True)
class Unit:
    """A GPU, or hardware on it: its free devices, and the number of devices that are given out."""

    name: str
    load: int
    picked: int
    free: tuple[Device, ...]

    @property
    def rank(self) -> tuple[int, ...]:
        return self.picked == 0, -self.load, len(self.free)


def units(kubelet: Kubelet, must: tuple[str, ...], word: str, devices: list[Device]) -> list[Unit]:
    found = []
    for name in dict.fromkeys(getattr(d, word) for d in devices):
        same = [d for d in devices if getattr(d, word) == name]
        free = tuple(d for d in same if d.id in kubelet.free and d.id not in must)
        found.append(Unit(name, len(same) - len(free), sum(d.id in must for d in same), free))
    return found


def filled(all_units: list[Unit], count: int) -> list[list[tuple[Unit, int]]]:
    """Every way to take devices of the units that the container has and of the fewest others, of these the lowest ranks."""
    had = [unit for unit in all_units if unit.picked]
    new = [unit for unit in all_units if not unit.picked and unit.free]
    for size in range(len(new) + 1):
        sets = [
            chosen for chosen in combinations(new, size) if sum(len(unit.free) for unit in (*had, *chosen)) >= count
        ]
        if sets:
            break
    lowest = min(sorted(unit.rank for unit in chosen) for chosen in sets)
    ways = []
    for chosen in sets:
        if sorted(unit.rank for unit in chosen) == lowest:
            left, way = count, []
            for unit in sorted([*had, *chosen], key=lambda unit: unit.rank):
                way.append((unit, min(left, len(unit.free))))
                left -= way[-1][1]
            ways.append(way)
    return ways


def packed(kubelet: Kubelet, size: int, must: tuple[str, ...]) -> set[frozenset[str]]:
    """The fewest GPUs, and of each of these the fewest MIG devices."""
    answers = set()
    for way in filled(units(kubelet, must, "gpu", kubelet.devices), size - len(must)):
        ids = set(must)
        for gpu, number in way:
            hardware = units(kubelet, must, "visible_id", [d for d in kubelet.devices if d.gpu == gpu.name])
            for part, few in filled(hardware, number)[0]:
                ids |= {device.id for device in part.free[:few]}
        answers.add(frozenset(ids))
    return answers


def links_decide_once(kubelet: Kubelet, must: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """Whether the answer has some of the GPUs that the container did not have before, and not all, of one rank at most."""
    got = {kubelet.devices[kubelet.order[i]].gpu for i in answer}
    ranks: dict[tuple[int, ...], set[bool]] = {}
    for unit in units(kubelet, must, "gpu", kubelet.devices):
        if unit.free and not unit.picked:
            ranks.setdefault(unit.rank, set()).add(unit.name in got)
    return sum(len(taken) == 2 for taken in ranks.values()) <= 1


def worth(kubelet: Kubelet, ids: frozenset[str]) -> tuple[int, int]:
    """The total score of a container's GPUs, and how near they are."""
    topology = kubelet.placement.topology
    gpus = sorted({topology.position[kubelet.devices[kubelet.order[i]].gpu] for i in ids})
    return topology.score(gpus), -topology.distance(gpus)


@settings(max_examples=300, deadline=None)
@given(nodes(), st.data())
def test_the_answer_is_that_of_the_rule_told_step_by_step(kubelet, data):
    size = data.draw(st.integers(1, min(7, len(kubelet.free) + 1)))
    must = tuple(
        data.draw(st.lists(st.sampled_from(sorted(kubelet.free)), max_size=2, unique=True)) if kubelet.free else ()
    )
    answer = kubelet.ask(size, must)
    possible = size <= len(kubelet.free) and len(must) <= size
    event(f"possible: {possible}")
    assert bool(answer) is possible
    if not possible:
        return
    assert list(answer) == sorted(answer, key=kubelet.order.__getitem__)
    allowed = outcomes(kubelet, size, must)
    event(f"{kubelet.policy}: {'a choice' if len(allowed) > 1 else 'no choice'}")
    assert frozenset(answer) in allowed
    if len(kubelet.placement.topology):
        if kubelet.policy == PACKED and not links_decide_once(kubelet, must, answer):
            return  # the best of each rank in turn
        assert worth(kubelet, frozenset(answer)) == max(worth(kubelet, ids) for ids in allowed)
    else:
        assert answer == min((tuple(sorted(ids, key=kubelet.order.__getitem__)) for ids in allowed), key=kubelet.places)


@BOUNDED
@given(nodes(), st.randoms(use_true_random=False))
def test_the_order_in_which_ids_are_named_changes_nothing(kubelet, random):
    size = max(1, len(kubelet.free) // 2)
    answer = kubelet.ask(size)
    shuffled = list(kubelet.free)
    random.shuffle(shuffled)
    again = preferred(shuffled, [], size, kubelet.devices, kubelet.order, kubelet.placement, kubelet.policy)
    assert again == answer


@pytest.mark.parametrize(("gpus", "times"), [(8, 7500), (60_000, 1)])
@EACH
def test_sixty_thousand_ids(policy, gpus, times):
    kubelet = Kubelet(slices(gpus, 1, times=times), policy, placement(gpus) if gpus == 8 else UNLINKED)
    began = thread_time()
    answer = kubelet.ask(30_000)
    assert len(set(answer)) == 30_000
    assert len(set(kubelet.ask(4))) == 4
    assert thread_time() - began < 5  # a second on the slowest machine, and quadratic work takes minutes
    taken = Counter(kubelet.devices[kubelet.order[i]].gpu for i in answer)
    if policy == PACKED:
        assert set(taken.values()) == {times}
    else:
        assert max(taken.values()) - min(taken.values()) <= 1


@EACH
def test_links_among_shared_gpus_are_looked_at_within_the_budget_of_time(policy):
    listed = replicas(8, 2)
    ids, order = [device.id for device in listed], {device.id: at for at, device in enumerate(listed)}
    ticks = count()
    size = 4 if policy == PACKED else 2
    found = preferred(ids, (), size, listed, order, placement(8, DGX1), policy, Budget(ticks.__next__, 0))
    assert {one.partition("::")[0] for one in found} == {"GPU-0", "GPU-3"}
    assert next(ticks) > 1  # when it is up, and whether it is
