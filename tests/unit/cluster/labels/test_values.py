"""The values of labels: equal to GPU Feature Discovery's, and always valid for Kubernetes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_plugin.cluster.labels.values import HostFacts, VgpuHost, labels_of, sanitised, stamped, valid
from gpu_plugin.config.names import TIMESTAMP
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.sharing import NamePattern, SharedResource
from gpu_plugin.devices.node import Engines, Gpu, MigDevice, Node
from gpu_plugin.nvml.links import clique
from gpu_plugin.nvml.traits import probe_gpu
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost
from tests.unit.cluster.labels.recorded import (
    BY_MPS,
    COMPUTE,
    GRAPHICS,
    LISTED,
    MIXED,
    MODEL,
    RULES,
    SINGLE,
    cut,
    host,
    whole,
)

DEFAULTS = resolve({}, {})
VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


UNKNOWN = HostFacts()


def told(node, facts=UNKNOWN, **settings):
    """The labels, by their names without the domain."""
    labels = labels_of(node, replace(DEFAULTS, **settings), facts)
    assert all(key.startswith("nvidia.com/") for key in labels)
    return {key.removeprefix("nvidia.com/"): value for key, value in labels.items()}


@pytest.mark.parametrize("case", LISTED, ids=lambda case: case.name)
def test_a_real_node_has_the_labels_that_it_was_seen_with(case):
    labels = told(case.node, case.host, **case.settings)
    assert {key: labels.get(key) for key in (case.labels if case.some else labels)} == case.labels


@pytest.mark.parametrize("case", RULES, ids=lambda case: case.name)
def test_each_rule_of_gpu_feature_discovery_holds(case):
    labels = told(case.node, case.host, **case.settings)
    of_every_node = {
        "gpu.present": "true",
        "gpu.machine": "unknown",
        "gpu.mode": "unknown",
        "mig.capable": "false",
        "mps.capable": "false",
        "vgpu.present": "false",
    }
    expected = case.labels if case.some else of_every_node | case.labels
    assert {key: labels.get(key) for key in (expected if case.some else labels)} == expected


def test_without_a_gpu_there_is_nothing_but_that_there_is_no_vgpu():
    assert told(Node()) == {"vgpu.present": "false"}
    assert told(Node((whole(model="DGX Display"),))) == {"vgpu.present": "false"}


def test_of_several_models_one_speaks_always_the_same():
    first, second = (Gpu(f"GPU-{at}", at, model="T4", memory_bytes=15 << 30) for at in (0, 3))
    others = [Gpu(f"GPU-{at}", at, model="A10", memory_bytes=23 << 30) for at in (1, 2)]
    labels = told(Node((*others, second, first)))  # a tie: the model of the lowest index
    assert (labels["gpu.product"], labels["gpu.count"], labels["gpu.memory"]) == ("T4", "2", "15360")
    labels = told(Node((first, *others)))
    assert (labels["gpu.product"], labels["gpu.count"], labels["gpu.memory"]) == ("A10", "2", "23552")
    labels = told(Node((cut(1, model="A10"), cut(2, model="A10"), first)))  # a whole GPU has priority
    assert (labels["gpu.product"], labels["gpu.count"], labels["gpu.replicas"]) == ("T4", "1", "1")


def test_gpus_that_the_operator_excludes_are_not_counted_and_the_gone_are():
    gpus = (whole(0), whole(1), replace(whole(2), unreadable="lost"), Gpu("GPU-unreadable-3", 3, unreadable="hangs"))
    assert told(Node(gpus))["gpu.count"] == "3"
    assert told(Node(gpus), exclude_gpus=("1",))["gpu.count"] == "2"
    assert told(Node(gpus), exclude_gpus=("*",)) == {"vgpu.present": "false"}


def test_resources_under_names_of_the_operators_own_have_the_same_labels_and_their_own_sharing():
    named = {"gpu_names": (NamePattern("*", "nvidia.com/mock"),)}
    shared = (SharedResource("nvidia.com/mock", "nvidia.com/mock", 3),)
    labels = told(Node((whole(),)), sharing=shared, **named)
    assert (labels["gpu.product"], labels["gpu.replicas"]) == (f"{MODEL}-SHARED", "3")
    assert told(Node((whole(),)), sharing=shared)["gpu.replicas"] == "1"
    slices = {"mig_names": (NamePattern("1g.*", "nvidia.com/small"),), **MIXED}
    shared = (SharedResource("nvidia.com/small", "nvidia.com/small", 2),)
    labels = told(Node((cut(0, (1, 1)),)), sharing=shared, **slices)
    assert (labels["mig-1g.100gb.replicas"], labels["mig-1g.100gb.count"]) == ("2", "1")


def test_mps_is_nothing_for_gpus_in_mig_mode():
    assert told(Node((whole(), cut(1, (1, 1)))), **BY_MPS)["mps.capable"] == "false"


@pytest.mark.parametrize(
    ("version", "parts"),
    [("455.06", ("455", "06", "")), ("580.159.04", ("580", "159", "04")), ("580", None), ("1.2.3.4", None), ("", None)],
)
def test_a_driver_s_version_has_two_numbers_or_three(version, parts):
    labels = told(Node((whole(),), driver_version=version))
    new, old = ("major", "minor", "revision"), ("major", "minor", "rev")
    for prefix, names in (("cuda.driver-version", new), ("cuda.driver", old)):
        assert tuple(labels.get(f"{prefix}.{name}") for name in names) == (parts or (None, None, None))
    assert labels.get("cuda.driver-version.full") == (version if parts else None)
    assert not any(key.startswith("cuda.runtime") for key in labels)


@pytest.mark.parametrize(("capability", "family"), [
    ((5, 2), "maxwell"), ((6, 1), "pascal"), ((7, 2), "volta"), ((7, 5), "turing"), ((8, 6), "ampere"),
    ((8, 9), "ada-lovelace"), ((9, 0), "hopper"), ((10, 3), "blackwell"), ((12, 1), "blackwell"), ((13, 0), "rubin"),
    ((11, 0), "undefined"),
])  # fmt: skip
def test_the_family_is_the_compute_capability_s(capability, family):
    labels = told(Node((replace(whole(), compute_capability=capability),)))
    assert labels["gpu.family"] == family
    assert (labels["gpu.compute.major"], labels["gpu.compute.minor"]) == tuple(map(str, capability))


def test_what_the_driver_does_not_tell_is_left_out():
    labels = told(Node((Gpu("GPU-0", 0, model="Orin (nvgpu)"),)))
    assert labels["gpu.product"] == "Orin-nvgpu"
    assert not {"gpu.memory", "gpu.family", "gpu.compute.major", "gpu.clique"} & labels.keys()
    labels = told(Node((Gpu("all", 0),)))  # Windows' GPUs as Linux sees them
    assert labels["gpu.present"] == "true"
    assert "gpu.count" not in labels
    slice_ = MigDevice("MIG-0", 0, 1, 0, "1g.5gb")
    labels = told(Node((replace(cut(0), mig_devices=(slice_,)),)), **MIXED)
    assert {key for key in labels if key.startswith("mig-")} == {
        f"mig-1g.5gb.{name}" for name in ("product", "count", "replicas", "sharing-strategy")
    }


def test_the_mode_is_that_of_all_gpus_or_unknown():
    two = Node(tuple(replace(whole(at), pci_bus_id=f"00000000:{at:02X}:00.0") for at in range(2)))
    assert told(two, host("", COMPUTE))["gpu.mode"] == "compute"
    assert told(two, host("", GRAPHICS))["gpu.mode"] == "graphics"
    assert told(two, host("", 0x120000))["gpu.mode"] == "unknown"
    assert told(two, HostFacts(pci_classes={"00000000:00:00.0": COMPUTE}))["gpu.mode"] == "unknown"
    assert told(two, host("", COMPUTE))["gpu.machine"] == ""


def test_the_clique_is_of_the_cluster_and_the_same_for_all():
    one, other = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1", "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.2"
    node = Node((whole(0), whole(1)))
    assert told(replace(node, cliques={"GPU-0": one}))["gpu.clique"] == one
    for cliques in ({"GPU-0": one, "GPU-1": other}, {"GPU-0": clique(None)}, {"GPU-0": "nvswitch.7"}, {}):
        assert "gpu.clique" not in told(replace(node, cliques=cliques))


def test_a_compute_instance_smaller_than_its_gpu_instance_and_media_engines_have_labels_too():
    slices = tuple(MigDevice(f"MIG-{p}", 0, 1, 0, p) for p in ("1c.3g.20gb", "1g.5gb+me", "1g.5gb+me,gfx"))
    labels = told(Node((replace(cut(0), mig_devices=slices),)), **MIXED)
    assert labels["mig-1c.3g.20gb.product"] == f"{MODEL}-MIG-1c.3g.20gb"
    assert labels["mig-1g.5gb.me.product"] == f"{MODEL}-MIG-1g.5gb.me"
    assert not any("," in key for key in labels)


@pytest.mark.parametrize("name", profile.names())
@pytest.mark.parametrize("strategy", ["none", "single", "mixed"])
def test_simulated_nodes_have_every_label_that_goes_with_their_hardware(name, strategy):
    simulated = SimulatedNode(profile.load(name))
    driver, host_ = SimulatedDriver(simulated), SimulatedHost(simulated)
    driver.open()
    gpus = tuple(probe_gpu(driver, host_, at)[1] for at in range(driver.device_count()))
    node = Node(gpus, driver_version=driver.driver_version(), cuda_version=driver.cuda_version())
    classes = {gpu.pci_bus_id: host_.pci_class(gpu.pci_bus_id) or 0 for gpu in gpus}
    labels = told(node, HostFacts(host_.machine(), classes), mig_strategy=strategy)
    assert labels["gpu.mode"] == "compute"
    assert labels["gpu.family"] in {"volta", "turing", "ampere", "ada-lovelace", "hopper", "blackwell"}
    assert labels["cuda.runtime-version.full"] == "13.0"
    assert int(labels["gpu.count"]) > 0 or labels["gpu.product"].endswith("-MIG-INVALID")
    if strategy == "mixed" and any(gpu.mig_enabled for gpu in gpus):
        profiles = {mig.profile.replace("+", ".") for gpu in gpus for mig in gpu.mig_devices}
        for each in profiles:
            assert int(labels[f"mig-{each}.multiprocessors"]) >= 14
            assert int(labels[f"mig-{each}.slices.gi"]) >= int(labels[f"mig-{each}.slices.ci"])


def test_names_are_sanitised_as_gpu_feature_discovery_does_it():
    assert sanitised("Quadro RTX 6000/8000") == "Quadro-RTX-60008000"
    assert sanitised("NVIDIA  H100 80GB  HBM3 ") == "NVIDIA-H100-80GB-HBM3"
    assert sanitised("VMware7,1") == "VMware71"
    assert sanitised("日本") == ""


def test_a_value_is_cut_to_what_kubernetes_takes():
    assert valid("a" * 62 + "-b") == "a" * 62
    assert valid("-Rev. A.") == "Rev.-A"
    assert valid("(?)") == ""


anything = st.text(max_size=90)
small = st.integers(0, 20)
optional = st.none() | small
engines = st.none() | st.builds(Engines, *[small] * 6)
slices = st.builds(MigDevice, anything, small, small, small, anything, st.booleans(), *[optional] * 5, engines)
gpu = st.builds(
    Gpu,
    anything,
    small,
    model=anything,
    memory_bytes=optional,
    compute_capability=st.none() | st.tuples(small, small),
    mig_capable=st.booleans(),
    mig_enabled=st.booleans(),
    mig_devices=st.lists(slices, max_size=3).map(tuple),
)
hosts = st.builds(HostFacts, st.none() | anything, vgpu=st.none() | st.builds(VgpuHost, anything, anything))


@given(
    st.lists(gpu, max_size=4).map(tuple),
    anything,
    anything,
    st.none() | st.tuples(small, small),
    hosts,
    st.sampled_from([{}, SINGLE, MIXED]),
)
def test_whatever_is_known_of_a_node_every_label_is_one_that_kubernetes_takes(
    gpus, clique_id, driver, cuda, facts, settings
):
    cliques = {each.uuid: clique_id for each in gpus}
    node = Node(gpus, {}, driver, frozenset(), cliques, cuda)
    for key, value in labels_of(node, replace(DEFAULTS, **settings), facts).items():
        prefix, _, name = key.partition("/")
        assert prefix == "nvidia.com"
        assert NAME.fullmatch(name)
        assert VALUE.fullmatch(value)


def test_the_timestamp_says_since_when_the_others_are_what_they_are():
    labels = {"nvidia.com/gpu.count": "1"}
    first = stamped(labels, {}, 1594644571.9)
    assert first == {**labels, TIMESTAMP: "1594644571"}
    assert stamped(labels, first, 1600000000) == first
    assert stamped({"nvidia.com/gpu.count": "2"}, first, 1600000000)[TIMESTAMP] == "1600000000"
    assert stamped(labels, labels, 1600000000)[TIMESTAMP] == "1600000000"
