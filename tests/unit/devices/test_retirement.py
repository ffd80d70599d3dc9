import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.devices import retirement
from gpu_plugin.devices.device import MIG, PLACEHOLDER, Device, Resource
from gpu_plugin.devices.retirement import SETTLE, Retirement, gone, retire

GPU = "nvidia.com/gpu"
SMALL = "nvidia.com/mig-1g.10gb"
NONE: frozenset[tuple[str, str]] = frozenset()


def gpu(name, **more):
    return Device(name, name, name, "0", **more)


def mig(name, parent="GPU-a", **more):
    return Device(name, parent, name, "0:0", kind=MIG, **more)


def caps(number):
    return ("/dev/nvidia0", f"/dev/nvidia-caps/nvidia-cap{number}0", f"/dev/nvidia-caps/nvidia-cap{number}")


SHARED = SharedResource(GPU, GPU, 2)


def replica(name, number, count=2):
    return Device(f"{name}::{number}", name, name, "0", sharing=SharedResource(GPU, GPU, count))


def resource(*devices, name=GPU):
    return Resource(name, devices)


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
        (mig("MIG-x"), gpu("GPU-b"), False),
        (mig("MIG-x", nodes=caps(1)), mig("MIG-y", nodes=caps(2)), False),  # of other instances
        (mig("MIG-x", nodes=caps(1)), mig("MIG-y", nodes=caps(1)), True),  # of the same instance, made again
        (mig("MIG-x"), mig("MIG-y", nodes=caps(1)), True),  # of which is not known
        (mig("MIG-x"), mig("MIG-y", parent="GPU-b"), False),
        (mig("MIG-x", parent="MIG-x"), mig("MIG-y", parent="GPU-b"), True),  # its GPU is unknown
        (gpu("GPU-a"), replica("GPU-a", 0), True),
        (replica("GPU-a", 0), gpu("GPU-a"), True),
        (replica("GPU-a", 0), replica("GPU-a", 1), True),  # one pod has it, and one fewer may get it
        (replica("GPU-a", 0), replica("GPU-b", 0), False),
        (replica("GPU-a", 0), mig("MIG-x", sharing=SHARED), True),  # a pod has the whole GPU
        (mig("MIG-x", sharing=SHARED), replica("GPU-a", 0), True),
        (mig("MIG-x", sharing=SHARED, nodes=caps(1)), mig("MIG-y", sharing=SHARED, nodes=caps(1)), True),
        (mig("MIG-x", sharing=SHARED, nodes=caps(1)), mig("MIG-y", sharing=SHARED, nodes=caps(2)), False),
    ],
)
def test_hardware_that_a_pod_may_have_under_a_former_id_is_not_given_to_another(old, new, kept):
    holders, free = frozenset({(GPU, old.id)}), NONE
    name = "nvidia.com/new"
    merged: tuple[Resource, ...] = (resource(old),)
    retired = Retirement()
    # No answer; a pod holds it; no answer again; no pod holds it, but a pod may be getting it.
    for allocated, recent in ((None, NONE), (holders, NONE), (None, NONE), (free, holders)):
        merged, retired = retire(merged, (resource(new, name=name),), retired, allocated, 1, recent)
        assert merged[0].devices[0].healthy is not kept
        if kept:
            assert merged[0].devices[0].reason == f"a pod may still hold its hardware as {old.id}"
    # No pod holds it, and no pod gets it any more, also without another answer.
    for allocated in (free, None):
        merged, retired = retire(merged, (resource(new, name=name),), retired, allocated, 2)
        assert merged[0].devices == (new,)
        assert retired.since == {(GPU, old.id): 1}
    merged, retired = retire(merged, (resource(new, name=name),), retired, holders, 3)  # it was a mistake
    assert merged[0].devices[0].healthy is not kept
    merged, retired = retire(merged, (resource(new, name=name),), retired, free, 1 + SETTLE)
    assert [r.name for r in merged] == [name]
    assert merged[0].devices == (new,)


@pytest.mark.parametrize(
    ("before", "after", "name", "allocated", "back"),
    [
        pytest.param(2, 2, "nvidia.com/b", {0, 1}, {0, 1}, id="renamed while two pods have it"),
        pytest.param(2, 2, "nvidia.com/b", {0}, {1}, id="renamed while one has"),
        pytest.param(2, 4, "nvidia.com/b", {0, 1}, {2, 3}, id="renamed, for more pods"),
        pytest.param(4, 2, "nvidia.com/b", {0, 1, 2}, {0, 1}, id="renamed, for fewer pods than have it"),
        pytest.param(4, 3, GPU, {3}, {2}, id="for fewer pods"),
        pytest.param(4, 3, GPU, {3, 2}, {1}, id="one that a pod has is given to nobody anyway"),
        pytest.param(4, 2, GPU, {0, 1}, set(), id="those that go are nobody's"),
        pytest.param(2, 4, GPU, {0, 1}, set(), id="for more pods"),
    ],
)
def test_no_more_pods_than_a_gpu_is_given_out_to_have_it_whatever_its_replicas_are_called(
    before, after, name, allocated, back
):
    old, new = ([replica("GPU-a", number) for number in range(count)] for count in (before, after))
    holders = frozenset((GPU, f"GPU-a::{number}") for number in allocated)
    merged: tuple[Resource, ...] = (resource(*old),)
    retired = Retirement()
    for said in (holders, None, holders):
        merged, retired = retire(merged, (resource(*new, name=name),), retired, said, 0, held=holders)
        told = [device for device in merged[0].devices if not device.retired]
        assert {number for number, device in enumerate(told) if not device.healthy} == back
    merged, _ = retire(merged, (resource(*new, name=name),), retired, NONE, SETTLE)
    assert merged == (resource(*new, name=name),)


@pytest.mark.parametrize(
    ("held", "recent", "back"),
    [
        pytest.param({1, 2, 3}, set(), {0}, id="one is surely free"),
        pytest.param({3}, set(), {2}, id="all are surely free"),
        pytest.param({3}, {2}, {1}, id="one was given to a pod a moment ago"),
        pytest.param({2, 3}, {0, 1}, {0, 1, 2}, id="none is surely free"),
        pytest.param({0, 1, 2, 3}, set(), {0, 1, 2}, id="all are held: a pod that ends makes no room yet"),
        pytest.param({3}, {0, 1, 2}, {0, 1, 2}, id="all were listed by a process that ended a moment ago"),
        pytest.param(None, set(), {0, 1, 2}, id="nothing was ever known"),
        pytest.param(None, {3}, {0, 1, 2}, id="nothing was ever known and one was given to a pod"),
    ],
)
@pytest.mark.parametrize("said", [True, False])
def test_of_fewer_replicas_either_surely_free_ones_are_held_back_or_all(held, recent, back, said):
    def keys(numbers):
        return frozenset((GPU, f"GPU-a::{number}") for number in numbers)

    known = None if held is None else keys(held)
    four = resource(*(replica("GPU-a", number) for number in range(4)))
    three = resource(*four.devices[:3])
    [merged], retired = retire((four,), (three,), Retirement(), known if said else None, 0, keys(recent), held=known)
    assert {at for at, device in enumerate(merged.devices) if not device.healthy} == {*back, 3}
    assert retired.back == keys(back)


def test_a_replica_that_was_given_out_since_is_not_free_though_the_kubelet_said_so_before():
    four = resource(*(replica("GPU-a", number) for number in range(4)))
    three = resource(*four.devices[:3])
    listed, retired = retire((four,), (three,), Retirement(), NONE, 0, held=NONE)
    assert retired.free == {(GPU, "GPU-a::3")}
    [merged], retired = retire(listed, (three,), retired, None, 1, frozenset({(GPU, "GPU-a::3")}), held=NONE)
    assert [device.healthy for device in merged.devices] == [True, True, False, False]
    assert not retired.free


def test_which_replicas_are_held_back_stays_so_while_nobody_says_more():
    new = [replica("GPU-a", number) for number in range(3)]
    merged: tuple[Resource, ...] = (resource(*new, replica("GPU-a", 3)),)
    retired = Retirement()
    told, held = [], NONE
    for said in ({2, 3}, None, {0, 2, 3}, None, {1, 2, 3}, None):
        allocated = None if said is None else frozenset((GPU, f"GPU-a::{number}") for number in said)
        held = allocated or held
        merged, retired = retire(merged, (resource(*new),), retired, allocated, 0, held=held)
        told.append([device.id[-1] for device in merged[0].devices if not device.healthy and not device.retired])
    assert told == [["1"], ["1"], ["1"], ["1"], ["0"], ["0"]]


def test_slices_that_were_beside_each_other_do_not_keep_each_other_back():
    before = (resource(mig("MIG-x"), mig("MIG-y"), name=SMALL),)
    allocated = frozenset({(SMALL, "MIG-x")})
    after = (resource(mig("MIG-y"), mig("MIG-new"), name=SMALL),)
    merged, retired = retire(before, after, Retirement(), allocated, 0)
    again, _ = retire(merged, after, retired, allocated, 100)
    for resources in (merged, again):
        assert [device.healthy for device in resources[0].devices] == [True, False, False]


def test_a_slice_whose_gpu_is_forgotten_is_still_that_slice():
    old = gone(Device("MIG-x", "MIG-x", "MIG-x", "", kind=MIG))  # as a device that a pod holds is listed again
    planned = (mig("MIG-x", nodes=caps(1)), mig("MIG-y", parent="GPU-b"), gpu("GPU-a"), gpu("GPU-b"))
    merged, _ = retire(
        (resource(old),), (resource(*planned, name=SMALL),), Retirement(), frozenset({(GPU, "MIG-x")}), 0
    )
    assert [device.healthy for device in merged[0].devices] == [False, True, False, True]


def test_what_tens_of_thousands_of_replicas_have_in_use_is_judged_once_for_each_gpu(monkeypatch):
    judged = []

    def counted(device, old):
        judged.append(device)
        return overlap(device, old)

    overlap = retirement._overlap
    monkeypatch.setattr(retirement, "_overlap", counted)
    old = [replica(f"GPU-{at}", number) for at in range(8) for number in range(900)]
    whole = [gpu(f"GPU-{at}") for at in range(8)]
    more = [replica(f"GPU-{at}", number) for at in range(8) for number in range(6000)]
    allocated = frozenset((GPU, device.id) for device in old)
    planned = (resource(*whole, *more, name="nvidia.com/new"),)
    merged, _ = retire((resource(*old),), planned, Retirement(), allocated, 0, held=allocated)
    assert len(judged) == 16  # each GPU as a whole, and as replicas: 48,008 devices
    assert not any(device.healthy for device in merged[0].devices[:8])
    assert sum(not device.healthy for device in merged[0].devices[8:]) == len(old)


ids = st.sets(st.sampled_from("abcdefgh"), max_size=8)


@given(st.lists(st.tuples(ids, st.none() | ids, st.floats(0, 20)), max_size=12))
@settings(deadline=None)
def test_no_id_ever_leaves_the_list_while_a_pod_holds_it(steps):
    listed: tuple[Resource, ...] = ()
    retired, now = Retirement(), 0.0
    for planned, holders, passed in steps:
        now += passed
        before = {(r.name, d.id) for r in listed for d in r.devices}
        # A pod holds only what was listed to it.
        allocated = None if holders is None else frozenset({(GPU, i) for i in holders} & before)
        listed, retired = retire(listed, (resource(*map(gpu, sorted(planned))),), retired, allocated, now)
        after = {(r.name, d.id): d for r in listed for d in r.devices}
        assert len(after) == sum(len(r.devices) for r in listed)
        assert before - after.keys() <= (set() if allocated is None else before - allocated)
        assert all(after[GPU, i].healthy for i in planned)  # each is a GPU of its own
        assert all(not d.healthy for d in after.values() if d.retired)
        assert retired.since.keys() == {key for key, d in after.items() if d.retired}


# One GPU in all the ways it may be offered: by name, device, and the instances of it that a container can open.
WHOLE = frozenset({1, 2, 3})
OFFERS = [
    (),
    ((GPU, gpu("GPU-a"), WHOLE),),
    (("nvidia.com/h100", gpu("GPU-a"), WHOLE),),
    tuple((GPU, replica("GPU-a", number), WHOLE) for number in range(2)),
    tuple(("nvidia.com/h100", replica("GPU-a", number), WHOLE) for number in range(2)),
    tuple((GPU, replica("GPU-a", number, 3), WHOLE) for number in range(3)),
    tuple((GPU, replica("GPU-a", number, 4), WHOLE) for number in range(4)),
    tuple(
        (
            SMALL,
            replace(mig(f"MIG-first-{at}", nodes=caps(at), sharing=SHARED), id=f"MIG-first-{at}::{n}"),
            frozenset({at}),
        )
        for at in (1, 2, 3)
        for n in range(2)
    ),
    tuple((SMALL, mig(f"MIG-first-{at}", nodes=caps(at)), frozenset({at})) for at in (1, 2, 3)),
    tuple((SMALL, mig(f"MIG-second-{at}", nodes=caps(at)), frozenset({at})) for at in (1, 2)),
    (
        (SMALL, mig("MIG-second-1", nodes=caps(1)), frozenset({1})),
        ("nvidia.com/mig-2g", mig("MIG-third", nodes=caps(3)), frozenset({3})),
    ),
]
PARTS = {
    (name, device.id): (parts, device.kind if device.shared else "") for of in OFFERS for name, device, parts in of
}
step = st.tuples(
    st.sampled_from(OFFERS),
    st.sampled_from(["says nothing", "says all", "says it late"]),
    st.floats(0, 4),
    st.sampled_from(["take", "take", "leave", "neither"]),
    st.integers(0, 7),
)


@given(st.lists(step, max_size=25))
@settings(deadline=None, max_examples=300)
def test_hardware_that_a_pod_may_hold_is_never_offered_under_another_id(steps):
    listed: tuple[Resource, ...] = ()
    retired, now = Retirement(), 0.0
    holding: dict[tuple[str, str], float] = {}  # since when a pod has each id
    held: frozenset[tuple[str, str]] | None = None
    for offered, word, passed, pod, which in steps:
        now += passed
        named: dict[str, list[Device]] = {}
        for name, device, _ in offered:
            named.setdefault(name, []).append(device)
        late = 3.0 if word == "says it late" else 0.0  # the answer does not have the newest allocation yet
        allocated = (
            None if word == "says nothing" else frozenset(k for k, since in holding.items() if since <= now - late)
        )
        planned = tuple(Resource(name, tuple(devices)) for name, devices in named.items())
        held = held if allocated is None else allocated
        recent = frozenset(k for k, since in holding.items() if now - since < SETTLE or k not in (held or ()))
        listed, retired = retire(listed, planned, retired, allocated, now, recent, held=held)
        told = {(r.name, d.id): d.healthy for r in listed for d in r.devices}
        assert holding.keys() <= told.keys()
        free = sorted(key for key, healthy in told.items() if healthy and key not in holding)
        for key in free:
            parts, shared = PARTS[key]
            beside = [other for other in holding if parts & PARTS[other][0]]
            assert all(shared and PARTS[other][1] == shared for other in beside), (key, beside)
            if beside:  # replicas of the same hardware: held and free replicas
                count = next(device.replicas for name, device, _ in offered if (name, device.id) == key)
                assert len(beside) + sum(PARTS[other][0] == parts for other in free) <= count, (key, beside)
        if pod == "take" and free:
            holding[free[which % len(free)]] = now
        elif pod == "leave" and holding:
            del holding[sorted(holding)[which % len(holding)]]


def test_a_retired_device_is_the_very_same_the_second_time():
    first, retired = retire((resource(gpu("a")),), (), Retirement(), None, 0)
    again, _ = retire(first, (), retired, None, 1)
    assert again[0].devices[0] is first[0].devices[0]
    assert replace(first[0].devices[0], retired=False) == gpu(
        "a", withheld=first[0].devices[0].withheld, reason=first[0].devices[0].withheld
    )
