import json
import re
from importlib import import_module
from pathlib import Path
from uuid import UUID, uuid5

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.nvml_h import TopologyLevel
from gpu_plugin.simulation import mig, profile, topology

SMALL = {"count": 4, "gpu": {"name": "NVIDIA X"}}
TWO = {"count": 2, "gpu": {"name": "NVIDIA X"}, "gpus": [{"numa_node": 0}, {"numa_node": 1}]}
CUT = {"count": 4, "gpu": {"name": "NVIDIA X", "mig_mode": [0, 0], "mig_profiles": "a100-40gb"}}


def fault(content: object) -> str:
    with pytest.raises(ConfigError) as caught:
        profile.parse(content)
    return str(caught.value)


@pytest.mark.parametrize("name", profile.names())
def test_every_profile_has_what_a_driver_needs(name):
    node = profile.load(name)
    assert node.name == name
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia0"} <= node.device_nodes
    for gpu in node.gpus:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.architecture
        assert gpu.memory_bytes
        assert gpu.event_types
        assert gpu.event_types & 0x8
        assert gpu.thresholds.slowdown
        assert gpu.idle_temperature < gpu.thresholds.slowdown
        assert gpu.row_remapping is (gpu.architecture >= 7)  # Ampere and later
        assert gpu.page_retirement is not gpu.row_remapping
        assert (230 in gpu.fields) is (gpu.architecture >= 7)
        assert (gpu.margin is None) is (gpu.architecture < 8)  # T.Limit is Ada's and later
        assert (gpu.margin is None) is not bool({193, 194, 196} & set(gpu.fields))
        assert gpu.ecc
        assert gpu.pcie_width == 16
        assert (gpu.fabric is not None) is (gpu.architecture >= 9)  # Hopper and later
    fabrics = {(gpu.fabric.state, gpu.fabric.health_mask, gpu.fabric.summary) for gpu in node.gpus if gpu.fabric}
    switched = any(links and not set(links) & {gpu.pci_bus_id for gpu in node.gpus} for links in node.remotes)
    assert not fabrics or fabrics == {(3, 0x1AA, 1) if switched else (0, 0, 0)}


def test_uuids_never_change():
    assert profile.load("hgx-h100").gpus[0].uuid == "GPU-0dd872bc-79b8-50d8-b0c2-df8d24062139"
    namespace = UUID("6f0d1a52-9c1e-5d0e-8a3b-0f5f4f1f2c77")
    for name in set(profile.names()) - {"h200"}:  # that one is recorded
        for index, gpu in enumerate(profile.load(name).gpus):
            assert gpu.uuid == f"GPU-{uuid5(namespace, f'{name}/{index}')}"
    assert profile.parse({"count": 4, "gpu": {"name": "x"}}, "t4-4").gpus[3].uuid == profile.load("t4-4").gpus[3].uuid


@pytest.mark.parametrize("name", profile.names())
def test_a_built_in_profile_keeps_the_rules_for_files(name):
    node = import_module(f"gpu_plugin.simulation.profiles.{name.replace('-', '_')}").NODE
    plain = msgspec.to_builtins(node, str_keys=True)
    assert msgspec.convert(plain, profile.NodeDescription, str_keys=True, strict=True) == node


def test_the_example_of_the_documents_has_all_keys():
    example = Path(__file__).parents[3] / "docs/simulated-node.yaml"
    node = profile.load(str(example))
    assert (node.name, len(node.gpus), node.gpus[3].mig_mode) == ("my-node", 4, (1, 1))
    blocks = (profile._File, profile.GpuProfile, profile.ThresholdsProfile, profile.FabricProfile)
    links = (topology.NvLink, topology.NvSwitch, topology.Pcie)
    keys = {key for block in (*blocks, *links) for key in block.__struct_fields__}
    assert keys - set(re.findall(r"\w+(?=: )|\w+(?=:$)", example.read_text(), re.MULTILINE)) == set()


def test_what_a_file_leaves_out_follows_from_the_index():
    node = profile.parse(SMALL, "small")
    assert [gpu.minor for gpu in node.gpus] == [0, 1, 2, 3]
    assert node.gpus[2].pci_bus_id == "00000000:12:00.0"
    assert node.ancestor(0, 1) == TopologyLevel.SYSTEM
    assert node.name == "small"
    assert node.device_nodes == {f"/dev/nvidia{minor}" for minor in range(4)}


def test_a_gpu_says_more_than_all_gpus():
    node = profile.parse(SMALL | {"gpus": [{}, {"name": "NVIDIA Y", "numa_node": 1}]})
    assert [gpu.name for gpu in node.gpus] == ["NVIDIA X", "NVIDIA Y", "NVIDIA X", "NVIDIA X"]
    assert [gpu.numa_node for gpu in node.gpus] == [-1, 1, -1, -1]


def test_a_closer_group_wins():
    groups = {"host_bridge": [[0, 1, 2, 3]], "switches": [[0, 1, 2]], "switch": [[0, 1]], "board": [[2, 3]]}
    node = profile.parse(SMALL | {"pcie": groups})
    assert [node.ancestor(0, 1), node.ancestor(1, 2), node.ancestor(2, 3), node.ancestor(0, 3)] == [10, 20, 0, 30]


def test_a_gpu_that_is_cut_is_in_mig_mode():
    node = profile.parse(CUT | {"gpus": [{"mig": ["3g.20gb"]}, {"mig": []}, {"mig": None}]})
    assert [(gpu.mig, gpu.mig_mode) for gpu in node.gpus] == [
        (("3g.20gb",), (1, 1)),
        ((), (1, 1)),
        (None, (0, 0)),
        (None, (0, 0)),
    ]


def test_the_tables_of_mig_profiles_are_those_that_a_file_may_name():
    for model in mig._MEMORY:
        assert profile.parse({"count": 1, "gpu": {"name": "x", "mig_profiles": model}}).gpus[0].mig_profiles == model


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "$: expected object, got null"),
        ([], "$: expected object, got array"),
        ({}, "$.count: missing"),
        ({"count": -1}, "$.count: expected int >= 0"),
        ({"count": 0, "gpus": [{"name": "x"}]}, "$.gpus: describes 1 GPUs, but count is 0"),
        (SMALL | {"init_error": 0}, "$.init_error: expected int >= 1"),
        ({"count": 1}, "$.gpus[0].name: missing"),
        ({"gpus": [{"name": "x", "minor": "0"}]}, "$.gpus[0].minor: expected int, got str"),
        ({"gpus": [{"minr": 0}]}, "$.gpus[0].minr: unknown key"),
        ({"gpu": {"minor": 1}} | {"count": 2, "gpus": [{"name": "x"}, {"name": "x"}]}, "$.gpus[1].minor: 1 is GPU 0's"),
        (SMALL | {"gpu": {"thresholds": {"shutdown": True}}}, "$.gpu.thresholds.shutdown: expected int"),
        (SMALL | {"gpu": {"fabric": {"state": 4}}}, "$.gpu.fabric.state: expected int <= 3"),
        (SMALL | {"gpu": {"fabric": {"cluster": "7c1f"}}}, "$.gpu.fabric.cluster: expected str matching regex"),
        (SMALL | {"gpu": {"fabric": {"clique": -1}}}, "$.gpu.fabric.clique: expected int >= 0"),
        (SMALL | {"gpu": {"pcie_width": 0}}, "$.gpu.pcie_width: expected int >= 1"),
        (SMALL | {"gpu": {"fields": {"x": 1}}}, "$.gpu.fields: expected int"),
        (SMALL | {"count": 1, "gpus": [{}, {}]}, "$.gpus: describes 2 GPUs, but count is 1"),
        (SMALL | {"gpus": [{"pci_bus_id": "00000000:11:00.0"}]}, "$.gpus[1].pci_bus_id: 00000000:11:00.0 is GPU 0's"),
        (SMALL | {"gpus": [{"uuid": "GPU-1"}]}, "$.gpus[0].uuid: expected str matching regex"),
        (SMALL | {"gpus": [{}, {"mig": []}]}, "$.gpus[1].mig_profiles: missing here and in $.gpu"),
        (SMALL | {"gpus": [{"mig_profiles": "a100"}]}, "$.gpus[0].mig_profiles: invalid enum value 'a100'"),
        (CUT | {"gpus": [{}, {"mig": "3g.20gb"}]}, "$.gpus[1].mig: expected array | null, got str"),
        (CUT | {"gpus": [{}, {"mig": ["3g.40gb"]}]}, "$.gpus[1].mig: 3g.40gb: no such MIG profile; there are 1g.5gb,"),
        (CUT | {"gpus": [{"mig": ["4g.20gb"] * 2}]}, "$.gpus[0].mig: 4g.20gb: 2 of them: a GPU has room for 1"),
        (SMALL | {"nvlink": {"links": 6, "pairs": "0-4:1"}}, "0-4:1: GPU 4: this node has GPUs 0 to 3"),
        (SMALL | {"nvlink": {"links": 6, "pairs": "0-1"}}, "0-1: a pair reads GPU-GPU:LINKS"),
        (SMALL | {"nvlink": {"links": 6, "pairs": "1-1:1"}}, "1-1:1: a GPU and itself"),
        (SMALL | {"nvlink": {"links": 6, "pairs": "0-1:1 1-0:1"}}, "1-0:1: this pair is there already"),
        (SMALL | {"nvlink": {"links": 6, "pairs": "0-1:7"}}, "GPU 0 has 6 links, and 7 are taken"),
        (SMALL | {"nvlink": {"links": 6, "pairs": ""}, "nvswitch": {"links": 6}}, "$.nvswitch: a node has nvlink or"),
        (
            SMALL | {"nvswitch": {"links": 6, "bus_ids": ["00000000:10:00.0"]}},
            "$.nvswitch.bus_ids[0]: 00000000:10:00.0",
        ),
        (SMALL | {"pcie": {"switch": [[0, 4]]}}, "$.pcie.switch[0]: GPU 4: this node has GPUs 0 to 3"),
        (SMALL | {"pcie": {"switch": [[0, 1], [1, 2]]}}, "$.pcie.switch[1]: GPU 1 is in another group"),
        (SMALL | {"dev": ["/dev/../etc/shadow"]}, "$.dev[0]: expected str matching regex"),
        (SMALL | {"dev": ["/etc/shadow"]}, "$.dev[0]: expected str matching regex"),
        (
            TWO | {"numa_distances": {0: [10, 21]}},
            "$.numa_distances.0: 2 distances: one for every node with a row is wanted, 1",
        ),
        (
            TWO | {"numa_distances": {0: [10, 21], 1: [21]}},
            "$.numa_distances.1: 1 distances: one for every node with a row is wanted, 2",
        ),
        (TWO | {"numa_distances": {0: [10, 21], 1: [10, 21]}}, "$.numa_distances.1[1]: 21: a node is 10 from itself"),
        (TWO | {"numa_distances": {0: [10]}}, "$.numa_distances: no row for NUMA node 1, which GPU 1 is on"),
        (TWO | {"numa_distances": {0: [10, 256], 1: [21, 10]}}, "$.numa_distances[...][1]: expected int <= 255"),
        (TWO | {"numa_distances": {0: [10, 9], 1: [21, 10]}}, "$.numa_distances[...][1]: expected int >= 10"),
        (TWO | {"numa_distances": {0: [10, 21.5], 1: [21, 10]}}, "$.numa_distances[...][1]: expected int, got float"),
        (TWO | {"numa_distances": {"a": [10]}}, "$.numa_distances: expected int, got str"),
        (TWO | {"numa_distances": {-1: [10]}}, "$.numa_distances: expected int >= 0"),
        (TWO | {"numa_distances": [[10, 21], [21, 10]]}, "$.numa_distances: expected object, got array"),
    ],
)
def test_a_fault_says_where(content, text):
    assert text in fault(content)


BLOCKS = {
    "$": lambda key: SMALL | {key: 1},
    "$.gpu": lambda key: SMALL | {"gpu": {"name": "x", key: 1}},
    "$.gpus[1]": lambda key: SMALL | {"gpus": [{}, {key: 1}]},
    "$.gpu.thresholds": lambda key: SMALL | {"gpu": {"thresholds": {key: 1}}},
    "$.gpu.fabric": lambda key: SMALL | {"gpu": {"fabric": {key: 1}}},
    "$.nvswitch": lambda key: SMALL | {"nvswitch": {"links": 1, key: 1}},
    "$.pcie": lambda key: SMALL | {"pcie": {key: 1}},
}


@given(st.sampled_from(sorted(BLOCKS)), st.text("abcxyz_-", min_size=1).map(lambda text: f"no_{text}"))
def test_an_unknown_key_is_refused_with_its_path(block, key):
    assert fault(BLOCKS[block](key)) == f"{block}.{key}: unknown key"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'hgx-h10'. Did you mean hgx-h100. There are: a100-mig-mixed, dgx-a100,"):
        profile.load("hgx-h10")
    with pytest.raises(ConfigError, match="no simulated node is called ''"):
        profile.load("")


def test_a_file_of_ones_own(tmp_path):
    as_yaml = tmp_path / "mine.yaml"
    as_yaml.write_text("count: 2\ngpu: {name: NVIDIA X, fields: {230: 0}}\nnvlink: {links: 2, pairs: 0-1:2}\n")
    node = profile.load(str(as_yaml))
    assert (node.name, len(node.gpus), node.gpus[0].fields) == ("mine", 2, {230: 0})
    as_json = tmp_path / "mine.json"
    as_json.write_text(json.dumps({"count": 2, "gpu": {"name": "NVIDIA X", "fields": {"230": 0}}}))
    assert profile.load(str(as_json)).gpus == node.gpus
    bare = tmp_path / "bare"
    bare.write_text("count: 1\nname: other\ngpu: {name: NVIDIA X}\n")
    assert profile.load(str(bare)).name == "other"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"gpus: [{name: x}, {}, {}, {minor: one}]", ": $.gpus[3].minor: expected int, got str"),
        (b"name: count: 8", ": line 1, column 12: mapping values are not allowed"),
        (b"name: \xff", ": not YAML: "),
        (b"name: 2026-99-99", ": not YAML: "),
        (b"gpus: [{pci_bus_id: 00000000:18:00.0}]", ": $.gpus[0].pci_bus_id: expected str, got float"),
    ],
)
def test_a_fault_in_a_file_names_the_file(tmp_path, content, text):
    path = tmp_path / "node.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        profile.load(str(path))
    assert str(caught.value).startswith(f"{path}{text}")


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml: No such file or directory"):
        profile.load(str(tmp_path / "none.yaml"))
