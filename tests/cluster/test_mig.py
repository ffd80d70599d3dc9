"""MIG devices of a node whose GPUs are repartitioned under running pods."""

from collections.abc import Iterator

import pytest

from .harness.cluster import Cluster
from .harness.plugin import RESOURCE
from .harness.wait import expect, wait_until

SIMULATED_NODE = "a100-mig-mixed"


def slices(profile: str) -> str:
    """Return the resource name of a MIG profile."""
    return f"nvidia.com/mig-{profile}"


LARGE, MIDDLE, SMALL, MEDIA = (slices(profile) for profile in ("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb.me"))
PARTS = {slices("1c.3g.20gb"): 1, slices("2c.3g.20gb"): 1}
WHOLE, HALF = slices("7g.40gb"), slices("4g.20gb")

# GPUs 0 to 3 are whole. GPU 4 has seven small slices, 5 two large, 6 one of each of the four kinds, 7 one large and two parts.
AS_BUILT = {RESOURCE: 4, LARGE: 4, MIDDLE: 1, SMALL: 8, MEDIA: 1, **PARTS}
VARIED, PARTED = 6, 7


@pytest.fixture
def sliced(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with a daemon that serves a node with MIG under strategy mixed; the kubelet must live through the test."""
    cluster.plugin.simulate = SIMULATED_NODE
    cluster.plugin.extra = ("--mig-strategy=mixed",)
    cluster.plugin.restart()
    cluster.wait_offers(AS_BUILT)
    yield cluster
    assert not cluster.kubelet.crashed
    cluster.kubelet.check_ready()


def wait_capacity(cluster: Cluster, resource: str, count: int) -> None:
    """Wait until `count` devices of a resource are listed, healthy or not."""

    def listed() -> None:
        resources = cluster.node_resources()
        expect(holds=resources.get(resource, (0, 0))[0] == count, seen=f"(capacity, allocatable) {resources}")

    wait_until(listed, f"{count} of {resource} are listed", within=30)


def test_a_container_has_its_slice_and_the_capabilities_of_it(sliced: Cluster) -> None:
    pod = sliced.pods.run("one", gpus=1, resource=MIDDLE)
    (device_id,) = pod.device_health
    assert device_id.startswith("MIG-")
    assert sliced.pods.environment(pod)["NVIDIA_VISIBLE_DEVICES"] == device_id
    assert sliced.pods.gpu_numbers(pod) == {VARIED}
    # one capability for the GPU instance and one for the compute instance
    assert len(sliced.pods.execute(pod, "find", "/dev/nvidia-caps", "-type", "c").split()) == 2


def test_another_gpu_is_cut_anew_under_a_running_pod(sliced: Cluster) -> None:
    pod = sliced.pods.run("holder", gpus=1, resource=MIDDLE)
    sliced.plugin.fault(PARTED, f"--mig={WHOLE.removeprefix(slices(''))}")
    sliced.wait_offers({RESOURCE: 4, LARGE: 3, MIDDLE: 1, SMALL: 8, MEDIA: 1, WHOLE: 1}, within=15)

    after = sliced.pods.get("holder")
    assert after.running
    assert after.container_id == pod.container_id
    assert after.device_health == dict.fromkeys(pod.device_health, "Healthy")
    new = sliced.pods.run("new", gpus=1, resource=WHOLE)
    assert sliced.pods.gpu_numbers(new) == {PARTED}
    for resource in PARTS:
        wait_capacity(sliced, resource, 0)


def test_the_gpu_of_a_running_pod_is_cut_anew(sliced: Cluster) -> None:
    pod = sliced.pods.run("holder", gpus=1, resource=MIDDLE)
    (device_id,) = pod.device_health
    sliced.plugin.fault(VARIED, "--mig=4g.20gb,1g.5gb,1g.5gb,1g.5gb")
    offered = {RESOURCE: 4, LARGE: 3, SMALL: 10, HALF: 1, **PARTS}
    sliced.wait_offers(offered, within=15)

    def reported() -> None:
        health = sliced.pods.get("holder").device_health
        expect(holds=health == {device_id: "Unhealthy"}, seen=health)

    wait_until(reported, "the pod's status shows that its slice is gone", within=20)
    # No pod held that slice, so it leaves the list. The pod's slice must stay listed.
    wait_capacity(sliced, MEDIA, 0)
    assert sliced.node_resources()[MIDDLE] == (1, 0)
    after = sliced.pods.get("holder")
    assert after.running
    assert after.container_id == pod.container_id

    sliced.pods.delete("holder")
    wait_capacity(sliced, MIDDLE, 0)
    sliced.wait_offers(offered)


def test_a_slice_that_is_gone_stays_listed_for_its_pod_over_restarts(sliced: Cluster) -> None:
    pod = sliced.pods.run("holder", gpus=1, resource=MIDDLE)
    sliced.plugin.fault(VARIED, "--mig=7g.40gb")
    sliced.wait_offers({RESOURCE: 4, LARGE: 3, SMALL: 7, WHOLE: 1, **PARTS}, within=15)
    sliced.kubelet.kill()
    sliced.plugin.kill()
    sliced.kubelet.start()
    sliced.plugin.start()

    # A restarted kubelet has only the devices that the daemon lists.
    wait_capacity(sliced, MIDDLE, 1)
    sliced.wait_offers({RESOURCE: 4, LARGE: 3, SMALL: 7, WHOLE: 1, **PARTS})
    after = sliced.pods.get("holder")
    assert after.running
    assert (after.container_id, after.restarts) == (pod.container_id, 0)

    sliced.pods.delete("holder")
    wait_capacity(sliced, MIDDLE, 0)


def test_a_gpu_whose_slice_a_pod_holds_is_not_given_out_whole(sliced: Cluster) -> None:
    sliced.pods.run("holder", gpus=1, resource=MIDDLE)
    sliced.plugin.fault(VARIED, "--mig=none")
    wait_capacity(sliced, RESOURCE, 5)
    sliced.wait_offers({RESOURCE: 4, LARGE: 3, SMALL: 7, **PARTS}, within=15)

    sliced.pods.delete("holder")
    sliced.wait_offers({RESOURCE: 5, LARGE: 3, SMALL: 7, **PARTS})
