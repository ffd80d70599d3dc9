from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.sharing import DeviceChoice, NamePattern, SharedResource
from gpu_plugin.devices.device import Resource
from gpu_plugin.devices.node import Gpu, MigDevice, Node
from gpu_plugin.devices.plan import GPU_RESOURCE, list_bytes, plan, served
from gpu_plugin.kubelet import wire

DEFAULTS = resolve({}, {})
UUID = "GPU-2985e854-40cd-f248-81fa-d0a07042f66d"


def devices(*gpus, mig_strategy="none"):
    """The planned devices of the one resource there is."""
    [resource] = plan(Node(gpus), msgspec.structs.replace(DEFAULTS, mig_strategy=mig_strategy)).resources
    assert resource.name == GPU_RESOURCE
    return resource.devices


def planned(*gpus, **settings):
    """Device ids by resource, and the warnings."""
    made = plan(Node(gpus), msgspec.structs.replace(DEFAULTS, **settings))
    return {r.name: [d.id for d in r.devices] for r in made.resources}, list(made.warnings)


def cut(name, index, *profiles, **more):
    """A GPU in MIG mode with slices of these profiles."""
    slices = tuple(
        MigDevice(
            f"MIG-{name}{n}",
            n,
            7 + n,
            0,
            profile,
            whole="c." not in profile,
            gpu_instance_cap=30 + n,
            compute_instance_cap=60 + n,
        )
        for n, profile in enumerate(profiles)
    )
    return Gpu(uuid=f"GPU-{name}", index=index, minor=index, mig_enabled=True, mig_devices=slices, **more)


def test_a_gpu_is_a_device_under_its_own_uuid():
    [device] = devices(Gpu(uuid=UUID, index=3, minor=5, numa_node=1))
    assert (device.id, device.gpu, device.visible_id) == (UUID, UUID, UUID)
    assert (device.index, device.nodes, device.numa) == ("3", ("/dev/nvidia5",), (1,))
    assert device.healthy


def test_a_node_without_gpus_has_no_resource():
    assert planned() == ({}, [])


@given(st.permutations(range(12)))
@settings(max_examples=20, deadline=None)
def test_devices_are_in_the_order_of_their_indices_however_they_were_found(found):
    gpus = [Gpu(uuid=f"GPU-{(7 * index) % 12:02}", index=index) for index in found]
    assert [device.index for device in devices(*gpus)] == [str(index) for index in range(12)]


def test_gpus_of_one_index_are_in_the_order_of_their_uuids():
    one, other = Gpu(uuid="GPU-b", index=0), Gpu(uuid="GPU-a", index=0)
    assert devices(one, other) == devices(other, one)
    assert [device.id for device in devices(one, other)] == ["GPU-a", "GPU-b"]


@pytest.mark.parametrize("model", ["DGX Display", "NVIDIA DGX Display"])
def test_the_display_of_a_dgx_station_is_left_out(model):
    display = Gpu(uuid="GPU-d", index=1, model=model)
    assert not served(display)
    found = devices(Gpu(uuid="GPU-a", index=0, model="NVIDIA A100"), display, Gpu(uuid="GPU-b", index=2))
    assert [device.id for device in found] == ["GPU-a", "GPU-b"]


@pytest.mark.parametrize(
    ("numa_node", "numa"),
    [(None, ()), (-1, ()), (0, (0,)), (7, (7,)), (2**31 - 1, (2**31 - 1,)), (2**31, ()), (2**200, ())],
)
def test_a_numa_node_that_is_known_is_told(numa_node, numa):
    [device] = devices(Gpu(uuid=UUID, index=0, numa_node=numa_node))
    assert device.numa == numa


def test_a_gpu_in_mig_mode_is_withheld_where_mig_is_not_asked_for_and_hides_no_other():
    found = plan(Node((cut("a", 0, "1g.10gb"), cut("b", 1), Gpu("GPU-c", 2, model="H100"))), DEFAULTS)
    [resource] = found.resources
    assert [device.healthy for device in resource.devices] == [False, False, True]
    [warning] = found.warnings
    assert resource.devices[0].reason in warning
    assert "nvidia-smi -i 0,1 -mig 0" in warning


# MIG


def test_mixed_counts_slices_by_profile_beside_whole_gpus():
    found, warnings = planned(
        cut("a", 0, "3g.20gb", "1g.5gb", "1g.5gb+me", "1c.3g.20gb"),
        Gpu("GPU-b", 1),
        cut("c", 2, "1g.5gb"),
        mig_strategy="mixed",
    )
    assert found == {
        "nvidia.com/mig-3g.20gb": ["MIG-a0"],
        "nvidia.com/mig-1g.5gb": ["MIG-a1", "MIG-c0"],
        "nvidia.com/mig-1g.5gb.me": ["MIG-a2"],
        "nvidia.com/mig-1c.3g.20gb": ["MIG-a3"],  # NVIDIA's plugin ends over this one
        "nvidia.com/gpu": ["GPU-b"],
    }
    assert warnings == []


def test_a_slice_is_reached_through_its_gpu_and_both_capabilities():
    made = plan(Node((cut("a", 3, "1g.10gb", numa_node=1),)), msgspec.structs.replace(DEFAULTS, mig_strategy="mixed"))
    [device] = made.resources[0].devices
    assert (device.id, device.visible_id, device.gpu, device.index) == ("MIG-a0", "MIG-a0", "GPU-a", "3:0")
    assert device.nodes == ("/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap60")
    assert (device.numa, device.kind) == ((1,), "mig")


def test_single_counts_slices_as_gpus():
    found, warnings = planned(cut("a", 0, "1g.10gb", "1g.10gb"), cut("b", 1, "1g.10gb"), mig_strategy="single")
    assert found == {"nvidia.com/gpu": ["MIG-a0", "MIG-a1", "MIG-b0"]}
    assert warnings == []


def test_single_without_mig_counts_gpus():
    assert planned(Gpu("GPU-a", 0), Gpu("GPU-b", 1), mig_strategy="single") == (
        {"nvidia.com/gpu": ["GPU-a", "GPU-b"]},
        [],
    )


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        (
            (cut("a", 0, "1g.10gb"), Gpu("GPU-b", 1)),
            "needs the same MIG mode on all GPUs; MIG mode by GPU index: 0 on, 1 off",
        ),
        ((cut("a", 0, "1g.10gb", "2g.20gb"),), "needs MIG devices of one profile; this node has 1g.10gb, 2g.20gb"),
    ],
)
def test_a_node_that_single_cannot_serve_hands_out_nothing_and_says_why(gpus, why):
    made = plan(Node(gpus), msgspec.structs.replace(DEFAULTS, mig_strategy="single"))
    reasons = [device.reason for resource in made.resources for device in resource.devices]
    assert len(reasons) == 2
    assert all(why in reason for reason in reasons)
    assert len(made.warnings) == 1
    assert why in made.warnings[0]


@pytest.mark.parametrize("strategy", ["single", "mixed"])
def test_a_gpu_in_mig_mode_without_slices_offers_nothing_and_hides_no_other(strategy):
    found, warnings = planned(cut("a", 0), cut("b", 1, "7g.80gb"), mig_strategy=strategy)
    assert list(found.values()) == [["MIG-b0"]]
    [warning] = warnings
    assert warning.startswith("GPU 0 (GPU-a) is in MIG mode and has no MIG devices: nothing of it is offered")
    assert "nvidia-smi -i 0 -mig 0" in warning


def test_a_profile_that_makes_no_resource_name_is_left_out_and_said():
    found, warnings = planned(cut("a", 0, "1g.5gb", "1g.5gb?"), mig_strategy="mixed")
    assert found == {"nvidia.com/mig-1g.5gb": ["MIG-a0"]}
    assert "1 devices are not offered, the first is MIG-a1" in warnings[0]


# Names and selection


def test_gpus_and_slices_are_named_by_the_first_pattern_that_matches():
    found, _ = planned(
        Gpu("GPU-a", 0, model="NVIDIA H100 80GB HBM3"),
        Gpu("GPU-b", 1, model="NVIDIA A100-SXM4-40GB"),
        cut("c", 2, "1g.5gb", "3g.20gb"),
        mig_strategy="mixed",
        gpu_names=(NamePattern("*H100*", "example.com/h100"), NamePattern("*80GB*", "nvidia.com/never")),
        mig_names=(NamePattern("3g.*", "nvidia.com/half"),),
    )
    assert found == {
        "example.com/h100": ["GPU-a"],
        "nvidia.com/gpu": ["GPU-b"],
        "nvidia.com/mig-1g.5gb": ["MIG-c0"],
        "nvidia.com/half": ["MIG-c1"],
    }


def test_excluded_gpus_are_not_there_and_an_item_that_means_none_is_said():
    found, warnings = planned(Gpu("GPU-a", 0), Gpu("GPU-b", 1), exclude_gpus=("0", "GPU-x"))
    assert found == {"nvidia.com/gpu": ["GPU-b"]}
    assert warnings == ["'GPU-x' on the list of GPUs to exclude is none of this node's GPUs"]
    many = tuple(f"GPU-{n}" for n in range(4000))
    assert planned(Gpu("GPU-a", 0), exclude_gpus=many)[1] == [
        "'GPU-0', 'GPU-1', 'GPU-2', 'GPU-3' and 3996 more on the list of GPUs to exclude are none of this node's GPUs"
    ]
    left = "no GPU is served: the lists of GPUs to include and exclude leave none of this node's 1"
    assert planned(Gpu("GPU-a", 0), exclude_gpus=("*",)) == ({}, [left])


@pytest.mark.parametrize("unknown", [{"gpu_instance_cap": None}, {"compute_instance_cap": None}])
def test_a_slice_whose_capability_nodes_are_not_known_is_handed_out_only_where_none_are_passed(unknown):
    known: dict[str, Any] = {"gpu_instance_cap": 21, "compute_instance_cap": 22}
    slices = (
        MigDevice("MIG-0", 0, 7, 0, "1g.5gb", **known),
        MigDevice("MIG-1", 1, 8, 0, "1g.5gb", **{**known, **unknown}),
    )
    gpu = Gpu("GPU-a", 0, mig_enabled=True, mig_devices=slices)
    for passed, held in ((True, ["", "its capability nodes are not known"]), (False, ["", ""])):
        settings = msgspec.structs.replace(DEFAULTS, mig_strategy="mixed", pass_device_specs=passed)
        [resource] = plan(Node((gpu,)), settings).resources
        assert [device.withheld.partition(":")[0] for device in resource.devices] == held
        assert [device.healthy for device in resource.devices] == [not why for why in held]


# Sharing


def shared(name, replicas, *listed, offered_as=None):
    return SharedResource(name, offered_as or name, replicas, devices=DeviceChoice(listed=listed))


def test_slices_are_shared_by_resource_and_may_be_called_by_their_index():
    found, _ = planned(
        cut("a", 0, "1g.5gb", "1g.5gb", "2g.10gb"),
        mig_strategy="mixed",
        sharing=(shared("nvidia.com/mig-1g.5gb", 2, "0:1", offered_as="nvidia.com/mig-1g.5gb.shared"),),
    )
    assert found == {
        "nvidia.com/mig-1g.5gb": ["MIG-a0"],
        "nvidia.com/mig-1g.5gb.shared": ["MIG-a1::0", "MIG-a1::1"],
        "nvidia.com/mig-2g.10gb": ["MIG-a2"],
    }


def test_slices_may_be_called_by_their_legacy_name():
    found, _ = planned(
        cut("a", 0, "1g.5gb", "1g.5gb"), mig_strategy="single", sharing=(shared("nvidia.com/gpu", 2, "MIG-GPU-a/8/0"),)
    )
    assert found == {"nvidia.com/gpu": ["MIG-a0", "MIG-a1::0", "MIG-a1::1"]}


def test_a_list_that_no_kubelet_reads_is_refused():
    asked = msgspec.structs.replace(DEFAULTS, sharing=(shared("nvidia.com/gpu", 80_000),))
    assert len(plan(Node((Gpu("GPU-a", 0),)), asked).resources[0].devices) == 80_000
    with pytest.raises(
        ConfigError, match=r"nvidia\.com/gpu: 160000 devices make a list of at least \d+ bytes and the kubelet reads"
    ):
        plan(Node((Gpu(UUID, 0), Gpu("GPU-b" + UUID[5:], 1))), asked)


@given(st.integers(1, 300), st.sampled_from([(), (0,), (1,), (200,), (0, 1, 127, 128, 70_000)]))
@settings(max_examples=40, deadline=None)
def test_the_length_that_is_judged_is_that_of_the_list_on_the_wire(replicas, numa):
    node = Node((Gpu(UUID, 0),))
    [resource] = plan(node, msgspec.structs.replace(DEFAULTS, sharing=(shared("nvidia.com/gpu", replicas),))).resources
    unhealthy = tuple(msgspec.structs.replace(device, reason="sick", numa=numa) for device in resource.devices)
    assert list_bytes(Resource("nvidia.com/gpu", unhealthy)) == len(wire.ListEncoder().encode(unhealthy))


def test_a_gpu_that_cannot_be_read_is_listed_with_the_reason_and_hides_no_other():
    lost, fine = devices(Gpu(uuid="GPU-a", index=0, unreadable="the GPU is lost"), Gpu(uuid="GPU-b", index=1))
    assert (lost.reason, lost.healthy) == ("the GPU is lost", False)
    assert fine.healthy


def test_the_slices_of_a_gpu_that_cannot_be_read_are_listed_with_the_reason():
    made = plan(
        Node((cut("a", 0, "1g.10gb", unreadable="no answer"), cut("b", 1, "1g.10gb"))),
        msgspec.structs.replace(DEFAULTS, mig_strategy="single"),
    )
    assert [(d.id, d.reason) for d in made.resources[0].devices] == [("MIG-a0", "no answer"), ("MIG-b0", "")]


def test_of_two_devices_with_one_id_the_second_is_left_out_and_said():
    twin = msgspec.structs.replace(cut("a", 1, "1g.10gb"), uuid="GPU-b")
    found, warnings = planned(cut("a", 0, "1g.10gb"), twin, mig_strategy="mixed")
    assert found == {"nvidia.com/mig-1g.10gb": ["MIG-a0"]}
    assert warnings == ["nvidia.com/mig-1g.10gb: two devices claim the id MIG-a0; the second one is not offered"]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("uuid", ["GPU-" + "a" * 58, "GPU-" + "a" * 60, "GPU-" + "a" * 300, "GPU-\n", "GPU-é"])
def test_a_device_whose_id_cannot_be_listed_is_left_out_and_said(uuid, replicas):
    sharing = (shared("nvidia.com/gpu", replicas),) if replicas > 1 else ()
    found, warnings = planned(Gpu(uuid, 0), Gpu(UUID, 1), sharing=sharing)
    fits = len(uuid) == 62 and replicas == 1
    ours = [UUID] if replicas == 1 else [f"{UUID}::0", f"{UUID}::1"]
    assert found == {"nvidia.com/gpu": [*([uuid] if fits else []), *ours]}
    assert len(warnings) == (0 if fits else 1)
    assert all(len(warning) < 250 and warning.isprintable() for warning in warnings)
