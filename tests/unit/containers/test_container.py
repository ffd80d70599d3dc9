import itertools
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_plugin.config.sharing import MPS, SharedResource
from gpu_plugin.containers.edits import (
    CONTROL_NODES,
    STRATEGIES,
    Access,
    ContainerEdits,
    MpsDirectories,
    container_edits,
)
from gpu_plugin.devices.device import Resource, whole_gpu
from gpu_plugin.devices.node import Gpu
from gpu_plugin.kubelet.feed import ListFeed
from gpu_plugin.kubelet.service import DevicePluginService
from gpu_plugin.kubelet.snapshot import ResourceView, SnapshotStore
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.runtime.pulse import Pulse

NAME = "nvidia.com/gpu"
H200 = whole_gpu(Gpu(uuid="GPU-2985e854-40cd-f248-81fa-d0a07042f66d", index=0, minor=0))
H200_CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
A = whole_gpu(Gpu(uuid="GPU-aaaa", index=1, minor=4))
B = whole_gpu(Gpu(uuid="GPU-bbbb", index=3, minor=6))
ROOT = "/var/run/nvidia-container-devices"
CDI = "k8s.device-plugin.nvidia.com"
KEY = re.compile(r"cdi\.k8s\.io/nvidia-device-plugin_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
NVIDIAS = ("cdi-annotations", "cdi-cri", "envvar", "volume-mounts")
SUBSETS = [subset for size in range(1, 5) for subset in itertools.permutations(NVIDIAS, size)]


def shown(edits: ContainerEdits) -> dict[str, Any]:
    """The edits in the form of the kubelet's message in JSON, without empty fields and without a false `readOnly`."""
    found: dict[str, Any] = {}
    if edits.envs:
        found["envs"] = dict(edits.envs)
    if edits.mounts:
        found["mounts"] = [
            {"containerPath": m.container_path, "hostPath": m.host_path} | ({"readOnly": True} if m.read_only else {})
            for m in edits.mounts
        ]
    if edits.devices:
        found["devices"] = [
            {"containerPath": d.container_path, "hostPath": d.host_path, "permissions": d.permissions}
            for d in edits.devices
        ]
    if edits.annotations:
        found["annotations"] = dict(edits.annotations)
    if edits.cdi_devices:
        found["cdiDevices"] = list(edits.cdi_devices)
    return found


def nodes(*paths, root=""):
    return [{"containerPath": path, "hostPath": f"{root}{path}", "permissions": "rw"} for path in paths]


# NVIDIA's plugin v0.20.0 as recorded on an H200 without nvidia-modeset


SPECS = nodes("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia0")


@pytest.mark.parametrize(
    ("access", "answer"),
    [
        pytest.param({}, {"envs": {"NVIDIA_VISIBLE_DEVICES": H200.id}}, id="envvar"),
        pytest.param(
            {"pass_device_specs": True}, {"envs": {"NVIDIA_VISIBLE_DEVICES": H200.id}, "devices": SPECS}, id="specs"
        ),
        pytest.param(
            {"pass_device_specs": True, "id_strategy": "index"},
            {"envs": {"NVIDIA_VISIBLE_DEVICES": "0"}, "devices": SPECS},
            id="index-specs",
        ),
        pytest.param(
            {"strategies": ("volume-mounts",)},
            {
                "envs": {"NVIDIA_VISIBLE_DEVICES": ROOT},
                "mounts": [{"containerPath": f"{ROOT}/{H200.id}", "hostPath": "/dev/null"}],
            },
            id="volume",
        ),
    ],
)
def test_an_h200_is_answered_as_nvidias_plugin_answers(access, answer):
    assert shown(container_edits([H200], Access(control_nodes=H200_CONTROL_NODES, **access))) == answer


# Its answers as its source gives them


def test_cdi_annotations_and_cdi_cri_with_a_feature():
    access = Access(strategies=("cdi-annotations", "cdi-cri"), features=("gdrcopy",), cdi_classes=("gdrcopy",))
    found = shown(container_edits([A], access))
    [(key, names)] = found.pop("annotations").items()
    assert KEY.fullmatch(key)
    assert names == f"{CDI}/gpu=GPU-aaaa,{CDI}/gdrcopy=all"
    assert found == {"envs": {"NVIDIA_GDRCOPY": "enabled"}, "cdiDevices": [f"{CDI}/gpu=GPU-aaaa", f"{CDI}/gdrcopy=all"]}


def test_device_specs_are_the_control_nodes_and_then_each_devices_own():
    access = Access(pass_device_specs=True, id_strategy="index", control_nodes=CONTROL_NODES)
    assert shown(container_edits([A, B], access)) == {
        "envs": {"NVIDIA_VISIBLE_DEVICES": "1,3"},
        "devices": nodes(
            "/dev/nvidiactl",
            "/dev/nvidia-uvm",
            "/dev/nvidia-uvm-tools",
            "/dev/nvidia-modeset",
            "/dev/nvidia4",
            "/dev/nvidia6",
        ),
    }


# Strategies together


@pytest.mark.parametrize("strategies", SUBSETS, ids=",".join)
def test_strategies_in_any_order_give_each_its_part_and_nothing_twice(strategies):
    access = Access(
        strategies=strategies,
        pass_device_specs=True,
        features=("gds",),
        cdi_classes=("gds",),
        imex_channels=(0,),
        control_nodes=CONTROL_NODES,
    )
    edits = container_edits([A, B], access)
    names = (f"{CDI}/gpu=GPU-aaaa", f"{CDI}/gpu=GPU-bbbb", f"{CDI}/imex-channel=0", f"{CDI}/gds=all")

    assert edits.envs["NVIDIA_GDS"] == "enabled"
    if "volume-mounts" in strategies:
        assert edits.envs["NVIDIA_VISIBLE_DEVICES"] == ROOT
        assert [(m.container_path, m.host_path, m.read_only) for m in edits.mounts] == [
            (f"{ROOT}/GPU-aaaa", "/dev/null", False),
            (f"{ROOT}/GPU-bbbb", "/dev/null", False),
            (f"{ROOT}/imex/0", "/dev/null", False),
        ]
    else:
        assert edits.envs.get("NVIDIA_VISIBLE_DEVICES") == ("GPU-aaaa,GPU-bbbb" if "envvar" in strategies else None)
        assert edits.mounts == ()
    assert edits.envs.get("NVIDIA_IMEX_CHANNELS") == ("0" if "envvar" in strategies else None)
    assert edits.cdi_devices == (names if "cdi-cri" in strategies else ())
    assert list(edits.annotations.values()) == ([",".join(names)] if "cdi-annotations" in strategies else [])
    assert bool(edits.devices) is bool({"envvar", "volume-mounts"} & set(strategies))

    assert container_edits([A, B], msgspec.structs.replace(access, strategies=strategies[::-1])) == edits
    assert_nothing_twice(edits)


def assert_nothing_twice(edits):
    for items in (
        [mount.container_path for mount in edits.mounts],
        [device.container_path for device in edits.devices],
        list(edits.cdi_devices),
        [name for names in edits.annotations.values() for name in names.split(",")],
        edits.envs.get("NVIDIA_VISIBLE_DEVICES", "").split(","),
    ):
        assert len(items) == len(set(items))


def test_two_devices_of_one_gpu_name_it_once():
    for strategies in SUBSETS:
        named_once(Access(strategies=strategies, pass_device_specs=True, control_nodes=CONTROL_NODES))


def named_once(access):
    assert container_edits([A, A], access) == container_edits([A], access)
    assert_nothing_twice(container_edits([A, B, A], access))


accesses = st.builds(
    Access,
    strategies=st.lists(st.sampled_from(sorted(STRATEGIES)), min_size=1, unique=True).map(tuple),
    id_strategy=st.sampled_from(["uuid", "index"]),
    pass_device_specs=st.booleans(),
    dev_root=st.sampled_from(["/", "/run/nvidia/driver"]),
    features=st.lists(st.sampled_from(["gdrcopy", "gds", "mofed"]), unique=True).map(tuple),
    cdi_classes=st.lists(st.sampled_from(["gdrcopy", "gds", "mofed"]), unique=True).map(tuple),
    imex_channels=st.sampled_from([(), (0,)]),
    control_nodes=st.just(CONTROL_NODES),
)


def service(access: Access) -> DevicePluginService:
    """Serves eight GPUs with this access."""
    store = SnapshotStore()
    resource = Resource(NAME, tuple(whole_gpu(Gpu(uuid=f"GPU-{i}", index=i, minor=7 - i)) for i in range(8)))
    store.publish({NAME: ResourceView.of(resource, access, Placement())})
    return DevicePluginService(ListFeed(NAME, store), store, Pulse())


@settings(max_examples=60, deadline=None)
@given(accesses, st.lists(st.integers(0, 7), min_size=1, max_size=12), st.randoms())
def test_the_same_devices_get_the_same_answer_in_any_order_however_often_named(access, wanted, random):
    ids = [f"GPU-{at}" for at in wanted]
    shuffled = ids + random.sample(ids, k=len(ids) // 2)
    random.shuffle(shuffled)
    once, often, again = service(access).allocate([sorted(set(ids)), shuffled, ids])
    assert once == often == again
    assert list(once.envs.items()) == list(often.envs.items())
    assert service(access).allocate([shuffled])[0] == once
    assert_nothing_twice(once)


# The annotation key


def key(devices, **more):
    [found] = container_edits(devices, Access(strategies=("cdi-annotations",), **more)).annotations
    return found


def test_the_annotation_key_tells_containers_with_different_devices_apart():
    assert len({key([A]), key([B]), key([A, B]), key([A], imex_channels=(0,)), key([A], id_strategy="index")}) == 5
    assert key([A]) == key([A])


def test_a_container_without_a_device_gets_no_annotation():
    assert container_edits([], Access(strategies=("cdi-annotations",))).annotations == {}


def test_the_annotation_key_has_the_prefix_asked_for_and_a_name_that_kubernetes_takes():
    found = key([A], annotation_prefix="runtime.example/")
    assert found.startswith("runtime.example/nvidia-device-plugin_")
    assert len(found.partition("/")[2]) <= 63


# The node's part


@pytest.mark.parametrize(
    ("dev_root", "host"),
    [("/", ""), ("", ""), ("/run/nvidia/driver", "/run/nvidia/driver"), ("/run/nvidia/driver/", "/run/nvidia/driver")],
)
def test_host_paths_lie_under_the_root_of_dev_and_container_paths_do_not(dev_root, host):
    access = Access(pass_device_specs=True, dev_root=dev_root, control_nodes=("/dev/nvidiactl",), imex_channels=(0,))
    assert shown(container_edits([A], access))["devices"] == nodes(
        "/dev/nvidiactl", "/dev/nvidia4", "/dev/nvidia-caps-imex-channels/channel0", root=host
    )


def test_host_paths_lie_under_the_root_where_each_node_was_found():
    roots = {"/dev/nvidia4": "/run/nvidia/driver"}
    access = Access(pass_device_specs=True, device_roots=roots, control_nodes=("/dev/nvidiactl",))
    assert {spec["hostPath"] for spec in shown(container_edits([A], access))["devices"]} == {
        "/dev/nvidiactl",
        "/run/nvidia/driver/dev/nvidia4",
    }


# MPS

MPS_ENTRY = SharedResource(NAME, NAME, 2, MPS)
MPS_ACCESS = Access(mps=MpsDirectories.of("/run/nvidia/mps", NAME))


def test_mps_is_reached_as_with_nvidias_plugin():
    replica = msgspec.structs.replace(A, id="GPU-aaaa::1", sharing=MPS_ENTRY)
    assert shown(container_edits([replica], MPS_ACCESS)) == {
        "envs": {"NVIDIA_VISIBLE_DEVICES": "GPU-aaaa", "CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe"},
        "mounts": [
            {
                "containerPath": "/mps/nvidia.com/gpu/pipe",
                "hostPath": "/run/nvidia/mps/nvidia.com/gpu/pipe",
                "readOnly": True,
            },
            {"containerPath": "/dev/shm", "hostPath": "/run/nvidia/mps/shm"},
        ],
    }


def test_mps_comes_with_every_strategy():
    replica = msgspec.structs.replace(A, id="GPU-aaaa::1", sharing=MPS_ENTRY)
    for strategy in STRATEGIES:
        edits = container_edits([replica], msgspec.structs.replace(MPS_ACCESS, strategies=(strategy,)))
        assert edits.envs["CUDA_MPS_PIPE_DIRECTORY"] == "/mps/nvidia.com/gpu/pipe"
        assert {"/mps/nvidia.com/gpu/pipe", "/dev/shm"} <= {mount.container_path for mount in edits.mounts}


def test_a_gpu_that_is_not_shared_has_nothing_of_mps():
    assert shown(container_edits([A], MPS_ACCESS)) == {"envs": {"NVIDIA_VISIBLE_DEVICES": "GPU-aaaa"}}
    sliced = msgspec.structs.replace(A, sharing=SharedResource(NAME, NAME, 2))
    assert shown(container_edits([sliced], MPS_ACCESS)) == {"envs": {"NVIDIA_VISIBLE_DEVICES": "GPU-aaaa"}}
