"""Probes of simulated nodes, compared with the output of `nvidia-smi topo -m` on such machines (`recorded/`)."""

from pathlib import Path

import pytest

from gpu_plugin.devices.nvml_h import TopologyLevel
from gpu_plugin.nvml import links, traits
from gpu_plugin.simulation import faults, profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost

MATRICES = Path(__file__).parent / "recorded"

SAME = {"a100-mig-mixed": "dgx-a100", "h100-mig-single": "hgx-h100"}
"""Nodes that differ from another in how their GPUs are cut alone."""

FILES = sorted(path.stem for path in MATRICES.glob("*.txt"))
RECORDED = [name for name in profile.names() if SAME.get(name, name) in FILES]
"""A profile may come without what is shown on such a machine; every file here is some profile's."""

WORDS = {
    TopologyLevel.SINGLE: "PIX",
    TopologyLevel.MULTIPLE: "PXB",
    TopologyLevel.HOSTBRIDGE: "PHB",
    TopologyLevel.NODE: "NODE",
    TopologyLevel.SYSTEM: "SYS",
}


def recorded(name):
    """The matrix of a file, by row, and the NUMA node of each row, or N/A."""
    lines = (MATRICES / f"{name}.txt").read_text().splitlines()
    heads, *rows = [line.split() for line in lines if line and not line.startswith("#")]
    gpus = [f"GPU{index}" for index in range(len(rows))]
    assert heads == [*gpus, "NUMA"]
    assert [row[0] for row in rows] == gpus
    assert all(len(row) == len(gpus) + 2 for row in rows)
    return [row[1:-1] for row in rows], [row[-1] for row in rows]


class Machine:
    """A simulated node, probed like a real node."""

    def __init__(self, name):
        self.node = SimulatedNode(profile.load(name))
        self.driver = SimulatedDriver(self.node)
        self.driver.open()
        self.host = SimulatedHost(self.node)

    def fault(self, gpu, **request):
        faults.apply(self.node, {"gpu": gpu, **{key.replace("_", "-"): value for key, value in request.items()}})

    def probe(self):
        probed = [traits.probe_gpu(self.driver, self.host, index) for index in range(self.driver.device_count())]
        handles, gpus = {gpu.uuid: handle for handle, gpu in probed}, [gpu for _, gpu in probed]
        return gpus, links.probe_links(self.driver, self.host, handles, gpus)

    def matrix(self, *, nvlinks=True):
        """As `recorded` has it; without NVLinks what lies under them."""
        gpus, found = self.probe()
        rows = [["X"] * len(gpus) for _ in gpus]
        for (one, other), link in found.links.items():
            low, high = sorted(gpu.index for gpu in gpus if gpu.uuid in (one, other))
            word = f"NV{link.nvlinks}" if nvlinks and link.nvlinks else WORDS[TopologyLevel(link.ancestor)]
            rows[low][high] = rows[high][low] = word
        return rows, ["N/A" if gpu.numa_node is None else str(gpu.numa_node) for gpu in gpus]

    def distances(self):
        """By pair of indices."""
        gpus, found = self.probe()
        index = {gpu.uuid: gpu.index for gpu in gpus}
        return {
            (min(index[one], index[other]), max(index[one], index[other])): link.numa_distance
            for (one, other), link in found.links.items()
        }


@pytest.mark.parametrize("name", RECORDED)
def test_a_probe_finds_what_nvidia_smi_shows(name):
    assert Machine(name).matrix() == recorded(SAME.get(name, name))


def test_every_matrix_is_of_a_node_that_can_be_simulated():
    known = profile.names()
    lost = [name for name in FILES if not name.startswith(tuple(known))]
    assert not lost, f"{MATRICES}: {', '.join(lost)}: there is no such profile in gpu_plugin/simulation/profiles"


@pytest.mark.parametrize("name", ["dgx1-v100", "dgx2-16", "dgx-a100", "gb200-node"])
def test_pcie_under_the_nvlinks_is_found_too(name):
    assert Machine(name).matrix(nvlinks=False) == recorded(f"{name}.pcie")


@pytest.mark.parametrize("name", profile.names())
def test_where_nvml_does_not_answer_sysfs_tells_the_same(name):
    machine = Machine(name)
    before = machine.matrix(nvlinks=False)
    for gpu in range(len(before[0])):
        machine.fault(gpu, topology="unreadable")
    assert machine.matrix(nvlinks=False) == before


def test_a_gpu_whose_place_nobody_tells_is_farthest_from_all_others_and_spoils_none():
    machine = Machine("l40s-pcie-8")
    before = machine.matrix()
    machine.fault(2, topology="unknown")
    rows, _ = machine.matrix()
    assert rows[2] == ["SYS"] * 2 + ["X"] + ["SYS"] * 5
    for one in (0, 1, 3, 4, 5, 6, 7):
        assert rows[one][:2] + rows[one][3:] == before[0][one][:2] + before[0][one][3:]
    machine.fault(2, heal=True)
    assert machine.matrix() == before


def test_a_gpu_whose_nvlinks_are_all_down_is_as_far_as_pcie_has_it():
    machine = Machine("hgx-b200")
    for link in range(18):
        machine.fault(2, nvlink_down=link)
    assert machine.matrix() == recorded("hgx-b200-gpu2-down")
    machine.fault(2, reset=True)
    assert machine.matrix() == recorded("hgx-b200")


def test_a_gpu_that_has_not_joined_its_fabric_reaches_nobody_through_switches():
    machine = Machine("hgx-b200")
    machine.fault(2, fabric="in-progress")
    assert machine.matrix() == recorded("hgx-b200-gpu2-down")
    machine.fault(2, fabric="completed")
    assert machine.matrix() == recorded("hgx-b200")


@pytest.mark.parametrize(("name", "links"), [("dgx-a100", 12), ("hgx-h100", 18), ("dgx2-16", 6), ("gb200-node", 18)])
def test_a_link_to_a_switch_that_is_down_is_one_less_to_everybody(name, links):
    machine = Machine(name)
    machine.fault(1, nvlink_down=3)
    rows, _ = machine.matrix()
    assert {word for at, word in enumerate(rows[1]) if at != 1} == {f"NV{links - 1}"}
    assert rows[0][2:] == [f"NV{links}"] * (len(rows) - 2)
    machine.fault(1, nvlink_up=3)
    assert machine.matrix() == recorded(name)


def test_a_link_between_two_gpus_that_is_down_is_one_less_between_them_alone():
    machine = Machine("dgx1-v100")
    gpu, peer = machine.driver.handle_by_index(0), machine.node.profile.gpus[3].pci_bus_id
    machine.fault(
        0, nvlink_down=next(link for link in range(6) if machine.driver.nvlink_remote_bus_id(gpu, link) == peer)
    )
    rows, _ = machine.matrix()
    assert (rows[0][3], rows[3][0]) == ("NV1", "NV1")
    rows[0][3] = rows[3][0] = "NV2"
    assert rows == recorded("dgx1-v100")[0]


@pytest.mark.parametrize(
    ("name", "distances"),
    [
        ("dgx-a100", {(0, 1): 10, (0, 2): 12, (1, 3): 12, (0, 4): 32, (3, 7): 32, (4, 6): 12}),
        ("hgx-h100", {(0, 3): 10, (0, 4): 21, (4, 7): 10}),
        ("h100-nvl-pairs", {(0, 3): 10, (3, 4): 32}),
        ("gb200-node", {(0, 1): 10, (0, 2): 40, (1, 3): 40, (2, 3): 10}),
        ("mixed-16", {(0, 7): 10, (7, 8): 21, (8, 15): 10}),
    ],
)
def test_numa_distances_are_those_of_the_nodes_that_gpus_are_on(name, distances):
    found = Machine(name).distances()
    assert {pair: found[pair] for pair in distances} == distances


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("hgx-h100", {"nvswitch"}),
        ("dgx-a100", {"nvswitch"}),
        ("dgx2-16", {"nvswitch"}),
        ("gb200-node", {"7c1f0f4a-92d8-4e53-b0c6-6a1d3e5f8b27.32766"}),
        ("dgx1-v100", set()),
        ("h100-nvl-pairs", set()),
        ("l40s-pcie-8", set()),
    ],
)
def test_all_gpus_behind_switches_are_one_mesh(name, mesh):
    gpus, found = Machine(name).probe()
    assert set(found.cliques.values()) == mesh
    assert set(found.cliques) == ({gpu.uuid for gpu in gpus} if mesh else set())
