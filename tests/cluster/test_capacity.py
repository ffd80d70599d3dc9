"""The node's capacity, and a pod that requests more GPUs."""

from .harness.cluster import Cluster
from .harness.plugin import GPUS
from .harness.wait import expect, wait_until


def test_all_gpus_are_capacity_and_allocatable(cluster: Cluster) -> None:
    assert cluster.node_gpus() == (GPUS, GPUS)


def test_a_pod_of_nine_gpus_stays_pending_and_says_why(cluster: Cluster) -> None:
    cluster.pods.create("greedy", gpus=GPUS + 1)

    def refused() -> None:
        events = cluster.pods.events("greedy")
        expect(
            holds=any(
                each.startswith("FailedScheduling: ") and "Insufficient nvidia.com/gpu" in each for each in events
            ),
            seen=events,
        )

    wait_until(refused, "the scheduler says that there are too few GPUs", within=15)
    assert cluster.pods.get("greedy").phase == "Pending"
