"""GPUs that several pods share by time-slicing, alone and together with GPUs that are not shared."""

from collections import Counter

from .harness.cluster import Cluster
from .harness.plugin import GPUS, RESOURCE
from .harness.pods import Pod
from .harness.wait import expect, wait_until

REPLICAS = 4
SHARED = f"{RESOURCE}.shared"

EVERY_GPU_SHARED = f"""\
version: v1
sharing:
  timeSlicing:
    resources:
    - name: {RESOURCE}
      replicas: {REPLICAS}
"""

TWO_GPUS_SHARED = f"""\
version: v1
sharing:
  timeSlicing:
    resources:
    - name: {RESOURCE}
      rename: {SHARED}
      devices: [0, 1]
      replicas: {REPLICAS}
"""


def run_all(cluster: Cluster, names: list[str], resource: str) -> list[Pod]:
    """Create pods of one device each, wait until all run at the same time, and return them."""
    for name in names:
        cluster.pods.create(name, gpus=1, resource=resource)
    return [cluster.pods.wait_running(name, within=90) for name in names]


def visible(cluster: Cluster, pod: Pod) -> str:
    return cluster.pods.environment(pod)["NVIDIA_VISIBLE_DEVICES"]


def test_four_replicas_of_each_gpu_hold_four_pods_each_and_no_more(cluster: Cluster, numbers: dict[str, int]) -> None:
    cluster.plugin.config = EVERY_GPU_SHARED
    cluster.plugin.restart()
    cluster.wait_offers({RESOURCE: REPLICAS * GPUS})

    pods = run_all(cluster, [f"tenant-{number:02}" for number in range(REPLICAS * GPUS)], RESOURCE)
    given = [device_id for pod in pods for device_id in pod.device_health]
    assert sorted(given) == sorted(f"{gpu}::{replica}" for gpu in numbers for replica in range(REPLICAS))
    assert Counter(visible(cluster, pod) for pod in pods) == dict.fromkeys(numbers, REPLICAS)
    for pod in pods:
        assert cluster.pods.gpu_numbers(pod) == {numbers[visible(cluster, pod)]}

    cluster.pods.create("one-more", gpus=1)

    def refused() -> None:
        events = cluster.pods.events("one-more")
        expect(holds=any(f"Insufficient {RESOURCE}" in each for each in events), seen=events)

    wait_until(refused, "the scheduler says that there are too few GPUs", within=15)
    assert cluster.pods.get("one-more").phase == "Pending"

    cluster.pods.delete(pods[0].name)
    assert visible(cluster, cluster.pods.wait_running("one-more")) == visible_before(pods[0])


def visible_before(pod: Pod) -> str:
    """Return the GPU that a pod had, from the device id in the pod's status."""
    (device_id,) = pod.device_health
    return device_id.partition("::")[0]


def test_shared_and_exclusive_gpus_live_on_one_node(cluster: Cluster, numbers: dict[str, int]) -> None:
    cluster.plugin.config = TWO_GPUS_SHARED
    cluster.plugin.restart()
    cluster.wait_offers({RESOURCE: GPUS - 2, SHARED: 2 * REPLICAS})

    tenants = run_all(cluster, [f"tenant-{number}" for number in range(2 * REPLICAS)], SHARED)
    owners = run_all(cluster, [f"owner-{number}" for number in range(GPUS - 2)], RESOURCE)
    by_number = {number: gpu for gpu, number in numbers.items()}
    assert Counter(visible(cluster, pod) for pod in tenants) == {by_number[0]: REPLICAS, by_number[1]: REPLICAS}
    assert Counter(visible(cluster, pod) for pod in owners) == {by_number[number]: 1 for number in range(2, GPUS)}
