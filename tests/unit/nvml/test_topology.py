from collections import Counter

import pytest
from msgspec.structs import replace

from gpu_plugin.devices.node import Link
from gpu_plugin.devices.nvml_h import Return, TopologyLevel
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml import links
from gpu_plugin.nvml.links import Ends, LinkReading, clique, link_between, numa_distance, pcie_relation
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.simulation import profile

from .machine import Machine

CLUSTER = "7c1f0f4a92d84e53b0c66a1d3e5f8b27"
DASHED = "7c1f0f4a-92d8-4e53-b0c6-6a1d3e5f8b27"


def pair(one, other):
    return min(one, other), max(one, other)


def of(links, uuid):
    return {key: link for key, link in links.items() if uuid in key}


def without(links, *uuids):
    return {key: link for key, link in links.items() if not set(uuids) & {*key}}


# Where on PCIe

HGX = "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0"
PLX = "/sys/devices/pci0000:00/0000:00:02.0/0000:05:00.0"
Q35 = "/sys/devices/pci0000:00"
VMD = "/sys/devices/pci0000:00/0000:00:0e.0/pci10000:00"
ARM = "/sys/devices/platform/soc/1f2b0000.pcie/pci0002:00"
AZURE = "/sys/devices/LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00"


@pytest.mark.parametrize(
    ("one", "other", "relation"),
    [
        # Two ports of one switch: below the upstream port both have a downstream port of their own.
        (f"{HGX}/0000:17:00.0/0000:18:00.0", f"{HGX}/0000:17:02.0/0000:19:00.0", TopologyLevel.SINGLE),
        # Each behind a switch of its own, which is behind a third one.
        (
            f"{PLX}/0000:06:08.0/0000:07:00.0/0000:08:10.0/0000:0a:00.0",
            f"{PLX}/0000:06:0c.0/0000:0b:00.0/0000:0c:10.0/0000:0e:00.0",
            TopologyLevel.MULTIPLE,
        ),
        # One right at the first switch, one behind a second.
        (f"{PLX}/0000:06:08.0/0000:0a:00.0", f"{PLX}/0000:06:0c.0/0000:0b:00.0/0000:0c:10.0/0000:0e:00.0", 20),
        # Both under one switch, which is behind another switch.
        (
            f"{PLX}/0000:06:08.0/0000:07:00.0/0000:08:10.0/0000:0a:00.0",
            f"{PLX}/0000:06:08.0/0000:07:00.0/0000:08:14.0/0000:0b:00.0",
            TopologyLevel.SINGLE,
        ),
        # Two root ports of one host bridge, with and without switches below.
        (f"{Q35}/0000:00:01.0/0000:01:00.0", f"{Q35}/0000:00:03.0/0000:02:00.0", TopologyLevel.HOSTBRIDGE),
        (
            f"{Q35}/0000:00:01.0/0000:01:00.0/0000:02:08.0/0000:03:00.0",
            f"{Q35}/0000:00:03.0/0000:04:00.0/0000:05:08.0/0000:06:00.0",
            TopologyLevel.HOSTBRIDGE,
        ),
        # A virtual machine: all hang right at the root; or on one conventional bus behind a bridge.
        (f"{Q35}/0000:00:06.0", f"{Q35}/0000:00:07.0", TopologyLevel.HOSTBRIDGE),
        (f"{Q35}/0000:00:1e.0/0000:01:01.0", f"{Q35}/0000:00:1e.0/0000:01:02.0", TopologyLevel.SINGLE),
        # Two functions of a device at any place; a device and itself.
        (f"{HGX}/0000:17:00.0/0000:18:00.0", f"{HGX}/0000:17:00.0/0000:18:00.1", TopologyLevel.INTERNAL),
        (f"{Q35}/0000:00:06.0", f"{Q35}/0000:00:06.1", TopologyLevel.INTERNAL),
        (f"{Q35}/0000:00:06.0", f"{Q35}/0000:00:06.0", TopologyLevel.INTERNAL),
        # Functions of one root port are no board: below each is another bus.
        (f"{Q35}/0000:00:01.0/0000:01:00.0", f"{Q35}/0000:00:01.1/0000:02:00.0", TopologyLevel.HOSTBRIDGE),
        # Domains behind a device of a host bridge, and roots that are no child of /sys/devices.
        (f"{VMD}/10000:00:01.0/10000:01:00.0", f"{VMD}/10000:00:03.0/10000:02:00.0", TopologyLevel.HOSTBRIDGE),
        (f"{VMD}/10000:00:01.0/10000:01:00.0", f"{Q35}/0000:00:03.0/0000:02:00.0", TopologyLevel.HOSTBRIDGE),
        (f"{ARM}/0002:00:00.0/0002:01:00.0", f"{ARM}/0002:00:01.0/0002:02:00.0", TopologyLevel.HOSTBRIDGE),
        (f"{AZURE}/47505500/pci0001:00/0001:00:00.0", f"{AZURE}/47505501/pci0002:00/0002:00:00.0", None),
        # Two host bridges; some names have the same beginning.
        (f"{HGX}/0000:17:00.0/0000:18:00.0", "/sys/devices/pci0000:37/0000:37:01.0/0000:38:00.0", None),
        ("/sys/devices/pci0000:1/0000:10:00.0", "/sys/devices/pci0000:15/0000:15:01.0", None),
        ("/sys/devices/pci0000:15/0000:16:00.0", "/sys/devices/pci0000:16/0000:16:00.0", None),
        # Paths that say nothing of PCIe.
        ("/sys/bus/pci/devices/0000:18:00.0", "/sys/bus/pci/devices/0000:19:00.0", None),
        ("0000:18:00.0", "0000:19:00.0", None),
    ],
)
def test_the_pcie_relation_of_two_paths(one, other, relation):
    for near in (True, False):
        beyond = TopologyLevel.NODE if near else TopologyLevel.SYSTEM
        wanted = beyond if relation is None else relation
        assert pcie_relation(one, other, near=near) == wanted
        assert pcie_relation(other, one, near=near) == wanted


@pytest.mark.parametrize("known", ["", f"{Q35}/0000:00:06.0"])
@pytest.mark.parametrize("near", [True, False])
def test_a_path_that_is_not_known_is_as_far_as_can_be(known, near):
    assert pcie_relation("", known, near=near) == pcie_relation(known, "", near=near) == TopologyLevel.SYSTEM


# How far, which mesh, how many


@pytest.mark.parametrize(
    ("distances", "one", "other", "distance"),
    [
        ({(0, 0): 10, (0, 1): 21, (1, 0): 21}, 0, 1, 21),
        ({(0, 0): 10, (0, 1): 21, (1, 0): 31}, 0, 1, 31),
        ({(0, 1): 21}, 1, 0, 21),
        ({(0, 0): 10, (0, 1): 21}, 0, 0, 10),
        ({(2, 2): 11}, 2, 2, 11),
        ({(0, 1): 21}, 1, 2, None),
        ({(0, 1): 21}, 2, 2, 10),
        ({}, 0, 0, 10),
        ({}, 0, 1, None),
        ({}, None, None, None),
        ({(0, 0): 10}, None, 0, None),
        ({(0, 0): 10}, 0, None, None),
    ],
)
def test_the_distance_of_two_numa_nodes(distances, one, other, distance):
    assert numa_distance(distances, one, other) == numa_distance(distances, other, one) == distance


@pytest.mark.parametrize(
    ("fabric", "word"),
    [
        (None, "nvswitch"),
        (Fabric(state=0), "nvswitch"),
        (Fabric(state=1), ""),
        (Fabric(state=2), ""),
        (Fabric(state=2, cluster=CLUSTER, clique=3), ""),
        (Fabric(state=3, status=999), ""),
        (Fabric(state=3, status=1, cluster=CLUSTER, clique=3), ""),
        (Fabric(state=3), "nvswitch"),
        (Fabric(state=3, clique=2), "nvswitch.2"),
        (Fabric(state=3, cluster=CLUSTER, clique=32766), f"{DASHED}.32766"),
        (Fabric(state=3, cluster=CLUSTER.upper()), f"{DASHED}.0"),
        (Fabric(state=3, health_mask=0x19A, summary=2, cluster=CLUSTER, clique=1), f"{DASHED}.1"),
        (Fabric(state=7), ""),
    ],
)
def test_a_clique_is_one_word(fabric, word):
    assert clique(fabric) == word


@pytest.mark.parametrize(
    ("ends", "others", "nvlinks", "switched"),
    [
        (Ends(), Ends(), 0, False),
        (Ends({"b": 2}), Ends({"a": 2}), 2, False),
        (Ends({"b": 2}), Ends({"a": 1}), 1, False),
        (Ends({"b": 2}), Ends({"c": 2}), 0, False),
        (Ends({}, 18, "x"), Ends({}, 18, "x"), 18, True),
        (Ends({}, 18, "x"), Ends({}, 17, "x"), 17, True),
        (Ends({}, 18, "x"), Ends({}, 18, "y"), 0, False),
        (Ends({}, 18, "x"), Ends({}, 18, ""), 0, False),
        (Ends({}, 18, ""), Ends({}, 18, ""), 0, False),
    ],
)
def test_a_link_between_two_gpus_counts_if_both_ends_have_it(ends, others, nvlinks, switched):
    found = link_between("a", ends, "b", others, 20, 21)
    assert found == link_between("b", others, "a", ends, 20, 21)
    assert found == Link(nvlinks, 20, switched=switched, numa_distance=21)


# Every profile


@pytest.mark.parametrize("name", profile.names())
def test_links_and_cliques_are_those_of_the_profile_each_pair_once(name):
    machine = Machine(name)
    built = machine.node.profile
    found = machine.links()()
    buses = [gpu.pci_bus_id for gpu in built.gpus]
    switches = [sum(remote is not None and remote not in buses for remote in remotes) for remotes in built.remotes]
    assert set(found.links) == {pair(one, other) for one in machine.uuids for other in machine.uuids if one != other}
    assert {machine.uuids.index(uuid) for uuid in found.cliques} == {at for at, count in enumerate(switches) if count}
    assert (found.lost, found.troubles) == (frozenset(), ())
    for (one, other), link in found.links.items():
        assert one < other
        first, second = machine.uuids.index(one), machine.uuids.index(other)
        assert link.switched == (switches[first] > 0 and switches[second] > 0)
        direct = built.remotes[first].count(buses[second])
        assert link.nvlinks == (min(switches[first], switches[second]) if link.switched else direct)
        assert link.ancestor == built.ancestor(first, second)
        nodes = built.gpus[first].numa_node, built.gpus[second].numa_node
        assert link.numa_distance == (None if -1 in nodes else built.numa_distances.get(nodes, 10))


# What it costs


class Counted:
    """A driver or a host. `asked` are the calls of it, with their arguments."""

    def __init__(self, answering):
        self._answering = answering
        self.asked = []

    def __getattr__(self, name):
        call = getattr(self._answering, name)

        def counted(*arguments):
            self.asked.append((name, *arguments))
            return call(*arguments)

        return counted


@pytest.mark.parametrize(
    ("name", "questions"),
    [
        ("hgx-h100", {"nvlink_remote_bus_id": 8 * 19, "nvlink_to_switch": 8 * 4, "fabric": 8, "common_ancestor": 28}),
        ("dgx-a100", {"nvlink_remote_bus_id": 8 * 13, "nvlink_to_switch": 8 * 6, "fabric": 8, "common_ancestor": 28}),
        ("dgx1-v100", {"nvlink_remote_bus_id": 8 * 7, "common_ancestor": 28}),
        ("gb200-node", {"nvlink_remote_bus_id": 4 * 19, "nvlink_to_switch": 4, "fabric": 4, "common_ancestor": 6}),
        ("t4-4", {"nvlink_remote_bus_id": 4, "common_ancestor": 6}),
        ("h200", {}),
    ],
)
def test_no_call_is_made_twice(name, questions):
    machine = Machine(name)
    driver = Counted(machine.driver)
    machine.links(driver)()
    assert Counter(question[0] for question in driver.asked) == questions
    assert len(set(driver.asked)) == len(driver.asked)


def test_paths_are_read_only_if_the_driver_reports_no_ancestor():
    machine = Machine("l40s-pcie-8")
    host = Counted(machine.host)
    gpus, handles = machine.found()
    links.probe_links(machine.driver, host, handles, gpus)
    assert host.asked == [("numa_distances",)]
    machine.node.refuse("common_ancestor", Return.NOT_SUPPORTED)
    host.asked.clear()
    links.probe_links(machine.driver, host, handles, gpus)
    paths = [("pci_path", gpu.pci_bus_id) for gpu in machine.node.profile.gpus]
    assert sorted(host.asked) == sorted([("numa_distances",), *paths])


def test_no_gpu_and_one_gpu_have_no_links():
    machine = Machine("h200")
    assert links.probe_links(machine.driver, machine.host, {}, []) == LinkReading()
    assert machine.links()() == LinkReading()


# Links that are down, or lead elsewhere


def test_bus_ids_are_compared_without_regard_to_their_letters(monkeypatch):
    machine = Machine("dgx1-v100")
    links = machine.links()
    whole = links()
    real = machine.driver.nvlink_remote_bus_id
    monkeypatch.setattr(machine.driver, "nvlink_remote_bus_id", lambda h, n: (real(h, n) or "").lower() or None)
    assert links() == whole


def test_a_link_down_at_one_end_is_not_counted():
    machine = Machine("dgx1-v100")
    links = machine.links()
    whole = links().links
    built = machine.node.profile
    neighbour = [gpu.pci_bus_id for gpu in built.gpus].index(built.remotes[0][0] or "")
    machine.node.change(0, links_down=(0,))
    found = links().links
    changed = pair(machine.uuids[0], machine.uuids[neighbour])
    assert found[changed] == replace(whole[changed], nvlinks=whole[changed].nvlinks - 1)
    assert {**found, changed: whole[changed]} == whole


def test_a_gpu_with_fewer_links_to_the_switches_has_fewer_to_every_other():
    machine = Machine("hgx-h100")
    links = machine.links()
    whole = links()
    machine.node.change(2, links_down=(0, 7, 17))
    machine.node.change(5, links_down=(1,))
    found = links()
    assert found.cliques == whole.cliques
    two, five = machine.uuids[2], machine.uuids[5]
    assert {link.nvlinks for link in of(found.links, two).values()} == {15}
    assert {link.nvlinks for key, link in of(found.links, five).items() if two not in key} == {17}
    assert without(found.links, two, five) == without(whole.links, two, five)


@pytest.mark.parametrize("name", ["hgx-b200", "hgx-h100", "dgx-a100"])
def test_a_gpu_whose_nvlinks_are_all_down_is_in_no_mesh_and_has_pcie_left(name):
    machine = Machine(name)
    links = machine.links()
    whole = links()
    machine.node.change(2, links_down=tuple(range(18)))
    found = links()
    two = machine.uuids[2]
    assert set(found.cliques) == {*machine.uuids} - {two}
    assert of(found.links, two) == {
        key: replace(link, nvlinks=0, switched=False) for key, link in of(whole.links, two).items()
    }
    assert without(found.links, two) == without(whole.links, two)
    assert found.troubles == ()


def elsewhere(monkeypatch, machine, kind):
    """Let every NVLink without a GPU of the node at its end lead to this kind of device, or be refused with this code."""

    def to_switch(handle, link):
        if isinstance(kind, Return):
            raise NvmlError(kind, "nvmlDeviceGetNvLinkRemoteDeviceType")
        return kind

    monkeypatch.setattr(machine.driver, "nvlink_to_switch", to_switch)


@pytest.mark.parametrize("name", ["hgx-h100", "dgx-a100", "gb200-node"])
def test_a_link_to_another_device_joins_no_gpus(monkeypatch, name, caplog):
    machine = Machine(name)
    links = machine.links()
    elsewhere(monkeypatch, machine, kind=False)
    found = links()
    assert found.cliques == {}
    assert {(link.nvlinks, link.switched) for link in found.links.values()} == {(0, False)}
    assert found.troubles == ()
    assert not caplog.records


@pytest.mark.parametrize("code", [Return.NOT_SUPPORTED, Return.FUNCTION_NOT_FOUND, Return.INVALID_ARGUMENT])
def test_an_unknown_end_is_a_switch_if_a_fabric_was_joined(monkeypatch, code):
    for name, switched in (("hgx-h100", True), ("dgx-a100", False)):
        machine = Machine(name)
        links = machine.links()
        whole = links()
        elsewhere(monkeypatch, machine, code)
        found = links()
        assert (found == whole) is switched
        assert bool(found.cliques) is switched
        assert found.troubles == ()


def test_an_end_of_unknown_kind_is_none_while_the_fabric_is_being_joined(monkeypatch):
    machine = Machine("hgx-h100")
    links = machine.links()
    elsewhere(monkeypatch, machine, Return.NOT_SUPPORTED)
    machine.node.change(3, fabric="in-progress")
    assert set(links().cliques) == {*machine.uuids} - {machine.uuids[3]}


@pytest.mark.parametrize("name", ["hgx-h100", "gb200-node"])
def test_an_end_without_a_bus_id_is_known_by_its_kind(monkeypatch, name):
    machine = Machine(name)
    driver = Counted(machine.driver)
    links = machine.links(driver)
    whole = links()
    driver.asked.clear()
    real = machine.driver.nvlink_remote_bus_id
    monkeypatch.setattr(machine.driver, "nvlink_remote_bus_id", lambda handle, link: real(handle, link) and "")
    assert links() == whole
    kinds = [question for question in driver.asked if question[0] == "nvlink_to_switch"]
    assert len(kinds) == len(machine.uuids) * 18, "nobody said that they are one and the same"
    elsewhere(monkeypatch, machine, kind=False)
    assert links().cliques == {}


# Fabrics


@pytest.mark.parametrize("fabric", [Fabric(state=1), Fabric(state=2), Fabric(state=3, status=999), Fabric(state=5)])
def test_a_gpu_that_has_not_joined_its_fabric_has_no_switched_links(monkeypatch, fabric):
    machine = Machine("hgx-h100")
    links = machine.links()
    whole = links()
    third, real = machine.driver.handle_by_index(3), machine.driver.fabric
    monkeypatch.setattr(machine.driver, "fabric", lambda handle: fabric if handle == third else real(handle))
    found = links()
    three = machine.uuids[3]
    assert three not in found.cliques
    assert {(link.nvlinks, link.switched) for link in of(found.links, three).values()} == {(0, False)}
    assert without(found.links, three) == without(whole.links, three)


def test_gpus_of_one_node_may_be_in_several_cliques(monkeypatch):
    machine = Machine("hgx-h100")
    links = machine.links()
    index = {machine.driver.handle_by_index(at): at for at in range(8)}
    monkeypatch.setattr(
        machine.driver, "fabric", lambda handle: Fabric(state=3, cluster=CLUSTER, clique=1 + index[handle] // 4)
    )
    found = links()
    assert [found.cliques[uuid] for uuid in machine.uuids] == [f"{DASHED}.1"] * 4 + [f"{DASHED}.2"] * 4
    for (one, other), link in found.links.items():
        together = found.cliques[one] == found.cliques[other]
        assert (link.nvlinks, link.switched) == ((18, True) if together else (0, False))


@pytest.mark.parametrize("code", [Return.NOT_SUPPORTED, Return.FUNCTION_NOT_FOUND])
def test_parts_without_a_fabric_are_one_mesh(code):
    machine = Machine("hgx-h100")
    links = machine.links()
    machine.node.refuse("fabric", code)
    found = links()
    assert found.cliques == dict.fromkeys(machine.uuids, "nvswitch")
    assert {link.nvlinks for link in found.links.values()} == {18}


def test_an_unreadable_fabric_is_not_joined_and_reported():
    machine = Machine("hgx-h100")
    links = machine.links()
    machine.node.refuse("fabric", Return.UNKNOWN, gpu=6)
    found = links()
    assert set(found.cliques) == {*machine.uuids} - {machine.uuids[6]}
    (trouble,) = found.troubles
    assert machine.uuids[6] in trouble
    assert "nvmlDeviceGetGpuFabricInfo" in trouble


# What cannot be read


@pytest.mark.parametrize(
    ("name", "call", "unreadable", "named"),
    [
        ("dgx1-v100", "nvlink_remote_bus_id", (0, 3), "NVLinks 0, 3"),
        ("hgx-h100", "nvlink_to_switch", (1,), "NVLinks 1"),
    ],
)
def test_a_link_that_cannot_be_read_counts_as_down_and_hides_no_other(monkeypatch, name, call, unreadable, named):
    machine = Machine(name)
    links = machine.links()
    whole = links().links
    first, real = machine.driver.handle_by_index(0), getattr(machine.driver, call)

    def refusing(handle, link):
        if handle == first and link in unreadable:
            raise NvmlError(Return.TIMEOUT, "nvmlDeviceGetNvLinkState")
        return real(handle, link)

    monkeypatch.setattr(machine.driver, call, refusing)
    found = links()
    less = {key: whole[key].nvlinks - link.nvlinks for key, link in found.links.items()}
    assert set(of(less, machine.uuids[0]).values()) == ({1} if name == "hgx-h100" else {0, 1})
    assert sum(less.values()) == (7 if name == "hgx-h100" else 2)
    assert without(found.links, machine.uuids[0]) == without(whole, machine.uuids[0])
    (trouble,) = found.troubles
    assert f"GPU {machine.uuids[0]}" in trouble
    assert named in trouble


@pytest.mark.parametrize("code", [Return.NOT_SUPPORTED, Return.UNKNOWN, Return.NO_PERMISSION, Return.GPU_IS_LOST])
@pytest.mark.parametrize("name", profile.names())
def test_the_ancestor_comes_from_sysfs_if_nvml_does_not_report_it(name, code):
    machine = Machine(name)
    links = machine.links()
    whole = links()
    machine.node.refuse("common_ancestor", code)
    found = links()
    assert (found.links, found.cliques, found.lost) == (whole.links, whole.cliques, frozenset())
    assert len(found.troubles) == (code == Return.UNKNOWN and len(machine.uuids) > 1)


def test_one_pair_that_cannot_be_read_is_read_from_sysfs_alone():
    machine = Machine("l40s-pcie-8")
    links = machine.links()
    whole = links()
    machine.node.refuse("common_ancestor", Return.UNKNOWN, times=1)
    found = links()
    assert found.links == whole.links
    (trouble,) = found.troubles
    assert " of a pair of GPUs is taken from sysfs" in trouble
    assert trouble.endswith("nvmlDeviceGetTopologyCommonAncestor: unknown (999)")


def test_a_pair_without_any_path_is_the_farthest(monkeypatch):
    machine = Machine("l40s-pcie-8")
    links = machine.links()
    whole = links().links
    machine.node.refuse("common_ancestor", Return.UNKNOWN)
    dark = machine.node.profile.gpus[2].pci_bus_id
    real = machine.host.pci_path
    monkeypatch.setattr(machine.host, "pci_path", lambda bus_id: "" if bus_id == dark else real(bus_id))
    found = links().links
    two = machine.uuids[2]
    assert of(found, two) == {key: replace(link, ancestor=50) for key, link in of(whole, two).items()}
    assert without(found, two) == without(whole, two)


def test_a_gpu_without_a_bus_id_is_at_the_far_end_of_nothing_known():
    machine = Machine("dgx1-v100")
    machine.node.refuse("pci_bus_id", Return.NOT_SUPPORTED, gpu=4)
    links = machine.links()
    machine.node.refuse("common_ancestor", Return.NOT_SUPPORTED)
    found = links().links
    four = machine.uuids[4]
    assert {(link.nvlinks, link.ancestor) for link in of(found, four).values()} == {(0, TopologyLevel.SYSTEM)}
    assert {link.nvlinks for link in without(found, four).values()} == {0, 1, 2}


# What is lost


LOST = [Return.GPU_IS_LOST, Return.RESET_REQUIRED, Return.NOT_FOUND, Return.UNINITIALIZED]


@pytest.mark.parametrize(
    ("name", "lost", "call", "code"),
    [
        *[(name, lost, "", 0) for name in ("dgx1-v100", "hgx-h100", "t4-4") for lost in (0, 3, -1)],
        *[
            ("hgx-h100", 5, call, code)
            for call in ("nvlink_remote_bus_id", "nvlink_to_switch", "fabric")
            for code in LOST
        ],
    ],
)
def test_a_lost_gpu_has_no_links_and_the_others_keep_theirs(name, lost, call, code, caplog):
    machine = Machine(name)
    links = machine.links()
    whole = links()
    lost %= len(machine.uuids)
    if call:
        machine.node.refuse(call, code, gpu=lost)
    else:
        machine.node.lose(lost)
    found = links()
    gone = machine.uuids[lost]
    assert found.lost == {gone}
    assert found.links == without(whole.links, gone)
    assert found.cliques == {uuid: word for uuid, word in whole.cliques.items() if uuid != gone}
    assert found.troubles == ()
    assert not caplog.records


def test_a_lost_gpu_is_read_once():
    machine = Machine("hgx-h100")
    links = machine.links()
    machine.node.lose(5)
    machine.driver.calls.clear()
    links()
    assert machine.driver.calls["nvlink_remote_bus_id"] == 7 * 19 + 1
    assert machine.driver.calls["common_ancestor"] == 7 * 6 // 2


def test_if_all_gpus_are_lost_there_are_no_links():
    machine = Machine("t4-4")
    links = machine.links()
    for gpu in range(4):
        machine.node.lose(gpu)
    assert links() == LinkReading(lost=frozenset(machine.uuids))
