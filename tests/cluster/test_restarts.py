"""Restarts of the kubelet and of the plugin, in any order: running pods keep their GPUs, and new pods get GPUs."""

import signal
import time
from collections.abc import Callable

import pytest

from .harness.cluster import Cluster
from .harness.layout import DEVICE_PLUGINS, KUBELET_SOCKET
from .harness.plugin import GPUS
from .harness.pods import Pod
from .harness.wait import expect, stays, wait_until


def kubelet_restarts(cluster: Cluster) -> None:
    cluster.kubelet.restart()


def kubelet_is_killed(cluster: Cluster) -> None:
    cluster.kubelet.kill()
    cluster.kubelet.start()


def plugin_restarts(cluster: Cluster) -> None:
    assert cluster.plugin.stop() == 0
    cluster.plugin.start()


def plugin_is_killed(cluster: Cluster) -> None:
    cluster.plugin.kill()
    cluster.plugin.start()


def plugin_is_there_before_the_kubelet(cluster: Cluster) -> None:
    cluster.kubelet.stop()
    cluster.plugin.stop()
    cluster.plugin.start()
    stays(lambda: expect(holds=cluster.plugin.running, seen="it ended"), "the plugin waits for the kubelet", seconds=3)
    cluster.kubelet.start()


def both_are_killed(cluster: Cluster) -> None:
    cluster.kubelet.kill()
    cluster.plugin.kill()
    cluster.kubelet.start()
    cluster.plugin.start()


@pytest.mark.parametrize(
    "disturb",
    [
        kubelet_restarts,
        kubelet_is_killed,
        plugin_restarts,
        plugin_is_killed,
        plugin_is_there_before_the_kubelet,
        both_are_killed,
    ],
)
def test_running_pods_keep_their_gpus_and_new_ones_start(cluster: Cluster, disturb: Callable[[Cluster], None]) -> None:
    before = cluster.pods.run("kept", gpus=2)
    devices = cluster.pods.devices(before)

    disturb(cluster)
    cluster.wait_allocatable(GPUS)

    after = cluster.pods.get("kept")
    assert after.running
    assert (after.container_id, after.restarts) == (before.container_id, 0)
    assert after.device_health == before.device_health
    assert cluster.pods.devices(after) == devices
    rest = cluster.pods.run("rest", gpus=GPUS - 2)
    assert not set(rest.device_health) & set(after.device_health)


def test_a_plugin_that_is_gone_takes_its_gpus_from_the_node_but_not_from_pods(cluster: Cluster) -> None:
    before = cluster.pods.run("kept", gpus=2)
    cluster.plugin.stop()
    cluster.wait_allocatable(0)
    assert cluster.pods.get("kept").container_id == before.container_id
    assert cluster.pods.get("kept").running

    cluster.plugin.start()
    cluster.wait_allocatable(GPUS)
    assert cluster.pods.get("kept").device_health == before.device_health


def test_a_container_restarts_with_the_same_gpus_even_while_no_plugin_runs(cluster: Cluster) -> None:
    before = cluster.pods.run("again", gpus=2, restart="Always")
    devices, environment = cluster.pods.devices(before), cluster.pods.environment(before)
    cluster.plugin.stop()
    cluster.wait_allocatable(0)
    cluster.pods.signal(before, signal.SIGTERM)

    def restarted() -> Pod:
        pod = cluster.pods.get("again")
        expect(holds=pod.running and pod.restarts == 1, seen=pod)
        return pod

    after = wait_until(restarted, "the container runs again", within=30)
    assert after.container_id != before.container_id
    assert cluster.pods.devices(after) == devices
    assert cluster.pods.environment(after)["NVIDIA_VISIBLE_DEVICES"] == environment["NVIDIA_VISIBLE_DEVICES"]


def test_the_plugin_leaves_no_socket_behind(cluster: Cluster) -> None:
    kept = {KUBELET_SOCKET, "kubelet_internal_checkpoint"}
    began = time.monotonic()
    assert cluster.plugin.stop() == 0
    assert time.monotonic() - began < 2
    assert {path.name for path in DEVICE_PLUGINS.iterdir()} == kept

    cluster.plugin.start()
    cluster.wait_allocatable(GPUS)
    cluster.plugin.kill()
    (stale,) = {path.name for path in DEVICE_PLUGINS.iterdir()} - kept
    cluster.plugin.start()
    cluster.wait_allocatable(GPUS)
    (fresh,) = {path.name for path in DEVICE_PLUGINS.iterdir()} - kept
    assert fresh != stale
