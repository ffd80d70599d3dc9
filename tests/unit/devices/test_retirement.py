from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.devices.device import MIG, Device, Resource
from gpu_plugin.devices.naming import PLACEHOLDER
from gpu_plugin.devices.retirement import SETTLE, Retirement, retire

GPU = "nvidia.com/gpu"
SMALL = "nvidia.com/mig-1g.10gb"
NONE: frozenset[tuple[str, str]] = frozenset()


def gpu(name, **more):
    return Device(name, name, name, "0", **more)


def mig(name, parent="GPU-a", **more):
    return Device(name, parent, name, "0:0", kind=MIG, **more)


def replica(name, number):
    return Device(f"{name}::{number}", name, name, "0", sharing=SharedResource(GPU, GPU, 2))


def resource(*devices, name=GPU):
    return Resource(name, devices)


def test_nothing_gone_is_the_plan():
    planned = (resource(gpu("a"), gpu("b")),)
    assert retire(planned, planned, Retirement(), None, 0) == (planned, Retirement())


def test_what_is_gone_is_listed_last_and_unhealthy():
    before, planned = (resource(gpu("a"), gpu("b"), gpu("c")),), (resource(gpu("b"), gpu("d")),)
    [merged], retired = retire(before, planned, Retirement(), None, 5)
    assert [device.id for device in merged.devices] == ["b", "d", "a", "c"]
    assert [device.healthy for device in merged.devices] == [True, True, False, False]
    assert [device.retired for device in merged.devices] == [False, False, True, True]
    assert retired.since == {(GPU, "a"): 5, (GPU, "c"): 5}


def test_a_resource_that_is_gone_keeps_what_it_had():
    merged, _ = retire((resource(mig("x"), name=SMALL),), (resource(gpu("a")),), Retirement(), None, 0)
    assert [(r.name, [d.id for d in r.devices]) for r in merged] == [(GPU, ["a"]), (SMALL, ["x"])]


def gone_for(seconds, held, listed=None):
    first, retired = retire((resource(gpu("a"), gpu("b")),), (resource(gpu("b")),), Retirement(), held, 0)
    [merged], later = retire(listed or first, (resource(gpu("b")),), retired, held, seconds)
    return [device.id for device in merged.devices], later


def test_it_goes_when_no_pod_holds_it_and_none_can_be_getting_it():
    assert gone_for(SETTLE - 0.1, NONE)[0] == ["b", "a"]
    assert gone_for(SETTLE, NONE) == (["b"], Retirement())


def test_it_stays_while_a_pod_holds_it():
    assert gone_for(1e6, frozenset({(GPU, "a")}))[0] == ["b", "a"]
    assert gone_for(1e6, frozenset({(SMALL, "a")}))[0] == ["b"]  # that is another resource's


def test_it_stays_while_the_kubelet_does_not_say():
    assert gone_for(1e6, None)[0] == ["b", "a"]


def test_what_comes_back_is_itself_again():
    first, retired = retire((resource(gpu("a")),), (), Retirement(), None, 0)
    [merged], later = retire(first, (resource(gpu("a")),), retired, None, 1)
    assert merged.devices == (gpu("a"),)
    assert later == Retirement()


def test_a_made_up_name_is_nobodys():
    merged, retired = retire((resource(gpu(f"{PLACEHOLDER}3")),), (), Retirement(), None, 0)
    assert (merged, retired) == ((), Retirement())


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        (gpu("GPU-a"), gpu("GPU-a"), True),  # renamed: one pod has it for itself
        (gpu("GPU-a"), gpu("GPU-b"), False),
        (gpu("GPU-a"), mig("MIG-x"), True),  # cut while a pod has the whole
        (mig("MIG-x"), gpu("GPU-a"), True),
        (mig("MIG-x"), mig("MIG-y"), False),  # slices beside each other
        (gpu("GPU-a"), replica("GPU-a", 0), True),
        (replica("GPU-a", 0), gpu("GPU-a"), True),
        (replica("GPU-a", 0), replica("GPU-a", 1), False),  # it was shared before
    ],
)
def test_hardware_that_a_pod_has_under_a_former_id_is_not_given_to_another(old, new, kept):
    holders = frozenset({(GPU, old.id)})
    name = "nvidia.com/new"
    merged, retired = retire((resource(old),), (resource(new, name=name),), Retirement(), holders, 0)
    assert merged[0].devices[0].healthy is not kept
    if kept:
        assert merged[0].devices[0].reason == f"a pod still holds its hardware as {old.id}"
    # An answer that fails to come changes nothing of that; one that says it is free does.
    merged, retired = retire(merged, (resource(new, name=name),), retired, None, SETTLE)
    assert merged[0].devices[0].healthy is not kept
    merged, retired = retire(merged, (resource(new, name=name),), retired, NONE, SETTLE)
    assert [r.name for r in merged] == [name]
    assert merged[0].devices == (new,)


def test_a_slice_whose_gpu_is_forgotten_is_still_that_slice():
    old = Device("MIG-x", "MIG-x", "MIG-x", "", kind=MIG)  # as what a pod holds is recalled
    merged, _ = retire(
        (resource(old),),
        (resource(mig("MIG-x"), mig("MIG-y"), name=SMALL),),
        Retirement(),
        frozenset({(GPU, "MIG-x")}),
        0,
    )
    assert [device.healthy for device in merged[0].devices] == [False, True]


ids = st.sets(st.sampled_from("abcdefgh"), max_size=8)


@given(st.lists(st.tuples(ids, st.none() | ids, st.floats(0, 20)), max_size=12))
@settings(deadline=None)
def test_no_id_ever_leaves_the_list_while_a_pod_holds_it(steps):
    listed: tuple[Resource, ...] = ()
    retired, now, known = Retirement(), 0.0, NONE
    for planned, holders, passed in steps:
        now += passed
        before = {(r.name, d.id) for r in listed for d in r.devices}
        # A pod holds only what was listed to it.
        held = None if holders is None else frozenset({(GPU, i) for i in holders} & before)
        listed, retired = retire(listed, (resource(*map(gpu, sorted(planned))),), retired, held, now)
        after = {(r.name, d.id): d for r in listed for d in r.devices}
        assert len(after) == sum(len(r.devices) for r in listed)
        assert before - after.keys() <= (set() if held is None else before - held)
        assert all(after[GPU, i].healthy or (GPU, i) in (known | (held or NONE)) for i in planned)
        assert all(not d.healthy for d in after.values() if d.retired)
        assert retired.since.keys() == {key for key, d in after.items() if d.retired}
        known = retired.held


def test_a_retired_device_is_the_very_same_the_second_time():
    first, retired = retire((resource(gpu("a")),), (), Retirement(), None, 0)
    again, _ = retire(first, (), retired, None, 1)
    assert again[0].devices[0] is first[0].devices[0]
    assert replace(first[0].devices[0], retired=False) == gpu(
        "a", held=first[0].devices[0].held, reason=first[0].devices[0].held
    )
