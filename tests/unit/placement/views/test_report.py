"""The report of a daemon reaches a command with its topology and its resources."""

import json

import pytest
from hypothesis import given
from msgspec.structs import replace

from gpu_plugin.config.sharing import MPS, TIME_SLICING, SharedResource
from gpu_plugin.devices.device import MIG, Device, Resource
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views.groups import LinkGroups
from gpu_plugin.placement.views.report import Offered, OfferedResource, held_back, left_out, offered, report, reported
from tests.unit.placement.nodes import dgx1, random_nodes


@given(random_nodes())
def test_nothing_that_placement_looks_at_is_lost(made):
    made = Node(
        tuple(replace(gpu, architecture=9) for gpu in made.gpus), made.links, cliques={made.gpus[-1].uuid: "a.1"}
    )
    told, _ = reported(json.loads(json.dumps(report(made, ()))))
    assert Topology.of(told) == Topology.of(made)
    assert LinkGroups.of(told) == LinkGroups.of(made)


def test_gpus_come_by_index_and_every_pair_once():
    made = dgx1()
    told = json.loads(json.dumps(report(Node(tuple(reversed(made.gpus)), made.links), ())))
    assert [gpu["index"] for gpu in told["gpus"]] == list(range(8))
    pairs = [(link["a"], link["b"]) for link in told["links"]]
    assert len(pairs) == len(set(pairs)) == 28
    assert all(a < b for a, b in pairs)


def test_a_later_version_may_say_more():
    told = json.loads(json.dumps(report(dgx1(), ())))
    for each in (*told["gpus"], *told["links"], told):
        each["colour"] = "green"
    assert Topology.of(reported(told)[0]) == Topology.of(dgx1())


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"gpus": []},
        {"gpus": [{"index": 0}], "links": []},
        {"gpus": [], "links": [{"a": 0, "b": 1}]},
        {"gpus": None, "links": None},
        {"gpus": [7], "links": []},
        {"gpus": [], "links": []},
        *(
            {"gpus": [], "links": [], "resources": wrong}
            for wrong in ([7], [{"name": "a"}], None, [{"name": "a", "policy": "b", "hardware": [{}]}])
        ),
    ],
)
def test_what_is_no_report_is_said_to_be_none(reply):
    with pytest.raises(ValueError, match="this is not a report of a topology"):
        reported(reply)


# What is served

NAME = "nvidia.com/gpu"


def through(*resources: tuple[Resource, str]) -> tuple[OfferedResource, ...]:
    """The resources that a command reads from a report."""
    return reported(json.loads(json.dumps(report(Node(), [offered(*each) for each in resources]))))[1]


def replicas(uuid: str, count: int, index: str = "0", how: str = TIME_SLICING, reason: str = "") -> list[Device]:
    sharing = SharedResource(NAME, NAME, count, how)
    return [Device(f"{uuid}::{at}", uuid, uuid, index, reason=reason, sharing=sharing) for at in range(count)]


def gone(identifier: str, uuid: str, index: str = "0") -> Device:
    return Device(identifier, uuid, uuid, index, reason="it is not on this node any more", retired=True)


def test_whole_gpus_mig_devices_and_replicas_come_back_as_they_were():
    slices = [Device(f"MIG-{at}", "GPU-c", f"MIG-{at}", f"2:{at}", kind=MIG) for at in range(3)]
    whole = [Device("GPU-d", "GPU-d", "GPU-d", "3", reason="cordoned"), Device("GPU-e", "GPU-e", "GPU-e", "4")]
    devices = [*replicas("GPU-a", 4), *replicas("GPU-b", 2, "1", MPS, "its MPS daemon is down"), *slices, *whole]
    [told] = through((Resource(NAME, tuple(devices)), "packed"))
    assert (told.name, told.policy, len(told.hardware)) == (NAME, "packed", 7)
    assert [each.name for each in told.hardware[:3]] == ["GPU 0", "GPU 1", "MIG device 2:0"]
    back = told.devices
    assert [(d.id, d.gpu, d.visible_id, d.index, d.reason, d.kind, d.shared, d.replicas, d.retired) for d in back] == [
        (d.id, d.gpu, d.visible_id, d.index, d.reason, d.kind, d.shared, d.replicas, d.retired) for d in devices
    ]


def test_what_is_gone_counts_and_speaks_for_its_hardware_only_where_nothing_else_does():
    fewer = [*replicas("GPU-a", 2), *[gone(f"GPU-a::{at}", "GPU-a") for at in (2, 3)]]
    unshared = [Device("GPU-b", "GPU-b", "GPU-b", "1"), gone("GPU-b::0", "GPU-b", "1")]
    lost = [gone("GPU-c", "GPU-c", "")]
    [told] = through((Resource(NAME, (*fewer, *lost, *unshared)), "spread"))
    assert [(each.listed, each.healthy, each.retired, each.reason, each.ids) for each in told.hardware] == [
        (4, 2, 2, "", ("GPU-a::0", "GPU-a::1")),
        (1, 0, 1, "it is not on this node any more", ()),
        (2, 1, 1, "", ("GPU-b",)),
    ]
    ids = [device.id for device in told.devices]
    assert len(set(ids)) == len(ids) == 7
    assert [device.id for device in told.devices if device.healthy] == ["GPU-a::0", "GPU-a::1", "GPU-b"]


def test_the_same_given_out_more_often():
    [fit, unfit] = [Offered("GPU-a", "GPU-a", "0"), Offered("GPU-b", "GPU-b", "1", healthy=0, reason="cordoned")]
    assert fit.given_out(3).ids == ("GPU-a::0", "GPU-a::1", "GPU-a::2")
    assert (fit.given_out(3).healthy, fit.given_out(3).shared) == (3, TIME_SLICING)
    assert (unfit.given_out(3).healthy, unfit.given_out(3).reason) == (0, "cordoned")
    lost = Offered("GPU-c", "GPU-c", "", healthy=0, retired=1)
    assert lost.given_out(3) is lost


def test_sixteen_gpus_of_seven_mig_devices_each_and_64_gpus_fit_a_reply_together():
    devices = tuple(
        Device(
            f"MIG-{at:036}", f"GPU-{at // 7:036}", f"MIG-{at:036}", f"{at // 7}:{at % 7}", kind=MIG, reason="x" * 200
        )
        for at in range(448)
    )
    gpus = tuple(Gpu(f"GPU-{at:036}", at, model="NVIDIA H100 80GB HBM3") for at in range(64))
    assert (
        len(json.dumps(report(Node(gpus), [offered(Resource(NAME, devices), "packed")]))) < 700_000
    )  # it may have 1 MiB


def words(items: list[Offered]) -> list[tuple[str, str, str, str]]:
    assert not any(each.healthy for each in items)
    return [(each.kind, each.index, each.visible_id, each.reason) for each in items]


def test_what_pods_do_not_get_now():
    node = Node(
        tuple(
            Gpu(
                f"GPU-{letter}",
                at,
                mig_enabled=letter in "de",
                unreadable="it does not answer" if letter == "f" else None,
            )
            for at, letter in enumerate("abcdefg")
        )
    )
    slices = [Offered("GPU-d", f"MIG-{at}", f"3:{at}", MIG, 1, at, reason="" if at else "Xid 94") for at in range(2)]
    whole = OfferedResource(
        NAME,
        "distributed",
        (
            Offered("GPU-a", "GPU-a", "0"),
            Offered("GPU-b", "GPU-b", "1", healthy=0, reason="cordoned"),
            Offered("GPU-x", "GPU-x", "", healthy=0, retired=1, reason="gone"),
        ),
    )
    cut = OfferedResource("nvidia.com/mig-1g", "distributed", tuple(slices))
    cut_too = OfferedResource("nvidia.com/mig-2g", "distributed", tuple(slices))
    others = [
        ("gpu", "2", "GPU-c", "not among the GPUs that are served"),
        ("gpu", "4", "GPU-e", "in MIG mode, and no MIG device of it is served"),
        ("gpu", "5", "GPU-f", "it does not answer"),
        ("gpu", "6", "GPU-g", "not among the GPUs that are served"),
    ]
    cordoned, sick = ("gpu", "1", "GPU-b", "cordoned"), ("mig", "3:0", "MIG-0", "Xid 94")
    assert words(held_back(node, [whole, cut])) == [cordoned, others[0], sick, *others[1:]]
    counted = ("gpu", "3", "GPU-d", "counted as nvidia.com/mig-1g and 1 more")
    lost = ("gpu", "", "GPU-x", "gone")
    all_sick = OfferedResource(
        cut.name, cut.policy, tuple(replace(one, healthy=0, reason="cordoned") for one in slices)
    )
    assert words(held_back(node, [whole, all_sick]))[2] == ("gpu", "3", "GPU-d", "cordoned")
    before = OfferedResource("nvidia.com/old", "packed", (Offered("GPU-c", "GPU-c", "2", healthy=0, retired=1),))
    assert words(left_out(node, [whole, cut, cut_too, before], whole)) == [
        lost,
        cordoned,
        others[0],
        counted,
        *others[1:],
    ]
    assert words(left_out(node, [whole, cut], cut)) == [sick]
