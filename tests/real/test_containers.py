"""What a container gets, with NVIDIA's real user-space driver: exactly the kubelet's answer, and nothing else on the host."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_plugin.simulation.stand_in_kubelet import StandInKubelet
from tests.node.daemon import GPU, DaemonProcess, healthy
from tests.real import archive
from tests.real.looking import DRIVER_NOT_LOADED, LOOK, NO_DEVICE, NODE
from tests.real.podman import Podman


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
