"""A container has access to the GPUs that the kubelet gave it, and to no other GPUs."""

import os

from .harness.cluster import Cluster
from .harness.plugin import GPUS
from .harness.pods import GPU_DEVICE

DEVICE_MOUNTS = "/var/run/nvidia-container-devices"
CONTROL_DEVICES = {"nvidiactl", "nvidia-uvm"}


def test_the_environment_names_exactly_the_gpus_given(cluster: Cluster) -> None:
    pod = cluster.pods.run("two", gpus=2)
    seen = cluster.pods.execute(pod, "sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES").strip().split(",")
    assert len(seen) == 2
    assert set(seen) == set(pod.device_health)
    assert all(device_id.startswith("GPU-") for device_id in seen)


def test_dev_holds_exactly_the_devices_given(cluster: Cluster, numbers: dict[str, int]) -> None:
    pod = cluster.pods.run("two", gpus=2)
    found = cluster.pods.execute(pod, "find", "/dev", "-name", "nvidia*", "-type", "c").split()
    names = {path.removeprefix("/dev/") for path in found}
    given = {f"nvidia{numbers[device_id]}" for device_id in pod.device_health}
    assert {name for name in names if GPU_DEVICE.fullmatch(name)} == given
    assert names >= CONTROL_DEVICES


def test_a_pod_without_gpus_finds_none(cluster: Cluster) -> None:
    pod = cluster.pods.run("none", gpus=0)
    assert cluster.pods.devices(pod) == {}
    assert "NVIDIA_VISIBLE_DEVICES" not in cluster.pods.environment(pod)


def test_the_gpu_of_another_pod_cannot_be_opened(cluster: Cluster) -> None:
    mine, other = cluster.pods.run("mine", gpus=1), cluster.pods.run("other", gpus=1)
    (own,), (foreign,) = cluster.pods.gpu_numbers(mine), cluster.pods.gpu_numbers(other)
    device = cluster.pods.devices(other)[f"nvidia{foreign}"]
    # Root in a container may create any device file, but the device cgroup prevents the open. A simulated GPU has no driver, so
    # the open of the pod's own GPU fails with another error, or succeeds.
    attempt = (
        f"mknod /tmp/foreign c {os.major(device)} {os.minor(device)}; "
        f"for each in /dev/nvidia{own} /tmp/foreign; do echo $(: 2>&1 < $each); done"
    )
    allowed, refused = cluster.pods.execute(mine, "sh", "-c", attempt).splitlines()
    assert "Operation not permitted" not in allowed
    assert "Operation not permitted" in refused


def test_all_gpus_in_one_pod(cluster: Cluster, numbers: dict[str, int]) -> None:
    pod = cluster.pods.run("all", gpus=GPUS)
    assert set(pod.device_health) == set(numbers)
    assert cluster.pods.gpu_numbers(pod) == set(range(GPUS))


def test_gpus_of_one_pod_lie_close_together(cluster: Cluster) -> None:
    # The simulated node has GPUs 0 to 3 on one NUMA node and 4 to 7 on the other, and the kubelet without a plugin's advice picks
    # at random.
    for count in (2, 4, 2):
        pod = cluster.pods.run(f"close-{len(cluster.pods.all())}", gpus=count)
        assert len({number // 4 for number in cluster.pods.gpu_numbers(pod)}) == 1


def test_mounts_name_the_gpus_given_under_volume_mounts(cluster: Cluster) -> None:
    cluster.plugin.extra = ("--device-list-strategy=volume-mounts",)
    cluster.plugin.restart()
    cluster.wait_allocatable(GPUS)
    pod = cluster.pods.run("two", gpus=2)
    assert cluster.pods.environment(pod)["NVIDIA_VISIBLE_DEVICES"] == DEVICE_MOUNTS
    assert set(cluster.pods.execute(pod, "ls", DEVICE_MOUNTS).split()) == set(pod.device_health)
