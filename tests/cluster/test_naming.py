"""Resource names that the operator chooses, and a change of a name in the config file of a running daemon."""

from .harness.cluster import Cluster
from .harness.plugin import GPUS, RESOURCE

FIRST, SECOND = "example.com/h100", "nvidia.com/h100"


def named(name: str) -> str:
    """Return a config file that offers the node's GPUs under another resource name."""
    return f"""\
version: v1
resources:
  gpus:
  - pattern: "*H100*"
    name: {name}
"""


def test_a_renamed_resource_serves_pods_and_is_renamed_again_while_the_daemon_runs(cluster: Cluster) -> None:
    cluster.plugin.config = named(FIRST)
    cluster.plugin.restart()
    daemon = cluster.plugin.pid
    cluster.wait_offers({FIRST: GPUS})
    pod = cluster.pods.run("first", gpus=2, resource=FIRST)
    assert set(cluster.pods.environment(pod)["NVIDIA_VISIBLE_DEVICES"].split(",")) == set(pod.device_health)

    cluster.plugin.rewrite(named(SECOND))
    # The pod keeps its GPUs, so they are not offered under the new name before the pod has ended.
    cluster.wait_offers({SECOND: GPUS - 2})
    later = cluster.pods.run("later", gpus=GPUS - 2, resource=SECOND)
    assert not set(later.device_health) & set(pod.device_health)
    assert cluster.pods.get("first").container_id == pod.container_id
    assert cluster.pods.get("first").running

    cluster.pods.delete("first")
    cluster.wait_offers({SECOND: GPUS})
    cluster.pods.run("last", gpus=2, resource=SECOND)
    assert cluster.plugin.pid == daemon
    assert RESOURCE not in {name for name, (capacity, _) in cluster.node_resources().items() if capacity}
