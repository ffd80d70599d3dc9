"""The node's label, which the daemon reads from the API server, selects the config file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness.cluster import Cluster
from .harness.layout import NODE
from .harness.plugin import GPUS, RESOURCE
from .harness.wait import expect, stays, wait_until

LABEL = "nvidia.com/device-plugin.config"
REPLICAS = 4
ALL_SHARED = REPLICAS * GPUS

CONFIGS = {
    "default": "version: v1\n",
    "shared": f"""\
version: v1
sharing:
  timeSlicing:
    resources:
    - name: {RESOURCE}
      replicas: {REPLICAS}
""",
}


@pytest.fixture
def labelled(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with a daemon that uses the node's label."""
    directory: Path = cluster.layout.plugin_configs / "by-label"
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in CONFIGS.items():
        (directory / name).write_text(content)
    cluster.plugin.extra = (
        f"--config-file-srcdir={directory}",
        f"--node-name={NODE}",
        f"--kubeconfig={cluster.plugin_kubeconfig}",
    )
    cluster.plugin.restart()
    cluster.wait_offers({RESOURCE: GPUS})
    yield cluster
    cluster.label_node(LABEL, None)


def test_the_label_switches_the_config_and_an_unknown_value_changes_nothing(labelled: Cluster) -> None:
    daemon = labelled.plugin.pid
    labelled.label_node(LABEL, "shared")
    labelled.wait_offers({RESOURCE: ALL_SHARED}, within=15)

    log_begins = labelled.plugin.log_size()
    labelled.label_node(LABEL, "no-such-config")

    def logged() -> None:
        log = labelled.plugin.log_since(log_begins)
        expect(holds="no-such-config" in log, seen=f"the daemon's log: {log}")

    def unchanged() -> None:
        resources = labelled.node_resources()
        expect(holds=resources[RESOURCE][1] == ALL_SHARED, seen=resources)

    wait_until(logged, "the daemon logs that the config does not exist", within=15)
    stays(unchanged, "the last good config is in force", seconds=3)

    labelled.label_node(LABEL, None)
    labelled.wait_offers({RESOURCE: GPUS}, within=15)
    assert labelled.plugin.pid == daemon


def test_a_pod_keeps_its_share_of_a_gpu_that_is_no_longer_shared(labelled: Cluster) -> None:
    labelled.label_node(LABEL, "shared")
    labelled.wait_offers({RESOURCE: ALL_SHARED}, within=15)
    pod = labelled.pods.run("tenant", gpus=1)

    labelled.label_node(LABEL, None)
    # No other pod gets its GPU before the pod has ended.
    labelled.wait_offers({RESOURCE: GPUS - 1}, within=15)
    assert labelled.pods.get("tenant").container_id == pod.container_id
    assert labelled.pods.get("tenant").running

    labelled.pods.delete("tenant")
    labelled.wait_offers({RESOURCE: GPUS})


def test_a_label_is_seen_after_the_api_server_was_killed(labelled: Cluster) -> None:
    labelled.apiserver.kill()
    labelled.start_apiserver()
    labelled.label_node(LABEL, "shared")
    labelled.wait_offers({RESOURCE: ALL_SHARED}, within=60)
