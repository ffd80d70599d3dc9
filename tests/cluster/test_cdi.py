"""Pods that get their GPUs by CDI name, with the kubelet, containerd and NVIDIA's real user-space driver."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.needed import found
from tests.real import archive
from tests.real.looking import DRIVER_NOT_LOADED, LOOK, NO_DEVICE, NODE

from .harness.cluster import Cluster
from .harness.image import write_directory
from .harness.plugin import RESOURCE
from .harness.pods import Pod
from .harness.wait import expect, wait_until

IMAGE = "localhost/gpu-plugin-e2e/debian:1"
SPEC = "k8s.device-plugin.nvidia.com-gpu.json"
LARGE, SMALL = "nvidia.com/mig-3g.20gb", "nvidia.com/mig-2g.10gb"
AS_BUILT = {RESOURCE: 2, LARGE: 1, SMALL: 1}


@pytest.fixture(params=["cdi-cri", "cdi-annotations"])
def by_name(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """The cluster with a daemon that returns GPUs by CDI name, and with Debian's driver files on its node."""
    found(archive.unpacked)
    root, system = archive.debian_root(tmp_path / "driver"), found(archive.debian_system)
    write_directory(tmp_path / "image.tar", IMAGE, system)
    cluster.containerd.import_archive(tmp_path / "image.tar")
    node = tmp_path / "real-driver.yaml"
    node.write_text(NODE.format(version=archive.version(archive.unpacked())))
    cluster.plugin.simulate = str(node)
    cluster.plugin.extra = (
        f"--device-list-strategy={request.param}",
        f"--cdi-dir={cluster.layout.cdi}",
        f"--driver-root={root}",
        "--driver-root-ctr-path=/nowhere",
        "--mig-strategy=mixed",
        "--cdi-remove-on-exit",
    )
    cluster.plugin.restart()
    cluster.wait_offers(AS_BUILT)
    yield cluster
    cluster.pods.delete_all()


def look(cluster: Cluster, pod: Pod) -> dict[str, Any]:
    """Run LOOK in the pod's container and return its result."""
    seen: dict[str, Any] = json.loads(cluster.pods.execute(pod, "/usr/bin/python3", "-c", LOOK))
    return seen


def test_pods_have_a_working_user_space_and_a_repartition_takes_nothing_from_them(by_name: Cluster) -> None:
    whole = by_name.pods.run("whole", gpus=1, image=IMAGE)
    held = by_name.pods.run("held", gpus=1, resource=LARGE, image=IMAGE, restart="Always")
    before = {pod.name: look(by_name, pod) for pod in (whole, held)}
    for seen in before.values():
        assert (seen["cuda"], seen["nvml"]) == (NO_DEVICE, DRIVER_NOT_LOADED)
        assert seen["variables"] == {"NVIDIA_VISIBLE_DEVICES": "void"}
        assert not seen["cache"]
    assert len({"/dev/nvidia0", "/dev/nvidia2"} & before["whole"]["nodes"].keys()) == 1
    assert "/dev/nvidia1" not in before["whole"]["nodes"]
    assert len([path for path in before["held"]["nodes"] if "/nvidia-caps/" in path]) == 2

    # One slice is removed and two slices are added. The large slice is the same instance as before.
    spec = by_name.layout.cdi / SPEC
    written = json.loads(spec.read_text())
    by_name.plugin.fault(1, "--mig=3g.20gb,1g.5gb,1g.5gb")
    by_name.wait_offers({RESOURCE: 2, LARGE: 1, "nvidia.com/mig-1g.5gb": 2}, within=20)
    names = {device["name"] for device in json.loads(spec.read_text())["devices"]}
    assert names > {name for pod in (whole, held) for name in pod.device_health}
    assert names != {device["name"] for device in written["devices"]}
    for pod in (whole, held):
        now = by_name.pods.get(pod.name)
        assert (now.running, now.restarts, now.container_id) == (True, 0, pod.container_id)
        assert look(by_name, pod) == before[pod.name]

    # A restarted container gets the same devices: the kubelet uses its stored answer, and the runtime the present specification.
    by_name.pods.signal(held, signal.SIGKILL)

    def again() -> Pod:
        pod = by_name.pods.get("held")
        expect(holds=pod.running and pod.restarts == 1, seen=pod)
        return pod

    assert look(by_name, wait_until(again, "the container runs again", within=60)) == before["held"]
    new = by_name.pods.run("new", gpus=1, resource="nvidia.com/mig-1g.5gb", image=IMAGE)
    nodes = look(by_name, new)["nodes"]
    assert "/dev/nvidia1" in nodes
    assert not {path for path in nodes if "caps" in path} & {path for path in before["held"]["nodes"] if "caps" in path}
