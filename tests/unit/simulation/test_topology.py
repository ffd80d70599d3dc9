import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.devices.nvml_h import TopologyLevel
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.host import SimulatedHost
from gpu_plugin.simulation.topology import Pcie, ancestors, numa_distances, pci_paths

from .opened import make_node


def relation(one, other):
    """The relation of two GPUs by their paths in sysfs; None if they have different root complexes."""
    ones, others = one.split("/")[3:], other.split("/")[3:]
    same = next(at for at, steps in enumerate(zip(ones, others, strict=False)) if steps[0] != steps[1])
    if not same:
        return None
    if same == 1:
        return TopologyLevel.HOSTBRIDGE
    # Below the last bridge in common: a switch's downstream port and the GPU, or more bridges
    return TopologyLevel.SINGLE if max(len(ones), len(others)) - same <= 2 else TopologyLevel.MULTIPLE


def told(level):
    """The part of a relation that paths in sysfs show."""
    if level >= TopologyLevel.NODE:
        return None
    return max(level, TopologyLevel.SINGLE)


@st.composite
def trees(draw):
    """Groups one inside the other, of up to 16 GPUs, and their bus ids, neighbours among them."""
    count = draw(st.integers(1, 16))
    places = [
        (index // draw(st.sampled_from((1, 4, 8))), draw(st.integers(0, 1)), draw(st.integers(0, 1)))
        for index in range(count)
    ]
    keys = {"host_bridge": 1, "switches": 2, "switch": 3}
    drawn = draw(st.sets(st.sampled_from(sorted(keys))))
    groups = {
        key: tuple(
            tuple(index for index in range(count) if places[index][: keys[key]] == place)
            for place in sorted({each[: keys[key]] for each in places})
        )
        for key in drawn
    }
    buses = draw(st.lists(st.integers(0, 255), min_size=count, max_size=count, unique=True))
    return Pcie(**groups), [f"00000000:{bus:02X}:00.0" for bus in buses]


@given(trees())
def test_paths_tell_what_the_groups_say(tree):
    pcie, buses = tree
    paths, levels = pci_paths(pcie, buses), ancestors(pcie, [-1] * len(buses))
    assert len(set(paths)) == len(buses)
    for path, bus in zip(paths, buses, strict=True):
        assert path.endswith(f"/{bus[4:].lower()}")
    for low, high in itertools.combinations(range(len(buses)), 2):
        assert relation(paths[low], paths[high]) == told(levels[low, high])


@pytest.mark.parametrize("name", profile.names())
def test_the_paths_of_every_profile_tell_its_relations(name):
    node = profile.load(name)
    for low, high in itertools.combinations(range(len(node.gpus)), 2):
        assert relation(node.pci_paths[low], node.pci_paths[high]) == told(node.ancestor(low, high))


def test_paths_look_like_those_of_real_hosts():
    assert profile.load("h200").pci_paths == ("/sys/devices/pci0000:00/0000:00:06.0",)
    assert profile.load("gb200-node").pci_paths[2] == "/sys/devices/pci0018:00/0018:00:01.0/0018:01:00.0"
    one, _, other, *_ = profile.load("dgx1-v100").pci_paths
    assert one == "/sys/devices/pci0000:03/0000:03:01.0/0000:04:00.0/0000:05:00.0/0000:06:00.0"
    assert other == "/sys/devices/pci0000:03/0000:03:02.0/0000:08:00.0/0000:09:00.0/0000:0a:00.0"


def test_gpus_on_a_board_hang_on_one_switch():
    one, other, third = pci_paths(Pcie(board=((0, 1),)), [f"00000000:{bus}:00.0" for bus in (20, 21, 30)])
    assert relation(one, other) == TopologyLevel.SINGLE
    assert relation(one, third) is None


def test_a_host_knows_a_path_by_either_form_of_a_bus_id():
    node = make_node("hgx-h100")
    host = SimulatedHost(node)
    assert host.pci_path("00000000:9D:00.0") == host.pci_path("0000:9d:00.0") == node.profile.pci_paths[4]
    assert host.numa_node("00000000:9D:00.0") == host.numa_node("0000:9d:00.0") == 1
    assert (host.pci_path("0000:ff:00.0"), host.numa_node("0000:ff:00.0")) == ("", None)


# NUMA distances


def test_nodes_that_gpus_are_on_are_two_sockets_unless_told():
    assert numa_distances({}, [0, 3, 0, -1]) == {(0, 0): 10, (0, 3): 21, (3, 0): 21, (3, 3): 10}
    assert numa_distances({}, [-1]) == {}


def test_a_row_has_a_distance_to_every_node_in_the_order_of_their_numbers():
    rows = {9: [80, 40, 10], 0: [10, 20, 80], 1: [21, 10, 40]}
    assert numa_distances(rows, [0, 1]) == {
        (0, 0): 10,
        (0, 1): 20,
        (0, 9): 80,
        (1, 0): 21,
        (1, 1): 10,
        (1, 9): 40,
        (9, 0): 80,
        (9, 1): 40,
        (9, 9): 10,
    }


def test_a_host_tells_the_distances_of_its_profile():
    host = SimulatedHost(make_node("dgx-a100"))
    assert host.numa_distances()[3, 1] == 12
    assert host.numa_distances()[3, 7] == 32
    assert SimulatedHost(make_node("h200")).numa_distances() == {}
