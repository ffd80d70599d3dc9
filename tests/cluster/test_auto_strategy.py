"""`--device-list-strategy auto` with a real kubelet and containerd: the chosen strategy, and pods that get GPUs with it."""

from collections.abc import Iterator

import pytest

from .harness.cluster import Cluster
from .harness.plugin import GPUS


@pytest.fixture
def left_to_the_node(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, whose directory serves as the node's root: links at a node's usual paths lead to the cluster's files."""
    root = cluster.layout.root
    links = {
        root / "var/lib/kubelet": cluster.layout.kubelet,
        root / "etc/containerd/config.toml": root / "containerd.toml",
        root / "run/containerd/containerd.sock": cluster.layout.containerd_socket,
    }
    for link, target in links.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"/{target.relative_to(root)}")
    yield cluster
    for link in links:
        link.unlink()
    cluster.pods.delete_all()


def test_a_pod_is_given_its_gpu_by_the_strategy_that_the_node_speaks_for(left_to_the_node: Cluster) -> None:
    plugin, layout = left_to_the_node.plugin, left_to_the_node.layout
    plugin.extra = (
        "--device-list-strategy=auto",
        "--driver-root=/",
        f"--driver-root-ctr-path={layout.root}",
        f"--cdi-dir={layout.cdi}",
        "--cdi-remove-on-exit",
        "--pass-device-specs=false",  # device nodes come only from CDI
    )
    plugin.restart()
    left_to_the_node.wait_allocatable(GPUS)
    chosen = plugin.status()["device_list_strategy"]
    assert chosen["used"] == ["cdi-cri"], chosen
    assert "only kubelets from 1.33 on have /var/lib/kubelet/" in chosen["reason"]
    assert "/etc/containerd/config.toml is of version 3" in chosen["reason"]
    pod = left_to_the_node.pods.run("by-name", gpus=2)
    assert left_to_the_node.pods.environment(pod)["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert len(left_to_the_node.pods.gpu_numbers(pod)) == 2

    # containerd would not read that directory. The next start of the daemon uses the variable.
    plugin.extra = (*plugin.extra, f"--cdi-dir={layout.root}/elsewhere")
    plugin.restart()
    left_to_the_node.wait_allocatable(GPUS)
    chosen = plugin.status()["device_list_strategy"]
    assert chosen["used"] == ["envvar"], chosen
    assert "(/etc/containerd/config.toml)" in chosen["reason"]
    pod = left_to_the_node.pods.run("by-variable", gpus=1)
    (device_id,) = pod.device_health
    assert left_to_the_node.pods.environment(pod)["NVIDIA_VISIBLE_DEVICES"] == device_id
