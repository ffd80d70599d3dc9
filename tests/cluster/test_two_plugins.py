"""Another plugin registers this plugin's resource and ends, on the real kubelet. The stand-in kubelet has the same tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from grpclib.exceptions import GRPCError

from gpu_plugin.runtime.peer import listening
from tests.unit.demo.stand_in_kubelet.fake_plugin import FakePlugin, healthy

from .harness import binaries
from .harness.cluster import Cluster
from .harness.layout import DEVICE_PLUGINS
from .harness.plugin import GPUS
from .harness.wait import expect, wait_until

PROMOTES = binaries.kubernetes_version() >= "1.37"
"""True if the kubelet sends requests to the older plugin again after the newer plugin has ended."""

PLAIN = "test.example/device"
"""A resource of small plugins. The daemon does not serve it."""


class Plugins:
    """Small plugins of the resource PLAIN on the real kubelet, each with its own socket."""

    def __init__(self, cluster: Cluster, portal: BlockingPortal) -> None:
        self._cluster = cluster
        self._portal = portal
        self._made: list[FakePlugin] = []

    def start(self, endpoint: str, *ids: str) -> FakePlugin:
        """Start a plugin with these devices, register it, wait until the kubelet has its list, and return it."""
        made = FakePlugin(DEVICE_PLUGINS, endpoint, PLAIN, healthy(*ids))
        self._made.append(made)
        self._portal.call(made.serve)
        self._portal.call(made.register)
        self.wait_allocatable(len(ids))
        return made

    def register(self, plugin: FakePlugin) -> None:
        """Register a serving plugin."""
        self._portal.call(plugin.register)

    def send(self, plugin: FakePlugin, *ids: str) -> None:
        """Send the kubelet a new list."""
        self._portal.call(plugin.send, healthy(*ids))

    def end(self, plugin: FakePlugin) -> None:
        """End a plugin as SIGKILL does."""
        self._portal.call(lambda: plugin.close(orderly=False))

    def end_all(self) -> None:
        """End every plugin, and remove the sockets."""
        for made in self._made:
            self.end(made)
            (DEVICE_PLUGINS / made.endpoint).unlink(missing_ok=True)

    def wait_for_kubelet(self) -> None:
        """Wait until the kubelet accepts connections to its socket. After a restart it is Ready before that."""

        def accepts() -> None:
            path = str(DEVICE_PLUGINS / "kubelet.sock")
            expect(holds=listening(path), seen=path)

        wait_until(accepts, "the kubelet accepts connections", within=30)

    def wait_allocatable(self, count: int) -> None:
        """Wait until a new node status offers exactly this many devices."""

        def offered() -> None:
            capacity, allocatable = self._cluster.node_resources().get(PLAIN, (0, 0))
            expect(holds=allocatable == count, seen=f"capacity {capacity}, allocatable {allocatable}")

        wait_until(offered, f"{count} devices of {PLAIN} are allocatable", within=30)

    def refused(self, name: str) -> str:
        """Create a pod with one device, and return why the kubelet refused it."""
        self._cluster.pods.create(name, gpus=1, resource=PLAIN)

        def failed() -> None:
            pod = self._cluster.pods.get(name)
            expect(holds=pod.phase == "Failed", seen=pod)

        wait_until(failed, "the pod is refused", within=30)
        return self._cluster.pods.get(name).reason


@pytest.fixture
def plugins(cluster: Cluster) -> Iterator[Plugins]:
    with start_blocking_portal() as portal:
        made = Plugins(cluster, portal)
        yield made
        made.end_all()


@contextmanager
def another_plugin(*ids: str) -> Iterator[FakePlugin]:
    """Another plugin that serves the daemon's resource with these devices."""
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
        cluster.wait_allocatable(2)  # the kubelet keeps the ended plugin's list
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


def test_the_end_of_the_middle_one_of_three_plugins(cluster: Cluster, plugins: Plugins) -> None:
    oldest = plugins.start("oldest.sock", "x")
    middle = plugins.start("middle.sock", "x")
    newest = plugins.start("newest.sock", "x")
    plugins.end(middle)
    if not PROMOTES:
        plugins.wait_allocatable(0)
        assert newest.dropped == 1
        return
    cluster.pods.run("pod", gpus=1, resource=PLAIN)
    assert oldest.called("allocate") + newest.called("allocate") == [{"x"}]  # the kubelet may call either plugin
    assert (oldest.dropped, newest.dropped) == (0, 0)


def test_a_plugin_that_registers_the_same_socket_twice(cluster: Cluster, plugins: Plugins) -> None:
    plugin = plugins.start("same.sock", "x")
    if not PROMOTES:
        plugins.register(plugin)
        cluster.pods.run("pod", gpus=1, resource=PLAIN)
        assert plugin.called("allocate") == [{"x"}]
        return
    with pytest.raises(GRPCError, match="device plugin already connected"):
        plugins.register(plugin)
    plugins.end(plugin)
    with pytest.raises(GRPCError, match="device plugin already connected"):  # although the plugin has ended
        plugins.start("same.sock", "x")
    cluster.kubelet.restart()
    plugins.wait_for_kubelet()
    again = plugins.start("same.sock", "x")
    cluster.pods.run("pod", gpus=1, resource=PLAIN)
    assert again.called("allocate") == [{"x"}]


def test_a_list_of_the_older_plugin_after_the_newer_one_has_ended(cluster: Cluster, plugins: Plugins) -> None:
    older = plugins.start("older.sock", "x")
    newer = plugins.start("newer.sock", "y")
    plugins.end(newer)
    if not PROMOTES:
        plugins.wait_allocatable(0)  # the kubelet has noticed the end
    plugins.send(older, "x", "z")
    plugins.wait_allocatable(2)
    if PROMOTES:
        cluster.pods.run("pod", gpus=2, resource=PLAIN)
        assert older.called("allocate") == [{"x", "z"}]
    else:
        assert "has been stopped" in plugins.refused("pod")
        assert not older.called("allocate")
