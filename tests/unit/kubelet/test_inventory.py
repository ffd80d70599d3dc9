"""The lists for the kubelet, step by step: offers, health, retirement, withdrawal."""

import math

import msgspec
import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.sharing import MPS, NamePattern, SharedResource
from gpu_plugin.containers.cdi.readiness import CdiReadiness
from gpu_plugin.devices.device import MAX_LIST_BYTES, PLACEHOLDER, TEGRA_GPU, WSL_GPUS, Device, Resource
from gpu_plugin.devices.node import Gpu, MigDevice, Node
from gpu_plugin.devices.plan import list_bytes
from gpu_plugin.devices.recent_allocations import ENTERED
from gpu_plugin.devices.retirement import SETTLE
from gpu_plugin.devices.sharing import MpsShared
from gpu_plugin.health.latch import Health
from gpu_plugin.kubelet import inventory as inventory_module
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.listing import MPS_UNKNOWN, WITHDRAW, judge
from gpu_plugin.kubelet.offer import offer, without_gone
from gpu_plugin.kubelet.snapshot import SnapshotStore

GPU = "nvidia.com/gpu"
NONE: frozenset[tuple[str, str]] = frozenset()
NODE = Node((Gpu("GPU-a", 0), Gpu("GPU-b", 1)))


def offered(node=NODE, **settings):
    return offer(node, msgspec.structs.replace(resolve({}, {}), **settings), "/")


def cut(gpu, *names):
    slices = tuple(
        MigDevice(
            f"MIG-{name}", at, 7 + at, 0, "1g.10gb", gpu_instance_cap=ord(name), compute_instance_cap=ord(name) + 200
        )
        for at, name in enumerate(names)
    )
    return msgspec.structs.replace(gpu, mig_enabled=True, mig_devices=slices)


@pytest.fixture
def sick():
    return {}


@pytest.fixture
def inventory(sick):
    return Inventory(SnapshotStore(), lambda gpu, visible: Health(reason=sick.get(visible, "") or sick.get(gpu, "")))


def told(inventory):
    """Device ids by resource; unhealthy ones with an exclamation mark."""
    return {
        name: [device.id + "!" * (not device.healthy) for device in view.resource.devices]
        for name, view in inventory.store.current.resources.items()
    }


def test_an_offer_is_published_with_the_health_there_is(inventory, sick):
    sick["GPU-b"] = "Xid 79"
    inventory.apply(offered(), None, 0)
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b!"]}
    sick.clear()
    inventory.health_changed("GPU-b")
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b"]}


def test_the_same_offer_again_publishes_nothing(inventory):
    inventory.apply(offered(), None, 0)
    version = inventory.store.current.version
    inventory.apply(offered(), NONE, 1)
    inventory.settle(None, 2)
    assert inventory.store.current.version == version


def test_a_change_of_one_resource_leaves_the_others_the_very_same(inventory):
    names = (NamePattern("x", "nvidia.com/x"),)
    node = Node((Gpu("GPU-a", 0), Gpu("GPU-b", 1, model="x")))
    inventory.apply(offered(node, gpu_names=names), None, 0)
    before = inventory.store.current.resources
    shared = (SharedResource("nvidia.com/x", "nvidia.com/x", 2),)
    inventory.apply(offered(node, gpu_names=names, sharing=shared), NONE, 1)
    after = inventory.store.current.resources
    assert after[GPU] is before[GPU]
    assert after["nvidia.com/x"] is not before["nvidia.com/x"]


def test_a_resource_is_emptied_before_it_is_withdrawn(inventory):
    inventory.apply(offered(), None, 0)
    renamed = offered(gpu_names=(NamePattern("*", "nvidia.com/h100"),))
    inventory.apply(renamed, NONE, 10)
    assert told(inventory) == {"nvidia.com/h100": ["GPU-a", "GPU-b"], GPU: ["GPU-a!", "GPU-b!"]}
    assert inventory.judged.retirement.since == {(GPU, "GPU-a"): 10, (GPU, "GPU-b"): 10}
    assert inventory.leaving
    assert inventory.judged.next_leave == 10 + SETTLE
    inventory.settle(NONE, 10 + SETTLE)
    assert told(inventory) == {"nvidia.com/h100": ["GPU-a", "GPU-b"], GPU: []}
    assert inventory.leaving
    assert inventory.judged.next_leave == 10 + SETTLE + WITHDRAW
    inventory.settle(NONE, 10 + SETTLE + WITHDRAW)
    assert told(inventory) == {"nvidia.com/h100": ["GPU-a", "GPU-b"]}
    assert not inventory.leaving
    assert inventory.judged.next_leave == math.inf


def test_what_was_given_out_keeps_its_hardware_until_the_kubelet_has_written_since(inventory):
    inventory.apply(offered(), None, 0)
    inventory.store.recent.note(GPU, ["GPU-a"], 9)
    renamed = offered(gpu_names=(NamePattern("*", "nvidia.com/h100"),))
    inventory.apply(renamed, NONE, 10)
    assert told(inventory)["nvidia.com/h100"] == ["GPU-a!", "GPU-b"]
    inventory.settle(NONE, 10 + SETTLE)
    assert inventory.judged.next_leave == math.inf, "when the other one may go nobody knows"
    for asked, writing, healthy in ((11, 1, False), (100, 1, False), (200, None, False), (300, 2, True)):
        inventory.store.recent.seen(NONE, writing, asked)
        inventory.settle(NONE, asked)
        assert told(inventory)["nvidia.com/h100"] == ["GPU-a" + "!" * (not healthy), "GPU-b"]
        assert ("GPU-a!" in told(inventory).get(GPU, ())) is not healthy, "nor does its id leave the list"


def test_what_an_earlier_process_gave_out_last_may_not_have_been_said_yet(inventory):
    inventory.remember([Resource("nvidia.com/old", (Device("GPU-a", "GPU-a", "GPU-a", "0"),))])
    inventory.apply(offered(), NONE, 10)
    assert told(inventory)[GPU] == ["GPU-a!", "GPU-b"]
    for writing in (1, 2):
        inventory.store.recent.seen(NONE, writing, 10 + ENTERED + writing)
    inventory.settle(NONE, 10 + SETTLE)
    assert told(inventory)[GPU] == ["GPU-a", "GPU-b"]


@pytest.mark.parametrize("meanwhile", ["nothing", "health", "another offer", "given away"])
def test_what_was_judged_is_published_unless_things_have_changed_since(inventory, sick, meanwhile):
    inventory.apply(offered(), None, 0)
    inventory.apply(offered(gpu_names=(NamePattern("*", "nvidia.com/h100"),)), None, 10)
    standing = inventory.standing(NONE, 10 + SETTLE)
    judged = judge(standing)
    match meanwhile:
        case "health":
            sick["GPU-a"] = "Xid 79"
            inventory.health_changed("GPU-a")
        case "another offer":
            inventory.apply(offered(gpu_names=(NamePattern("*", "nvidia.com/h100"),)), None, 11)
        case "given away":
            inventory.store.recent.note(GPU, ["GPU-a"], 12)
    before = told(inventory)
    assert inventory.take(judged, standing) is (meanwhile == "nothing")
    after = {"nvidia.com/h100": ["GPU-a", "GPU-b"], GPU: []}
    assert told(inventory) == (after if meanwhile == "nothing" else before)


def test_a_resource_that_comes_back_while_it_is_emptied_stays(inventory):
    inventory.apply(offered(), None, 0)
    inventory.apply(offered(exclude_gpus=("*",)), NONE, 0)
    inventory.settle(NONE, SETTLE)
    assert told(inventory) == {GPU: []}
    inventory.apply(offered(), NONE, SETTLE + 1)
    inventory.settle(NONE, SETTLE + 10)
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b"]}


def test_slices_of_a_repartitioned_gpu_stay_while_a_pod_holds_one(inventory, sick):
    small = "nvidia.com/mig-1g.10gb"
    whole, first = NODE.gpus
    inventory.apply(offered(Node((cut(whole, "x", "y"), first)), mig_strategy="mixed"), None, 0)
    again = offered(Node((cut(whole, "z"), first)), mig_strategy="mixed")
    holds = frozenset({(small, "MIG-x")})
    inventory.apply(again, holds, 1)
    inventory.settle(holds, 100)
    assert told(inventory) == {small: ["MIG-z", "MIG-x!"], GPU: ["GPU-b"]}
    sick["GPU-a"] = "lost"
    inventory.health_changed("GPU-a")
    sick.clear()
    inventory.health_changed("GPU-a")  # its hardware is well again, it is still gone
    assert told(inventory)[small] == ["MIG-z", "MIG-x!"]
    inventory.settle(NONE, 101)
    assert told(inventory)[small] == ["MIG-z"]


def test_every_slice_and_replica_of_a_sick_gpu_is_unhealthy(inventory, sick):
    small = "nvidia.com/mig-1g.10gb"
    shared = (SharedResource(small, small, 2), SharedResource(GPU, GPU, 3))
    node = Node((cut(NODE.gpus[0], "x", "y"), NODE.gpus[1], Gpu("GPU-c", 2)))
    inventory.apply(offered(node, mig_strategy="mixed", sharing=shared), None, 0)
    sick |= {"GPU-a": "lost", "GPU-c": "hot"}
    inventory.health_changed("GPU-a")
    inventory.health_changed("GPU-c")
    assert told(inventory) == {
        small: ["MIG-x::0!", "MIG-x::1!", "MIG-y::0!", "MIG-y::1!"],
        GPU: ["GPU-b::0", "GPU-b::1", "GPU-b::2", "GPU-c::0!", "GPU-c::1!", "GPU-c::2!"],
    }


def test_what_an_earlier_process_listed_is_not_forgotten(inventory):
    inventory.remember(
        [Resource(GPU, (Device("GPU-a", "GPU-a", "GPU-a", "0"), Device("GPU-z", "GPU-z", "GPU-z", "7")))]
    )
    inventory.apply(offered(), frozenset({(GPU, "GPU-z")}), 0)
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b", "GPU-z!"]}
    for writing in (1, 2):
        inventory.settle(NONE, SETTLE)
        assert told(inventory) == {GPU: ["GPU-a", "GPU-b", "GPU-z!"]}, "it may have been given away at the last moment"
        inventory.store.recent.seen(NONE, writing, SETTLE)
    inventory.settle(NONE, SETTLE)
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b"]}


def test_a_made_up_name_makes_no_offer_wait(inventory):
    inventory.apply(offered(Node((Gpu(f"{PLACEHOLDER}0", 0, unreadable="lost"), NODE.gpus[1]))), None, 0)
    inventory.apply(offered(), None, 1)
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b"]}
    assert not inventory.leaving


def test_devices_shared_by_mps_wait_for_their_daemon(inventory, sick):
    shared = (
        SharedResource(
            GPU, "nvidia.com/gpu.shared", 2, MPS, msgspec.structs.replace(SharedResource("", "", 2).devices, count=1)
        ),
    )
    inventory.apply(offered(sharing=shared, mps_root="/run/mps/"), None, 0)
    (asked,) = inventory.mps_resources
    assert asked == MpsShared("nvidia.com/gpu.shared", ("GPU-a",), 2, root="/run/mps")
    view = inventory.store.current.resources["nvidia.com/gpu.shared"]
    assert {device.reason for device in view.resource.devices} == {MPS_UNKNOWN}
    assert view.access.mps.host_pipe == "/run/mps/nvidia.com/gpu.shared/pipe"
    assert inventory.store.current.resources[GPU].access.mps is None
    other = inventory.store.current.resources[GPU]
    assert inventory.mps_changed(asked, "")
    assert told(inventory) == {"nvidia.com/gpu.shared": ["GPU-a::0", "GPU-a::1"], GPU: ["GPU-b"]}
    sick["GPU-a"] = "hot"
    inventory.health_changed("GPU-a")
    assert inventory.mps_changed(asked, "down")
    assert not inventory.mps_changed(asked, "down")
    sick.clear()
    inventory.health_changed("GPU-a")
    view = inventory.store.current.resources["nvidia.com/gpu.shared"]
    assert {device.reason for device in view.resource.devices} == {"down"}
    assert inventory.store.current.resources[GPU] is other


UUIDS = [f"GPU-0000000{n}-0000-0000-0000-000000000000" for n in range(2)]
REAL = Node(tuple(Gpu(uuid, at) for at, uuid in enumerate(UUIDS)))


def test_a_lost_memory_is_made_up_for_by_what_pods_hold(inventory):
    renamed = offered(REAL, gpu_names=(NamePattern("*", "example.com/gpu"),))
    allocated = frozenset(
        {
            (GPU, UUIDS[1]),
            ("example.com/gpu", f"{UUIDS[0]}::3"),
            (GPU, "GPU-x"),  # another plugin's, as are all ids that we never make
            (GPU, f"{UUIDS[0]}-0"),
        }
    )
    inventory.apply(renamed, allocated, 0)
    assert told(inventory) == {"example.com/gpu": [f"{UUIDS[0]}!", f"{UUIDS[1]}!", f"{UUIDS[0]}::3!"]}
    inventory.settle(NONE, SETTLE)
    assert told(inventory)["example.com/gpu"] == UUIDS


@pytest.mark.parametrize(
    ("allocated", "settings"),
    [
        ((GPU, "GPU-99999999-0000-0000-0000-000000000000"), {}),
        ((GPU, UUIDS[1]), {"exclude_gpus": (UUIDS[1],)}),
    ],
    ids=["GPUs of which we know nothing", "a GPU that is left to it"],
)
def test_a_resource_that_another_plugin_serves_is_never_taken_from_it(inventory, allocated, settings):
    mine = offered(REAL, gpu_names=(NamePattern("*", "nvidia.com/h100"),), **settings)
    for now in (0, 1):
        inventory.apply(mine, frozenset({allocated}), now)
        inventory.settle(frozenset({allocated}), now, frozenset({allocated}))
        assert told(inventory) == {
            "nvidia.com/h100": [gpu for gpu in UUIDS if gpu not in settings.get("exclude_gpus", ())]
        }
    assert not inventory.leaving


@pytest.mark.parametrize("name", [WSL_GPUS, TEGRA_GPU])
def test_gpus_without_a_uuid_are_known_by_their_names(inventory, name):
    renamed = offered(Node((Gpu(name, 0),)), gpu_names=(NamePattern("*", "nvidia.com/h100"),))
    allocated = frozenset({(GPU, f"{name}::1"), ("example.com/fuse", "all of them")})
    inventory.apply(renamed, allocated, 0)
    assert told(inventory) == {"nvidia.com/h100": [f"{name}!"]}
    inventory.settle(NONE, 1)
    assert told(inventory) == {"nvidia.com/h100": [name]}
    inventory.apply(offered(REAL), allocated, 2)
    assert told(inventory)[GPU] == UUIDS, "on another node that is another plugin's"


def test_what_pods_hold_and_nobody_lists_is_listed_again(inventory):
    inventory.apply(offered(REAL), None, 0)
    renamed, foreign = (GPU, f"{UUIDS[1]}::0"), ("other.org/gpu", UUIDS[0])
    inventory.settle(NONE | {renamed}, 1)  # on the checkpoint's word alone, as of a plain init container
    assert told(inventory) == {GPU: [UUIDS[0], f"{UUIDS[1]}!", f"{UUIDS[1]}::0!"]}
    known = frozenset({renamed, foreign})
    inventory.settle(known, 2, known)
    assert told(inventory) == {GPU: [f"{UUIDS[0]}!", f"{UUIDS[1]}!", f"{UUIDS[1]}::0!"]}
    inventory.settle(NONE, 2 + SETTLE)
    assert told(inventory) == {GPU: UUIDS}


def test_what_pod_resources_lists_is_listed_again_though_the_checkpoint_cannot_be_read(inventory):
    known = frozenset({(GPU, f"{UUIDS[1]}::0")})
    inventory.apply(offered(REAL), None, 0, known)
    assert told(inventory) == {GPU: [UUIDS[0], f"{UUIDS[1]}!", f"{UUIDS[1]}::0!"]}
    inventory.apply(offered(REAL), None, 1, frozenset({(FOREIGN, UUIDS[0])}))
    assert told(inventory) == {GPU: [f"{UUIDS[0]}!", f"{UUIDS[1]}!", f"{UUIDS[1]}::0!"]}


def test_what_is_held_under_a_foreign_name_is_asked_about_by_name_since_it_is_known(inventory):
    key = (FOREIGN, UUIDS[0])
    inventory.remember([], [Resource(FOREIGN, (Device(UUIDS[0], UUIDS[0], UUIDS[0], "0"),))])
    assert inventory.judged.asked == {key: -math.inf}
    inventory.apply(offered(REAL, exclude_gpus=(UUIDS[0],)), None, 3)
    assert (inventory.judged.asked, inventory.judged.awaited) == ({key: -math.inf}, frozenset()), (
        "that GPU may be served again"
    )
    inventory.settle(NONE, 4)
    assert inventory.judged.asked == {}
    for now in (5, 6):
        inventory.settle(frozenset({key}), now)
        assert inventory.judged.asked == {key: 5}


FOREIGN = "example.com/h100"


def test_what_is_held_under_a_foreign_name_keeps_its_hardware_while_nobody_says_otherwise(inventory):
    allocated = frozenset({(FOREIGN, UUIDS[0])})
    inventory.apply(offered(REAL), allocated, 0)
    for now, silent in ((1, inventory.apply), (2, inventory.apply)):
        silent(offered(REAL), None, now)
        assert told(inventory) == {GPU: [f"{UUIDS[0]}!", UUIDS[1]]}
    inventory.settle(None, 3)
    assert told(inventory) == {GPU: [f"{UUIDS[0]}!", UUIDS[1]]}
    assert inventory.leaving
    assert inventory.judged.awaited == allocated
    inventory.apply(offered(REAL, gpu_names=(NamePattern("*", FOREIGN),)), allocated, 4)
    assert told(inventory)[FOREIGN] == UUIDS, "now it is ours, and the kubelet knows whose"
    inventory.apply(offered(REAL), NONE, 5)
    inventory.settle(NONE, 5 + SETTLE)
    assert told(inventory)[GPU] == UUIDS


def test_what_is_held_under_a_foreign_name_is_remembered_by_the_next_process(inventory):
    inventory.apply(offered(REAL), frozenset({(FOREIGN, UUIDS[0])}), 0)
    later = Inventory(SnapshotStore(), lambda _gpu, _visible: Health())
    later.remember(inventory.listed, inventory.foreign)
    later.apply(offered(REAL), None, 1)
    assert told(later) == {GPU: [f"{UUIDS[0]}!", UUIDS[1]]}
    later.settle(NONE, 2)
    assert told(later) == {GPU: UUIDS}
    assert later.foreign == ()


def cut_like(gpu, *uuids):
    slices = tuple(
        MigDevice(uuid, at, 7 + at, 0, "1g.10gb", gpu_instance_cap=30 + at, compute_instance_cap=60 + at)
        for at, uuid in enumerate(uuids)
    )
    return msgspec.structs.replace(gpu, mig_enabled=True, mig_devices=slices)


SLICE = "MIG-00000000-0000-0000-0000-00000000000a"


def test_where_a_slice_was_is_known_though_it_is_first_held_long_after(inventory):
    sliced = msgspec.structs.replace(REAL, gpus=(cut_like(REAL.gpus[0], SLICE), REAL.gpus[1]))
    for node in (sliced, REAL, REAL):
        inventory.apply(offered(node, mig_strategy="mixed"), NONE, 0)
    for now in (SETTLE, 2 * SETTLE):
        inventory.settle(NONE, now)
    assert told(inventory) == {GPU: UUIDS}
    inventory.settle(frozenset({("example.com/slice", SLICE)}), 3 * SETTLE)
    assert told(inventory)[GPU] == [f"{UUIDS[0]}!", UUIDS[1]]


@pytest.mark.parametrize(
    ("first", "then", "withheld"),
    [
        pytest.param(REAL, REAL, UUIDS, id="nobody knows where it was"),
        pytest.param(
            msgspec.structs.replace(REAL, gpus=(cut_like(REAL.gpus[0], SLICE), REAL.gpus[1])),
            REAL,
            UUIDS[:1],
            id="it was on the first one, which is whole again",
        ),
    ],
)
def test_a_slice_held_under_a_foreign_name_keeps_its_gpu_back(inventory, first, then, withheld):
    allocated = frozenset({("example.com/slice", SLICE)})
    inventory.apply(offered(first, mig_strategy="mixed"), allocated, 0)
    inventory.apply(offered(then, mig_strategy="mixed"), allocated, 1)
    assert told(inventory)[GPU] == [uuid + "!" * (uuid in withheld) for uuid in UUIDS]
    inventory.settle(NONE, 1 + SETTLE)
    assert told(inventory)[GPU] == UUIDS


def test_a_slice_of_a_gpu_that_is_not_served_is_nothing_to_the_others(inventory):
    node = Node((cut_like(REAL.gpus[0], SLICE), REAL.gpus[1]))
    settings = {"mig_strategy": "mixed", "exclude_gpus": (UUIDS[0],)}
    inventory.apply(offered(node, **settings), frozenset({("example.com/slice", SLICE)}), 0)
    assert told(inventory) == {GPU: [UUIDS[1]]}
    assert not inventory.leaving


def test_a_slice_held_under_a_foreign_name_leaves_those_beside_it(inventory):
    other = SLICE[:-1] + "b"
    node = Node((cut_like(REAL.gpus[0], SLICE, other), REAL.gpus[1]))
    inventory.apply(offered(node, mig_strategy="mixed"), frozenset({("example.com/slice", SLICE)}), 0)
    assert told(inventory)["nvidia.com/mig-1g.10gb"] == [f"{SLICE}!", other]


def test_what_is_gone_is_unhealthy_even_if_nothing_new_can_be_offered(inventory):
    whole, first = NODE.gpus
    before = offered(Node((cut(whole, "x", "y"), first)), mig_strategy="mixed")
    inventory.apply(before, None, 0)
    inventory.apply(without_gone(before, Node((cut(whole, "y"), first))), None, 1)
    assert told(inventory) == {"nvidia.com/mig-1g.10gb": ["MIG-x!", "MIG-y"], GPU: ["GPU-b"]}


def all_on(at, count=50_000, name=GPU):
    """GPU number `at` in `count` replicas, and the other GPU as a whole."""
    choice = msgspec.structs.replace(SharedResource("", "", 2).devices, listed=(str(at),))
    return offered(REAL, sharing=(SharedResource(GPU, name, count, devices=choice),))


def planned(inventory):
    """How many devices are listed that are not retired, after a check that the kubelet reads the list."""
    listed = {name: view.resource for name, view in inventory.store.current.resources.items()}
    assert all(list_bytes(resource) <= MAX_LIST_BYTES for resource in listed.values())
    return sum(not device.retired for device in listed[GPU].devices)


def test_a_list_that_is_too_long_for_a_moment_takes_in_new_devices_as_former_ones_leave(inventory):
    inventory.apply(all_on(0), NONE, 0)
    inventory.apply(all_on(1), None, 1)
    first = planned(inventory)
    assert 15_000 < first < 20_000
    assert inventory.judged.waiting == {GPU: 50_001 - first}
    held = frozenset((GPU, f"{UUIDS[0]}::{number}") for number in range(20_000))
    answer(inventory, 1, SETTLE, listed=held)
    assert planned(inventory) == first, "no former device has left the list yet"
    answer(inventory, 1, 1 + SETTLE, listed=held)
    assert first < planned(inventory) < 50_001
    answer(inventory, 2, 2 + SETTLE)
    assert planned(inventory) == 50_001
    assert inventory.judged.waiting == {}


def test_an_offer_that_was_judged_on_a_thread_stays_in_force(inventory):
    inventory.apply(offered(), NONE, 0)
    standing = inventory.considered(offered(Node((Gpu("GPU-a", 0),))), NONE, 1)
    assert inventory.take(judge(standing), standing)
    answer(inventory, 1, 2 + SETTLE)
    answer(inventory, 2, 3 + SETTLE)
    assert told(inventory) == {GPU: ["GPU-a"]}


@pytest.mark.parametrize("meanwhile", ["nothing", "health"])
def test_a_gpu_that_waits_for_room_is_listed_with_the_health_of_the_moment(inventory, sick, meanwhile):
    """No device of it is listed, so its health changes nothing that is published while the list is made on a thread."""
    inventory.apply(all_on(0, 50_000), NONE, 0)
    inventory.apply(all_on(1, 50_000), None, 1)
    uuid = "GPU-00000002-0000-0000-0000-000000000000"
    three = Node((*REAL.gpus, Gpu(uuid, 2)))
    choice = msgspec.structs.replace(SharedResource("", "", 2).devices, listed=("1",))
    sharing = (SharedResource(GPU, GPU, 50_000, devices=choice),)
    inventory.apply(offered(three, sharing=sharing), None, 2)
    assert inventory.store.current.resources[GPU].device(uuid) is None
    standing = inventory.standing(NONE, 2 + SETTLE)
    judged = judge(standing)
    assert {device.id: device.healthy for device in judged.views[GPU].resource.devices}[uuid]
    if meanwhile == "health":
        sick[uuid] = "Xid 79"
        inventory.health_changed(uuid)
    assert inventory.take(judged, standing) is (meanwhile == "nothing")


@pytest.mark.parametrize("witness", ["checkpoint", "PodResources", "both"])
def test_a_former_process_with_other_devices_keeps_no_resource_from_being_served(inventory, witness):
    inventory.remember(all_on(0).plan.resources)
    held = frozenset({(GPU, f"{UUIDS[1]}::49999")})
    listed, allocated = NONE if witness == "checkpoint" else held, None if witness == "PodResources" else held
    inventory.record_holders(listed, allocated, None if allocated is None else 1, 0)
    inventory.apply(all_on(1), allocated, 0, listed)
    assert 15_000 < planned(inventory) < 50_001
    assert inventory.store.current.resources[GPU].device(f"{UUIDS[1]}::49999"), "a pod holds it"
    for writing in (1, 2, 3):
        answer(inventory, writing, SETTLE + writing, listed=held)
    assert planned(inventory) == 50_001


def test_more_remembered_devices_than_a_list_takes_keep_their_hardware_back_until_no_pod_holds_them(inventory):
    devices = all_on(0, 20_000).plan.resources[0].devices
    many = [msgspec.structs.replace(d, id=f"{d.id}::{n}") for n in range(4) for d in devices if d.gpu == UUIDS[0]]
    inventory.remember([Resource(GPU, tuple(many))])
    inventory.apply(offered(REAL), None, 0)
    assert planned(inventory) <= 2
    assert len(inventory.listed[0].devices) - planned(inventory) + len(inventory.judged.foreign) == len(many)
    assert not any(device.healthy and device.gpu == UUIDS[0] for device in inventory.listed[0].devices)
    for writing in (1, 2):
        answer(inventory, writing, SETTLE + writing)
    assert told(inventory) == {GPU: UUIDS}


def test_more_held_devices_than_a_list_takes_keep_their_hardware_back_until_no_pod_holds_them(inventory):
    held = frozenset((GPU, f"{UUIDS[0]}::{number}") for number in range(80_000))
    for now in (0, 1):
        inventory.apply(offered(REAL), held, now)
        assert planned(inventory) <= 2
        assert len(inventory.listed[0].devices) - planned(inventory) + len(inventory.judged.foreign) == len(held)
        assert not any(device.healthy and device.gpu == UUIDS[0] for device in inventory.listed[0].devices)
    inventory.settle(NONE, 1 + SETTLE)
    assert told(inventory) == {GPU: UUIDS}


def by_count(count, name=GPU):
    return offered(Node((Gpu("GPU-a", 0),)), sharing=(SharedResource(GPU, name, count),))


def numbers(*which):
    return frozenset((GPU, f"GPU-a::{number}") for number in which)


def unhealthy(inventory, name=GPU):
    """Numbers of the replicas that are still planned and unhealthy."""
    devices = inventory.store.current.resources[name].resource.devices
    return {int(device.id[-1]) for device in devices if not device.healthy and not device.retired}


def answer(inventory, writing, asked, *, listed=NONE, written=NONE):
    """Record an answer of the kubelet and settle the list. `writing` None: its checkpoint cannot be read."""
    allocated = None if writing is None else listed | written
    inventory.record_holders(listed, allocated, writing, asked)
    inventory.settle(listed | written, asked, listed)


def test_after_a_restart_with_fewer_replicas_none_is_given_out_until_the_free_one_is_known(inventory):
    held = numbers(1, 2, 3)
    inventory.remember(by_count(4).plan.resources)
    inventory.record_holders(held, held, 1, 0)
    inventory.apply(by_count(3), held, 0, held)
    assert unhealthy(inventory) == {0, 1, 2}, "::0 may have been given to a pod at the last moment"
    answer(inventory, 1, 2 * ENTERED, listed=held)
    assert unhealthy(inventory) == {0, 1, 2}
    assert inventory.store.recent.begun(inventory.judged.awaited) == numbers(0), "only another writing is missing"
    answer(inventory, 2, 3 * ENTERED, listed=held)
    assert unhealthy(inventory) == {0}


def test_what_the_former_daemon_gave_away_until_its_end_is_withheld_until_the_kubelet_has_written_it(inventory):
    held = numbers(1, 2, 3)
    inventory.remember(by_count(4).plan.resources)
    inventory.record_holders(held, held, 1, 0)
    inventory.apply(by_count(3), held, 0, held)
    answer(inventory, 1, 2 * ENTERED, listed=held)
    inventory.former_ended(2.5 * ENTERED)
    answer(inventory, 2, 3 * ENTERED, listed=held)
    assert unhealthy(inventory) == {0, 1, 2}, "::0 may have been given to a pod by the former daemon"
    answer(inventory, 2, 4 * ENTERED, listed=held)
    answer(inventory, 3, 5 * ENTERED, listed=held)
    assert unhealthy(inventory) == {0}


def test_a_live_change_to_fewer_replicas_goes_by_what_pods_held_when_the_kubelet_was_last_asked(inventory):
    inventory.apply(by_count(4), NONE, 0)
    answer(inventory, 1, 1, listed=numbers(1, 2, 3))
    inventory.apply(by_count(3), None, 2)
    assert unhealthy(inventory) == {0}, "pods have ::1, ::2 and ::3"


def test_a_live_rename_to_fewer_replicas_gives_out_what_no_pod_has_once_the_kubelet_says_so(inventory):
    shared = "nvidia.com/gpu.shared"
    inventory.apply(by_count(4), NONE, 0)
    answer(inventory, 1, 1, listed=numbers(1))
    inventory.apply(by_count(3, shared), None, 2)
    assert unhealthy(inventory, shared) == {0, 1, 2}
    answer(inventory, 2, 3, listed=numbers(1))
    assert unhealthy(inventory, shared) == {2}


def test_a_device_that_was_given_out_since_is_not_free_in_a_live_change(inventory):
    inventory.apply(by_count(4), NONE, 0)
    answer(inventory, 1, 1, listed=numbers(3))
    inventory.store.recent.note(GPU, ["GPU-a::2", "GPU-a::1"], 2)
    inventory.apply(by_count(3), None, 3)
    assert unhealthy(inventory) == {0}


def test_what_pod_resources_lists_is_held_though_the_checkpoint_cannot_be_read(inventory):
    inventory.apply(by_count(4), NONE, 0)
    answer(inventory, 1, 1)
    inventory.store.recent.note(GPU, ["GPU-a::0", "GPU-a::2", "GPU-a::3"], 2)
    answer(inventory, None, 3, listed=numbers(0, 2, 3))
    inventory.apply(by_count(3), None, 4)
    assert unhealthy(inventory) == {1}
    answer(inventory, None, 5, listed=numbers(2, 3))
    assert unhealthy(inventory) == {1}, "PodResources does not list plain init containers, so ::0 may be held"


def test_without_any_answer_of_the_kubelet_no_replica_is_given_out_beside_a_former_one(inventory):
    inventory.apply(by_count(4), None, 0)
    inventory.apply(by_count(3), None, 1)
    assert unhealthy(inventory) == {0, 1, 2}


def test_a_former_process_shared_by_mps_and_this_one_by_time(inventory):
    by_mps = offered(Node((Gpu("GPU-a", 0),)), sharing=(SharedResource(GPU, GPU, 4, MPS),))
    held = numbers(1, 2, 3)
    inventory.remember(by_mps.plan.resources)
    inventory.record_holders(held, held, 1, 0)
    inventory.apply(by_count(3), held, 0, held)
    assert unhealthy(inventory) == {0, 1, 2}


@pytest.mark.parametrize(("before", "after", "held"), [(1, 3, "GPU-a"), (3, 1, "GPU-a::1")])
def test_one_pod_that_has_a_gpu_for_itself_keeps_all_replicas_back_and_one_replica_the_whole(
    inventory, before, after, held
):
    def given_out(count):
        return by_count(count) if count > 1 else offered(Node((Gpu("GPU-a", 0),)))

    inventory.apply(given_out(before), NONE, 0)
    answer(inventory, 1, 1, listed=frozenset({(GPU, held)}))
    for step in range(3):
        inventory.apply(given_out(after), None, 2 + step)
        devices = [d for d in inventory.store.current.resources[GPU].resource.devices if not d.retired]
        assert len(devices) == after
        assert not any(device.healthy for device in devices)


def test_a_gpu_that_is_gone_and_comes_back_to_fewer_replicas_keeps_count(inventory):
    held = numbers(1, 2, 3)
    inventory.apply(by_count(4), NONE, 0)
    answer(inventory, 1, 1, listed=held)
    inventory.apply(offered(Node()), None, 2)
    answer(inventory, 2, 2 + SETTLE, listed=held)
    assert told(inventory) == {GPU: ["GPU-a::1!", "GPU-a::2!", "GPU-a::3!"]}
    inventory.apply(by_count(3), None, 10)
    assert unhealthy(inventory) == {0}


@pytest.mark.parametrize(("given", "taken"), [(0, True), (2, False)])
def test_a_list_made_on_a_thread_is_dropped_if_a_replica_that_counted_as_free_was_given_out_meanwhile(
    inventory, given, taken
):
    inventory.apply(by_count(4), NONE, 0)
    answer(inventory, 1, 1, listed=numbers(3))
    inventory.apply(by_count(3), None, 2)
    standing = inventory.standing(numbers(3), 3)
    judged = judge(standing)
    assert judged.retirement.back == numbers(2)
    inventory.store.recent.note(GPU, [f"GPU-a::{given}"], 4)
    assert inventory.take(judged, standing) is taken


def test_a_long_allocate_on_another_thread_is_seen_by_the_list_that_is_being_made(inventory, monkeypatch):
    """The thread notes ::2 and finds the former list, in which it is healthy, after the new one was judged."""
    inventory.apply(by_count(4), NONE, 0)
    answer(inventory, 1, 1, listed=numbers(3))
    judged = []

    def interrupted(standing):
        judged.append(judge(standing))
        if len(judged) == 1:
            inventory.store.recent.note(GPU, ["GPU-a::2"], 2)
        return judged[-1]

    monkeypatch.setattr(inventory_module, "judge", interrupted)
    inventory.apply(by_count(3), None, 2)
    assert unhealthy(inventory) == {1}
    assert len(judged) == 2


ODD = [f"{UUIDS[0]}::{'0' * 300}", f"{UUIDS[0]}::{'0' * (62 - len(UUIDS[0]))}", f"{UUIDS[0]}::\n", f"{UUIDS[0]}::é"]


@pytest.mark.parametrize("identifier", ODD, ids=["300 characters", "64 characters", "not printable", "not ASCII"])
@pytest.mark.parametrize("known", [True, False])
def test_a_held_device_that_cannot_be_listed_keeps_its_hardware_back_and_nothing_else(inventory, identifier, known):
    held = frozenset({(GPU, identifier)})
    for now in (0, 1):
        inventory.apply(offered(REAL), held, now, held if known else NONE)
        assert told(inventory) == {GPU: [f"{UUIDS[0]}!", UUIDS[1]]}
        inventory.apply(offered(REAL), None, now)
        assert told(inventory) == {GPU: [f"{UUIDS[0]}!", UUIDS[1]]}
    reason = inventory.store.current.resources[GPU].resource.devices[0].reason
    assert len(reason) < 130
    assert reason.isascii()
    assert reason.isprintable()
    assert inventory.judged.asked == {(GPU, identifier): 0}
    inventory.settle(NONE, 2)
    assert told(inventory) == {GPU: UUIDS}


@pytest.mark.parametrize("identifier", ["", "::", "GPU-", f"{UUIDS[0]}", "x" * 300])
def test_a_held_id_that_names_no_hardware_changes_nothing(inventory, identifier):
    inventory.apply(offered(REAL), frozenset({(GPU, identifier), ("", identifier), ("no name", UUIDS[0])}), 0)
    assert told(inventory) == {GPU: UUIDS}


def test_a_replica_that_cannot_be_listed_takes_the_place_of_one_that_no_pod_has(inventory):
    node = Node((Gpu(UUIDS[0], 0),))
    held = frozenset({(GPU, ODD[0]), (GPU, f"{UUIDS[0]}::1")})
    inventory.record_holders(held, held, 1, 0)
    inventory.apply(offered(node, sharing=(SharedResource(GPU, GPU, 2),)), held, 0)
    assert told(inventory) == {GPU: [f"{UUIDS[0]}::0!", f"{UUIDS[0]}::1"]}


def test_an_offer_of_nothing_is_published_too(inventory):
    inventory.apply(offered(exclude_gpus=("GPU-a", "GPU-b")), None, 0)
    assert (inventory.unpublished, told(inventory)) == (False, {})


def test_health_before_the_first_offer_publishes_nothing(inventory):
    inventory.remember([Resource(GPU, (Device("GPU-z", "GPU-z", "GPU-z", "7"),))])
    inventory.health_changed("GPU-a")
    assert inventory.unpublished
    assert inventory.listed[0].devices[0].id == "GPU-z"


def by_mps(replicas=2, root="/run/mps"):
    return offered(sharing=(SharedResource(GPU, GPU, replicas, MPS),), mps_root=root)


@pytest.mark.parametrize("asked_now", [{"replicas": 3}, {"root": "/run/elsewhere"}])
def test_a_daemon_of_other_replicas_or_another_root_is_not_taken_for_the_one_that_is_asked_for(inventory, asked_now):
    inventory.apply(by_mps(), None, 0)
    (seen,) = inventory.mps_resources
    inventory.mps_changed(seen, "")
    inventory.apply(by_mps(), None, 1)
    assert told(inventory)[GPU][0] == "GPU-a::0"
    inventory.apply(by_mps(**asked_now), None, 2)
    assert not inventory.mps_changed(seen, "")  # a look that began before
    assert {device.reason for device in inventory.store.current.resources[GPU].resource.devices} == {MPS_UNKNOWN}


def test_a_pair_of_resources_that_envvar_cannot_serve_together_is_warned_of_when_it_appears():
    sliced = Node((NODE.gpus[0], cut(NODE.gpus[1], "x")))
    assert offered(NODE, mig_strategy="mixed").warnings == ()
    [sentence] = offered(sliced, mig_strategy="mixed").warnings
    assert f"two of {GPU}, nvidia.com/mig-1g.10gb " in sentence
    assert offered(sliced, mig_strategy="mixed", device_list_strategy=("cdi-cri",)).warnings == ()
    asked = offered(NODE, gds_enabled=True).warnings
    assert [warning.split()[0] for warning in asked] == ["--gds-enabled"]


# CDI


def ready(**nodes):
    """What written specifications have: GPU_a=("/dev/nvidia0",) is the device GPU-a with that node."""
    by_name = {name.replace("_", "-").removeprefix("-"): frozenset(paths) for name, paths in nodes.items()}
    return CdiReadiness(by_name, "")


def by_cdi(node=NODE, **settings):
    return offered(node, device_list_strategy=("cdi-cri",), **settings)


def test_no_device_is_healthy_before_a_specification_names_it(inventory):
    inventory.apply(by_cdi(), None, 0)
    assert told(inventory) == {GPU: ["GPU-a!", "GPU-b!"]}
    inventory.cdi_changed(ready(GPU_a=()))
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b!"]}
    inventory.cdi_changed(CdiReadiness({}, "the disk is full"))
    assert {d.reason for d in inventory.store.current.resources[GPU].resource.devices} == {"the disk is full"}
    inventory.cdi_changed(ready(GPU_a=(), GPU_b=()))
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b"]}


def test_what_an_earlier_process_left_counts_from_the_first_offer(inventory):
    inventory.cdi_changed(ready(GPU_a=(), GPU_b=()))
    assert inventory.unpublished
    inventory.apply(by_cdi(), None, 0)
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b"]}


def test_health_and_cdi_each_keep_a_device_back(inventory, sick):
    sick["GPU-a"] = "Xid 79"
    inventory.cdi_changed(ready(GPU_a=(), GPU_b=()))
    inventory.apply(by_cdi(), None, 0)
    assert told(inventory) == {GPU: ["GPU-a!", "GPU-b"]}
    inventory.cdi_changed(CdiReadiness())
    sick.clear()
    inventory.health_changed("GPU-a")
    assert told(inventory) == {GPU: ["GPU-a!", "GPU-b!"]}


def test_under_envvar_no_specification_matters(inventory):
    inventory.apply(offered(), None, 0)
    version = inventory.store.current.version
    inventory.cdi_changed(CdiReadiness({}, "the disk is full"))
    assert inventory.store.current.version == version
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b"]}


def test_a_change_of_the_strategy_takes_devices_out_until_specifications_name_them_and_back(inventory):
    inventory.apply(offered(), None, 0)
    inventory.apply(by_cdi(), None, 1)
    assert told(inventory) == {GPU: ["GPU-a!", "GPU-b!"]}
    inventory.apply(offered(), None, 2)
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b"]}
    inventory.apply(by_cdi(), None, 3)
    inventory.cdi_changed(ready(GPU_a=(), GPU_b=()))
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b"]}


def sliced(*caps):
    """A GPU whose slices MIG-x0, MIG-x1 have these capabilities, so that index 0:0 is another slice's after a partition."""
    gpu = Gpu("GPU-a", 0, minor=0, mig_enabled=True)
    slices = (
        MigDevice(f"MIG-{cap}", at, 7 + at, 0, "1g.10gb", gpu_instance_cap=cap, compute_instance_cap=cap + 1)
        for at, cap in enumerate(caps)
    )
    return Node((msgspec.structs.replace(gpu, mig_devices=tuple(slices)),))


def slice_nodes(cap):
    return ("/dev/nvidia0", f"/dev/nvidia-caps/nvidia-cap{cap}", f"/dev/nvidia-caps/nvidia-cap{cap + 1}")


@pytest.mark.parametrize("strategy", ["uuid", "index"])
def test_a_new_slice_waits_for_its_specification_though_an_older_one_had_its_index(inventory, strategy):
    def settings(node):
        return by_cdi(node, mig_strategy="single", device_id_strategy=strategy)

    first = {"MIG_30": slice_nodes(30), "_0:0": slice_nodes(30), "MIG_60": slice_nodes(60), "_0:1": slice_nodes(60)}
    inventory.cdi_changed(ready(**first))
    inventory.apply(settings(sliced(30, 60)), None, 0)
    assert told(inventory) == {GPU: ["MIG-30", "MIG-60"]}
    inventory.apply(settings(sliced(30, 90)), None, 1)  # MIG-30 is a running pod's and stays as it was
    assert told(inventory) == {GPU: ["MIG-30", "MIG-90!", "MIG-60!"]}
    inventory.cdi_changed(ready(**(first | {"MIG_90": slice_nodes(90), "_0:1": slice_nodes(90)})))
    assert told(inventory) == {GPU: ["MIG-30", "MIG-90", "MIG-60!"]}  # a retired device stays retired


def test_a_gpu_whose_index_was_another_ones_waits_for_its_specification(inventory):
    inventory.cdi_changed(ready(_0=("/dev/nvidia0",), _1=("/dev/nvidia1",)))
    left = Node((Gpu("GPU-b", 0, minor=1),))
    inventory.apply(by_cdi(left, device_id_strategy="index"), None, 0)
    assert told(inventory) == {GPU: ["GPU-b!"]}
    inventory.cdi_changed(ready(_0=("/dev/nvidiactl", "/dev/nvidia1")))
    assert told(inventory) == {GPU: ["GPU-b"]}


def test_replicas_go_by_the_name_of_their_hardware(inventory):
    inventory.apply(by_cdi(sharing=(SharedResource(GPU, GPU, 2),)), None, 0)
    inventory.cdi_changed(ready(GPU_a=()))
    assert told(inventory) == {GPU: ["GPU-a::0", "GPU-a::1", "GPU-b::0!", "GPU-b::1!"]}


def test_a_device_of_another_class_that_containers_get_too_must_be_named_as_well(inventory):
    node = msgspec.structs.replace(
        NODE, device_nodes=frozenset({"/dev/gdrdrv", "/dev/nvidia-caps-imex-channels/channel0"})
    )
    inventory.apply(by_cdi(node, gdrcopy_enabled=True, imex_channel_ids=(0,)), None, 0)
    gpus = ready(GPU_a=(), GPU_b=())
    channel, gdrcopy = "k8s.device-plugin.nvidia.com/imex-channel=0", "k8s.device-plugin.nvidia.com/gdrcopy=all"
    inventory.cdi_changed(msgspec.structs.replace(gpus, others=frozenset({channel})))
    reasons = {device.reason for device in inventory.store.current.resources[GPU].resource.devices}
    assert reasons == {f"no written CDI specification has {gdrcopy}"}
    inventory.cdi_changed(msgspec.structs.replace(gpus, others=frozenset({channel, gdrcopy})))
    assert told(inventory) == {GPU: ["GPU-a", "GPU-b"]}


def test_what_keeps_healthy_gpus_from_pods_is_told_once_each(inventory, sick):
    inventory.apply(by_cdi(), None, 0)
    inventory.cdi_changed(CdiReadiness({}, "the disk is full"))
    sick["GPU-b"] = "Xid 79"
    inventory.health_changed("GPU-b")
    assert inventory.withheld() == {"GPU-a": ("the disk is full",)}  # the health of the other GPU says why
    inventory.cdi_changed(ready(GPU_a=(), GPU_b=()))
    assert inventory.withheld() == {}


def test_the_health_of_hardware_is_asked_for_once_however_many_replicas_it_has():
    asked = []

    def health(_gpu, visible):
        asked.append(visible)
        return Health()

    inventory = Inventory(SnapshotStore(), health)
    inventory.apply(by_cdi(sharing=(SharedResource(GPU, GPU, 100),)), None, 0)
    inventory.cdi_changed(CdiReadiness({}, "the disk is full"))
    asked.clear()
    assert inventory.withheld() == dict.fromkeys(("GPU-a", "GPU-b"), ("the disk is full",))
    assert sorted(asked) == ["GPU-a", "GPU-b"]


def test_what_is_held_against_hardware_is_published_before_any_offer_and_for_each_mig_device():
    against = {"GPU-0": Health(reason="too hot"), "MIG-b": Health(reason="Xid 94")}
    inventory = Inventory(SnapshotStore(), lambda _gpu, own: against.get(own, Health()))
    slices = tuple(MigDevice(f"MIG-{name}", at, at + 1, 0, "1g.10gb") for at, name in enumerate("ab"))
    inventory.found([Gpu("GPU-0", 0), Gpu("GPU-1", 1, mig_enabled=True, mig_devices=slices)])
    told = {own: (each.gpu, each.index, each.health.reason) for own, each in inventory.store.current.hardware.items()}
    assert told == {
        "GPU-0": ("GPU-0", "0", "too hot"),
        "GPU-1": ("GPU-1", "1", ""),
        "MIG-a": ("GPU-1", "1:0", ""),
        "MIG-b": ("GPU-1", "1:1", "Xid 94"),
    }
    assert inventory.unpublished
    before = inventory.store.current
    del against["GPU-0"], against["MIG-b"]
    against["MIG-a"] = Health(reason="Xid 95")
    inventory.health_changed("GPU-1")
    reasons = {own: each.health.reason for own, each in inventory.store.current.hardware.items()}
    assert reasons == {"GPU-0": "too hot", "GPU-1": "", "MIG-a": "Xid 95", "MIG-b": ""}
    assert inventory.store.current.resources is before.resources
