"""GPUs that the node should have: the PCI bus, the memory of the node and the driver's list, compared."""

import pytest
from msgspec.structs import replace

from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.absent import absent_gpus, missing_gpus, named, no_gpu
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.devices.plan import plan

FIRST, SECOND, THIRD = "00000000:1B:00.0", "00000000:3D:00.0", "00000000:4C:00.0"
A, B, C = (
    Gpu(uuid, index, pci_bus_id=bus_id, model="NVIDIA H100")
    for index, (uuid, bus_id) in enumerate((("GPU-a", FIRST), ("GPU-b", SECOND), ("GPU-c", THIRD)))
)
BUS = dict.fromkeys((FIRST, SECOND, THIRD), "nvidia")


def found(bus, before, listed):
    return [(gpu.uuid, gpu.pci_bus_id) for gpu in absent_gpus(bus, before, listed)]


@pytest.mark.parametrize(
    ("bus", "before", "listed", "missing"),
    [
        (BUS, (), (A, B, C), []),
        (BUS, (A, B, C), (A, B, C), []),
        (BUS, (A, B, C), (A, C), [("GPU-b", SECOND)]),
        (BUS, (), (A, C), [("", SECOND)]),
        ({FIRST: "nvidia"}, (A, B), (A,), [("GPU-b", SECOND)]),
        ({}, (A, B), (A,), [("GPU-b", SECOND)]),
        (None, (A, B), (A,), [("GPU-b", SECOND)]),
        (None, (), (A,), []),
        ({}, (), (A,), []),
        (BUS, (A, B), (), [("GPU-a", FIRST), ("GPU-b", SECOND), ("", THIRD)]),
    ],
)
def test_a_gpu_is_missing_that_the_bus_or_the_memory_has_and_the_driver_has_not(bus, before, listed, missing):
    assert found(bus, before, listed) == missing


@pytest.mark.parametrize("driver", ["vfio-pci", "nvgrace_gpu_vfio_pci", "nvidia-vgpu-vfio", "pci-stub"])
def test_a_gpu_that_a_virtual_machine_has_is_not_missing(driver):
    assert found(BUS | {SECOND: driver}, (A, B, C), (A, C)) == []


@pytest.mark.parametrize("driver", ["", "nouveau", "nvidia"])
def test_the_reason_names_the_driver_that_is_bound(driver):
    (gpu,) = absent_gpus(BUS | {SECOND: driver}, (), (A, C))
    assert gpu.unreadable
    assert driver in gpu.unreadable
    assert "0000:3d:00.0" in named(gpu)


def test_a_gpu_that_was_replaced_in_its_slot_is_not_missing():
    new = Gpu("GPU-new", 1, pci_bus_id=SECOND)
    assert found(BUS, (A, B, C), (A, new, C)) == []


def test_a_gpu_is_missing_although_the_bus_was_numbered_again_without_it():
    moved = replace(C, pci_bus_id=SECOND)
    bus = {FIRST: "nvidia", SECOND: "nvidia"}
    (gpu,) = absent_gpus(bus, (A, B, C), (A, moved))
    assert (gpu.uuid, gpu.pci_bus_id) == ("GPU-b", "")
    assert found(bus, (A, moved, gpu), (A, moved)) == [("GPU-b", "")], "also for the next process"
    assert found(bus | {THIRD: "nvidia"}, (gpu,), (A, moved, replace(B, pci_bus_id=THIRD))) == []


def test_gpus_without_a_bus_id_may_be_those_on_the_bus():
    nameless = Gpu("GPU-unreadable-1", 1, unreadable="no answer")
    assert found(BUS, (), (A, nameless, C)) == []
    assert found(BUS, (), (A, nameless)) == [("", SECOND), ("", THIRD)]


def test_bus_ids_compare_in_either_spelling():
    assert found({"0000:1b:00.0": "nvidia"}, (), (A,)) == []


@pytest.mark.parametrize("item", [SECOND, "0000:3d:00.0", "GPU-b", "NVIDIA H100"])
def test_what_the_settings_exclude_is_not_missing_and_no_wrong_item_of_theirs(item):
    node = Node((A, C), absent=absent_gpus(BUS, (A, B, C), (A, C)))
    assert [gpu.uuid for gpu in missing_gpus(node.absent, Settings())] == ["GPU-b"]
    settings = Settings(exclude_gpus=(item,))
    assert missing_gpus(node.absent, settings) == ()
    if item != "NVIDIA H100":
        assert plan(node, settings).warnings == ()


@pytest.mark.parametrize(
    ("bus", "before", "device_nodes", "none"),
    [
        ({}, (), (), True),
        ({FIRST: "vfio-pci", SECOND: "nvidia-vgpu-vfio"}, (), (), True),
        ({FIRST: "vfio-pci", SECOND: ""}, (), (), False),
        (BUS, (), (), False),
        (None, (), (), False),
        ({}, (A,), (), False),
        ({}, (), ("/dev/dxg",), False),
        ({}, (), ("/dev/nvidiactl",), True),
    ],
)
def test_no_gpu_is_expected_where_the_bus_and_the_memory_have_none_for_the_driver(bus, before, device_nodes, none):
    assert bool(no_gpu(bus, before, device_nodes)) is none
