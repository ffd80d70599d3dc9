"""Another plugin registers our resource and ends, on the real kubelet: twins of the stand-in kubelet's tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from anyio.from_thread import start_blocking_portal

from tests.unit.simulation.stand_in_kubelet.fake_plugin import FakePlugin, healthy

from .harness import binaries
from .harness.cluster import Cluster
from .harness.layout import DEVICE_PLUGINS
from .harness.plugin import GPUS
from .harness.wait import expect, wait_until

PROMOTES = binaries.kubernetes_version() >= "1.37"
"""Whether the kubelet sends requests to the older plugin again after the newer one has ended."""


@contextmanager
def another_plugin(*ids: str) -> Iterator[FakePlugin]:
    """Another plugin that serves our resource with these devices."""
    other = FakePlugin(DEVICE_PLUGINS, "other.sock", devices=healthy(*ids))
    with start_blocking_portal() as portal:
        portal.call(other.serve)
        try:
            portal.call(other.register)
            yield other
        finally:
            portal.call(other.close)
            (DEVICE_PLUGINS / other.endpoint).unlink(missing_ok=True)


def test_pods_start_after_a_plugin_with_other_devices_has_ended(cluster: Cluster) -> None:
    before = cluster.pods.run("before", gpus=1)
    with another_plugin("other-0", "other-1"):
        cluster.wait_allocatable(2)
        served = cluster.pods.run("served", gpus=1)
        assert set(served.device_health) < {"other-0", "other-1"}
    cluster.pods.delete("served")
    if PROMOTES:
        cluster.wait_allocatable(2)  # the kubelet keeps the list of the plugin that has ended
        cluster.pods.create("refused", gpus=1)

        def refused() -> None:
            pod = cluster.pods.get("refused")
            expect(holds=pod.phase == "Failed", seen=pod)

        wait_until(refused, "a pod is refused the devices of the plugin that has ended", within=30)
    cluster.wait_allocatable(GPUS)
    after = cluster.pods.run("after", gpus=GPUS - 1)
    assert not set(after.device_health) & {*before.device_health, "other-0", "other-1"}
    assert cluster.pods.get("before").container_id == before.container_id


@pytest.mark.skipif(not PROMOTES, reason="up to 1.36 the kubelet has no devices after the newer plugin has ended")
def test_a_sick_gpu_is_unhealthy_again_after_a_plugin_that_listed_it_as_healthy_has_ended(
    cluster: Cluster, numbers: dict[str, int]
) -> None:
    cluster.plugin.fault(3, "--xid=79")
    cluster.wait_allocatable(GPUS - 1)
    with another_plugin(*numbers):
        cluster.wait_allocatable(GPUS)
    cluster.pods.run("first", gpus=1)
    cluster.wait_allocatable(GPUS - 1)
