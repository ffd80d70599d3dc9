import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_plugin.config.resolve import resolve
from gpu_plugin.devices.naming import MAX_DEVICE_ID, resource_name_fault
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.devices.plan import GPU_RESOURCE, plan, served

DEFAULTS = resolve({}, {})
UUID = "GPU-2985e854-40cd-f248-81fa-d0a07042f66d"


def devices(*gpus, mig_strategy="none"):
    """The planned devices of the one resource there is."""
    [resource] = plan(Node(gpus), dataclasses.replace(DEFAULTS, mig_strategy=mig_strategy))
    assert resource.name == GPU_RESOURCE
    return resource.devices


def test_a_gpu_is_a_device_under_its_own_uuid():
    [device] = devices(Gpu(uuid=UUID, index=3, minor=5, numa_node=1))
    assert (device.id, device.gpu, device.visible_id) == (UUID, UUID, UUID)
    assert (device.index, device.nodes, device.numa) == ("3", ("/dev/nvidia5",), (1,))
    assert device.healthy


def test_the_resource_is_one_that_kubelets_take():
    assert resource_name_fault(GPU_RESOURCE) == ""


def test_a_node_without_gpus_has_the_resource_with_no_device():
    assert devices() == ()


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


@pytest.mark.parametrize(("numa_node", "numa"), [(None, ()), (-1, ()), (0, (0,)), (7, (7,))])
def test_a_numa_node_that_is_known_is_told(numa_node, numa):
    [device] = devices(Gpu(uuid=UUID, index=0, numa_node=numa_node))
    assert device.numa == numa


def test_a_gpu_without_a_minor_number_has_no_device_node():
    [device] = devices(Gpu(uuid=UUID, index=0, minor=None))
    assert device.nodes == ()


def test_minor_number_zero_is_a_device_node():
    [device] = devices(Gpu(uuid=UUID, index=1, minor=0))
    assert device.nodes == ("/dev/nvidia0",)


def test_a_gpu_in_mig_mode_is_a_whole_gpu_where_mig_is_not_asked_for():
    [device] = devices(Gpu(uuid=UUID, index=0, mig_enabled=True), mig_strategy="none")
    assert device.healthy


@pytest.mark.parametrize("strategy", ["single", "mixed"])
def test_a_gpu_in_mig_mode_is_listed_and_held_back_where_mig_is_asked_for(strategy):
    sliced, whole = devices(
        Gpu(uuid="GPU-a", index=0, mig_enabled=True), Gpu(uuid="GPU-b", index=1), mig_strategy=strategy
    )
    assert sliced.reason == f"the GPU is in MIG mode and MIG strategy {strategy} is not served by this version"
    assert not sliced.healthy
    assert whole.healthy


def test_a_gpu_that_cannot_be_read_is_listed_with_the_reason_and_hides_no_other():
    lost, fine = devices(Gpu(uuid="GPU-a", index=0, unreadable="the GPU is lost"), Gpu(uuid="GPU-b", index=1))
    assert (lost.reason, lost.healthy) == ("the GPU is lost", False)
    assert fine.healthy


def test_a_gpu_that_cannot_be_read_is_so_before_it_is_in_mig_mode():
    gpu = Gpu(uuid=UUID, index=0, mig_enabled=True, unreadable="no answer")
    assert [d.reason for d in devices(gpu, mig_strategy="single")] == ["no answer"]


@given(st.uuids().map("GPU-{}".format) | st.integers(0, 255).map("GPU-unreadable-{}".format))
@settings(max_examples=30, deadline=None)
def test_a_device_id_is_no_longer_than_the_api_allows(uuid):
    [device] = devices(Gpu(uuid=uuid, index=0))
    assert 0 < len(device.id) <= MAX_DEVICE_ID == 63
