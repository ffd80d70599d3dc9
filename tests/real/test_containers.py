"""A container gets exactly the contents of the kubelet's answer, with NVIDIA's real user-space driver."""

import json
import os
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tests.node.daemon import GPU, DaemonProcess, healthy
from tests.real import archive
from tests.real.looking import DRIVER_NOT_LOADED, LOOK, NO_DEVICE, NODE


@pytest.fixture(params=["debian", "installer"])
def driver_root(request, nvidia, tmp_path) -> Path:
    """A driver root with NVIDIA's libraries, with the layout of Debian and of the .run installer."""
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


async def test_containers_side_by_side_have_a_working_user_space_and_their_own_gpus_alone(
    kubelet, daemon, podman, tmp_path
):
    specs = tmp_path / "cdi"
    asked = {"one": GPU, "other": GPU, "large": "nvidia.com/mig-3g.20gb", "small": "nvidia.com/mig-2g.10gb"}
    for resource in set(asked.values()):
        await kubelet.wait_for(healthy(kubelet, 2 if resource == GPU else 1, resource))
    seen: dict[str, dict[str, Any]] = {}

    async def look(pod: str, names: tuple[str, ...]) -> None:
        seen[pod] = json.loads(await anyio.to_thread.run_sync(podman.python, specs, names, LOOK))

    async with anyio.create_task_group() as containers:
        for pod, resource in asked.items():
            response = (await kubelet.admit(pod, {resource: 1})).allocations[0].response
            assert (response.envs, response.mounts, response.devices, response.annotations) == ({}, (), (), {})
            containers.start_soon(look, pod, response.cdi_devices)
    for each in seen.values():
        assert (each["cuda"], each["nvml"]) == (NO_DEVICE, DRIVER_NOT_LOADED)
        assert each["variables"] == {"NVIDIA_VISIBLE_DEVICES": "void"}
        assert (each["cache"], each["program"], each["version"]) == (False, True, 12020)  # no ldconfig was run
        assert all(path.startswith("/usr/lib") for path in each["loaded"])
        assert common(each["nodes"]) == {
            "/dev/nvidiactl": [195, 255, "0o666"],
            "/dev/nvidia-modeset": [195, 254, "0o666"],
            "/dev/nvidia-uvm": [238, 0, "0o666"],
            "/dev/nvidia-uvm-tools": [238, 1, "0o666"],
        }
    own = {
        pod: {path: number for path, number in each["nodes"].items() if path not in common(each["nodes"])}
        for pod, each in seen.items()
    }
    whole = {"/dev/nvidia0": [195, 0, "0o666"], "/dev/nvidia2": [195, 2, "0o666"]}
    assert len(own["one"]) == len(own["other"]) == 1
    assert own["one"] | own["other"] == whole
    assert own["large"].pop("/dev/nvidia1") == own["small"].pop("/dev/nvidia1") == [195, 1, "0o666"]
    assert (
        len(own["large"]) == len(own["small"]) == 2
    )  # the capabilities of the GPU instance and of the compute instance
    assert not own["large"].keys() & own["small"].keys()
    assert {path.rpartition("/")[0] for path in (*own["large"], *own["small"])} == {"/dev/nvidia-caps"}


PROBE = """
import errno, json, os
def tried():
    try:
        os.close(os.open("/tmp/nvidia-mps/new", os.O_WRONLY | os.O_CREAT))
    except OSError as error:
        return errno.errorcode[error.errno]
    return ""
there = os.listdir("/tmp/nvidia-mps") if os.path.lexists("/tmp/nvidia-mps") else None
print(json.dumps([there, tried(), os.path.exists("/usr/lib64/libcuda.so.1")]))
"""


async def test_what_a_user_of_the_node_puts_in_the_place_of_the_mps_directory_is_in_no_container(
    kubelet, daemon, driver_root, podman, tmp_path
):
    """`ln -s /etc /tmp/nvidia-mps` on a node whose root is the driver root, while the plugin runs; then root's directory."""
    (driver_root / "etc").mkdir(exist_ok=True)
    (driver_root / "etc/secret").touch()
    (driver_root / "tmp").mkdir()
    (driver_root / "tmp").chmod(0o1777)
    pipe = driver_root / "tmp/nvidia-mps"
    await kubelet.wait_for(healthy(kubelet, 2))

    async def look(pod: str) -> list[Any]:
        names = (await kubelet.admit(pod, {GPU: 1})).allocations[0].response.cdi_devices
        kubelet.release(pod)
        printed = await anyio.to_thread.run_sync(podman.python, tmp_path / "cdi", names, PROBE)
        found: list[Any] = json.loads(printed)
        return found

    pipe.symlink_to("/etc")
    os.lchown(pipe, 1000, 1000)
    await daemon.said("/tmp/nvidia-mps in the driver root")
    assert await look("attacked") == [None, "ENOENT", True]
    pipe.unlink()
    pipe.mkdir()
    (pipe / "control").touch()
    (spec,) = (tmp_path / "cdi").glob("*-gpu.json")
    with anyio.fail_after(20):
        while "/tmp/nvidia-mps" not in spec.read_text():
            await anyio.sleep(0.05)
    assert await look("served") == [["control"], "EROFS", True]
