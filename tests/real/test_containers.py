"""What a container gets, with NVIDIA's real user-space driver: exactly the kubelet's answer, and nothing else on the host."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_plugin.simulation.stand_in_kubelet import StandInKubelet
from tests.node.daemon import GPU, DaemonProcess, healthy
from tests.real import archive
from tests.real.podman import Podman

NODE = """\
name: real-driver
driver_version: {version}
count: 2
gpu: {{name: NVIDIA A100-SXM4-40GB, architecture: 7, memory_bytes: 42949672960, mig_mode: [0, 0], mig_profiles: a100-40gb}}
gpus: [{{}}, {{mig: [3g.20gb, 2g.10gb]}}]
dev: [/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia-uvm-tools, /dev/nvidia-modeset]
"""

NO_DEVICE, DRIVER_NOT_LOADED = 100, 9
"""CUDA_ERROR_NO_DEVICE and NVML_ERROR_DRIVER_NOT_LOADED: a whole user space that misses nothing but the kernel's half."""

LOOK = """\
import ctypes, json, os, stat
cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
version = ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(version))
ctypes.CDLL("libcuda.so"), ctypes.CDLL("libnvidia-ptxjitcompiler.so.1")
numbers = {}
for place, _, names in os.walk("/dev"):
    for name in names:
        if name.startswith("nvidia"):
            status = os.stat(f"{place}/{name}")
            if stat.S_ISCHR(status.st_mode):
                numbers[f"{place}/{name}"] = [os.major(status.st_rdev), os.minor(status.st_rdev), oct(status.st_mode & 0o777)]
loaded = sorted({line.split()[-1] for line in open("/proc/self/maps") if "libcuda" in line})
print(json.dumps({
    "cuda": cuda.cuInit(0), "nvml": nvml.nvmlInit_v2(), "version": version.value, "nodes": numbers, "loaded": loaded,
    "variables": {name: value for name, value in os.environ.items() if "NVIDIA" in name or name.startswith("LD_")},
    "cache": os.path.exists("/etc/ld.so.cache"), "program": os.access("/usr/bin/nvidia-smi", os.X_OK),
}))
"""


@pytest.fixture(params=["debian", "installer"])
def driver_root(request, nvidia, tmp_path) -> Path:
    """A driver root with NVIDIA's libraries, as Debian lays it out and as the .run installer does."""
    del nvidia
    make = archive.debian_root if request.param == "debian" else archive.installer_root
    return make(tmp_path / "driver")


@pytest.fixture
def daemon(directory, tmp_path, driver_root):
    node = tmp_path / "node.yaml"
    node.write_text(NODE.format(version=archive.version(archive.unpacked())))
    made = DaemonProcess(directory, profile=str(node))
    made.start(
        *("--driver-root", str(driver_root), "--driver-root-ctr-path", "/nowhere", "--mig-strategy", "mixed"),
        *("--device-list-strategy", "cdi-cri", "--cdi-dir", str(tmp_path / "cdi")),
    )
    yield made
    made.kill()


def common(numbers: dict[str, list[object]]) -> dict[str, list[object]]:
    return {
        path: numbers[path]
        for path in ("/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
    }


async def looks(kubelet: StandInKubelet, podman: Podman, specs: Path, pod: str, resource: str) -> dict[str, Any]:
    """What a container sees that is run with exactly what the kubelet was answered for it."""
    response = (await kubelet.admit(pod, {resource: 1})).allocations[0].response
    assert (response.envs, response.mounts, response.devices, response.annotations) == ({}, (), (), {})
    found: dict[str, Any] = json.loads(podman.python(specs, response.cdi_devices, LOOK))
    return found


async def test_a_container_has_a_working_user_space_and_its_own_gpus_alone(kubelet, daemon, podman, tmp_path):
    specs = tmp_path / "cdi"
    await kubelet.wait_for(healthy(kubelet, 1))
    await kubelet.wait_for(healthy(kubelet, 1, "nvidia.com/mig-3g.20gb"))
    await kubelet.wait_for(healthy(kubelet, 1, "nvidia.com/mig-2g.10gb"))
    whole = await looks(kubelet, podman, specs, "whole", GPU)
    large = await looks(kubelet, podman, specs, "large", "nvidia.com/mig-3g.20gb")
    small = await looks(kubelet, podman, specs, "small", "nvidia.com/mig-2g.10gb")
    for seen in (whole, large, small):
        assert (seen["cuda"], seen["nvml"]) == (NO_DEVICE, DRIVER_NOT_LOADED)
        assert seen["variables"] == {"NVIDIA_VISIBLE_DEVICES": "void"}
        assert (seen["cache"], seen["program"], seen["version"]) == (False, True, 12020)  # no ldconfig was run
        assert all(path.startswith("/usr/lib") for path in seen["loaded"])
        assert common(seen["nodes"]) == {
            "/dev/nvidiactl": [195, 255, "0o666"],
            "/dev/nvidia-modeset": [195, 254, "0o666"],
            "/dev/nvidia-uvm": [238, 0, "0o666"],
            "/dev/nvidia-uvm-tools": [238, 1, "0o666"],
        }
    own = [
        {path: n for path, n in each["nodes"].items() if path not in common(each["nodes"])}
        for each in (whole, large, small)
    ]
    assert own[0] == {"/dev/nvidia0": [195, 0, "0o666"]}
    assert own[1].pop("/dev/nvidia1") == own[2].pop("/dev/nvidia1") == [195, 1, "0o666"]
    assert len(own[1]) == len(own[2]) == 2  # the GPU instance's and the compute instance's capability
    assert not own[1].keys() & own[2].keys()
    assert {path.rpartition("/")[0] for path in (*own[1], *own[2])} == {"/dev/nvidia-caps"}
