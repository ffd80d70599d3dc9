"""Two resources for one container: where their answers contradict each other, and that it is said."""

import itertools

import pytest

from gpu_plugin.containers.conflicts import (
    SAME_CONTAINER_SECONDS,
    WARNING_INTERVAL,
    PairWatch,
    overwrites,
    pair_warning,
)
from gpu_plugin.containers.edits import Access, container_edits
from gpu_plugin.devices.device import Device, Resource

GPU, MIG, EMPTY = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb"
A = Device("GPU-a", "GPU-a", "GPU-a", "0", nodes=("/dev/nvidia0",))
B = Device("MIG-b", "GPU-b", "MIG-b", "1:0", nodes=("/dev/nvidia1",))
SERVED = (Resource(GPU, (A,)), Resource(MIG, (B,)), Resource(EMPTY))
NVIDIAS = ("cdi-annotations", "cdi-cri", "envvar", "volume-mounts")
SUBSETS = [subset for size in range(1, 5) for subset in itertools.combinations(NVIDIAS, size)]


@pytest.mark.parametrize("strategies", SUBSETS, ids=",".join)
def test_strategies_overwrite_where_the_answers_give_one_variable_two_values(strategies):
    access = Access(strategies=strategies, pass_device_specs=True, features=("gds",), imex_channels=(0,))
    one, other = container_edits([A], access), container_edits([B], access)
    contradicting = {name for name in one.envs.keys() & other.envs.keys() if one.envs[name] != other.envs[name]}
    assert contradicting == ({"NVIDIA_VISIBLE_DEVICES"} if overwrites(strategies) else set())
    assert not one.annotations.keys() & other.annotations.keys()
    for kind in ("mounts", "devices"):
        of = [{each.container_path: each for each in getattr(edits, kind)} for edits in (one, other)]
        assert all(of[0][path] == of[1][path] for path in of[0].keys() & of[1].keys())


def test_a_pair_that_contradicts_itself_is_named_with_the_way_out():
    sentence = pair_warning(("envvar",), SERVED)
    assert sentence.startswith(
        f"a container that asks for two of {GPU}, {MIG} sees the devices of only one of them, at random,"
    )
    assert sentence.endswith("--device-list-strategy cdi-cri, cdi-annotations or volume-mounts gives it both")
    assert "where its runtime goes by that variable" in pair_warning(("envvar", "cdi-cri"), SERVED)


@pytest.mark.parametrize(
    ("strategies", "resources"),
    [
        (("envvar",), (SERVED[0], SERVED[2])),
        (("envvar",), ()),
        (("volume-mounts",), SERVED),
        (("envvar", "volume-mounts"), SERVED),
        (("cdi-cri",), SERVED),
        (("cdi-annotations",), SERVED),
    ],
)
def test_there_is_no_warning_without_such_a_pair(strategies, resources):
    assert pair_warning(strategies, resources) == ""


def test_two_resources_allocated_right_after_each_other_are_told_of():
    watch = PairWatch()
    assert watch.allocated(GPU, ("envvar",), 10.0) == ""
    sentence = watch.allocated(MIG, ("envvar",), 10.0 + SAME_CONTAINER_SECONDS / 2)
    assert sentence.startswith(
        f"{GPU} and {MIG} were allocated within 100 ms of each other: if that was for one container, it"
    )


@pytest.mark.parametrize(
    ("second", "strategies", "later"),
    [(GPU, ("envvar",), 0.001), (MIG, ("cdi-cri",), 0.001), (MIG, ("envvar",), SAME_CONTAINER_SECONDS * 1.01)],
    ids=["the same resource", "another strategy", "too late"],
)
def test_other_allocations_are_not(second, strategies, later):
    watch = PairWatch()
    assert watch.allocated(GPU, strategies, 10.0) == ""
    assert watch.allocated(second, strategies, 10.0 + later) == ""


def test_a_storm_of_such_pairs_is_a_line_a_second():
    watch = PairWatch()
    said = [watch.allocated((GPU, MIG)[at % 2], ("envvar",), at / 100) for at in range(500)]
    assert sum(bool(sentence) for sentence in said) == 5 / WARNING_INTERVAL
