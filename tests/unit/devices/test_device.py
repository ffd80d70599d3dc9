import pytest

from gpu_plugin.devices.device import TEGRA_GPU, WSL_GPUS, Device, is_placeholder, placeholder, whole_gpu, with_reason
from gpu_plugin.devices.node import Gpu, Link, Node

DEVICE = Device("GPU-a", "GPU-a", "GPU-a", "0", ("/dev/nvidia0",), (1,))


def test_a_reason_makes_a_device_unhealthy_and_nothing_else():
    hot = with_reason(DEVICE, "too hot")
    assert (hot.healthy, DEVICE.healthy) == (False, True)
    assert with_reason(hot, "") == DEVICE


def test_the_same_reason_gives_the_very_same_device():
    assert with_reason(DEVICE, "") is DEVICE
    hot = with_reason(DEVICE, "too hot")
    assert with_reason(hot, "too hot") is hot


def test_a_link_is_the_same_from_both_ends_and_the_worst_where_unknown():
    gpus = tuple(Gpu(uuid=uuid, index=index) for index, uuid in enumerate(("GPU-a", "GPU-b", "GPU-c")))
    node = Node(gpus, {("GPU-a", "GPU-b"): Link(4, 10)})
    assert node.link("GPU-a", "GPU-b") == node.link("GPU-b", "GPU-a") == Link(4, 10)
    assert node.link("GPU-c", "GPU-a") == node.link("GPU-a", "GPU-c") == Link(0, 50)


@pytest.mark.parametrize(
    ("uuid", "minor", "nodes"),
    [
        ("GPU-a", 3, ("/dev/nvidia3",)),
        ("GPU-a", 0, ("/dev/nvidia0",)),
        ("GPU-a", None, ()),
        (WSL_GPUS, None, ("/dev/dxg",)),
        (TEGRA_GPU, None, ()),
    ],
)
def test_a_gpu_has_the_node_of_its_minor_number_unless_its_platform_has_others(uuid, minor, nodes):
    assert whole_gpu(Gpu(uuid=uuid, index=0, minor=minor)).nodes == nodes


def test_a_uuid_that_is_made_up_shows():
    assert is_placeholder(placeholder(3))
    assert placeholder(3) != placeholder(4)
    assert not is_placeholder("GPU-3")
