"""Measure the requests of one node to the API server in an hour with the server's metrics. docs/scale.md has the results."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from msgspec.structs import replace

from gpu_plugin.cluster import connection
from gpu_plugin.cluster.connection import Connection
from gpu_plugin.cluster.correlation import BURST, PER, PODS_BURST, PODS_PER
from gpu_plugin.cluster.labels import keeper
from gpu_plugin.cluster.labels.keeper import NodeLabels
from gpu_plugin.cluster.node_api import NodeApi
from gpu_plugin.cluster.node_metadata import NodeMetadata
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import Settings, SettingsStore
from gpu_plugin.containers.edits import Access
from gpu_plugin.containers.host_view import LinuxHost
from gpu_plugin.daemon.cluster_reporting import ClusterReporting
from gpu_plugin.daemon.configuration import Configuration
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.daemon.now import Now
from gpu_plugin.daemon.reported_errors import ReportedErrors
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.health.observation import Sample, XidEvent
from gpu_plugin.kubelet.attribution import PodAttribution
from gpu_plugin.kubelet.inventory import Inventory
from gpu_plugin.kubelet.pod_listing import Holder, HoldersByDevice
from gpu_plugin.kubelet.snapshot import ResourceView, SnapshotStore
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.state.directory import StateDirectory
from gpu_plugin.state.recorder import Recorder
from gpu_plugin.status import model

from .harness.cluster import NODE_PATH, Cluster
from .harness.layout import NODE
from .test_node_reporting import EVENTS, FOLLOW, PATCH, PODS, STATUS, granted, in_a_thread
from .virtual_hour import STEP, CountingProxy, HurriedLoop

HOUR = 3600.0
KUBELET_REPORTS = 300.0
"""Seconds between two node statuses without a change (nodeStatusReportFrequency, 5 minutes by default)."""

GPUS = tuple(
    Gpu(f"GPU-{number:08x}-0000-0000-0000-000000000000", number, pci_bus_id=f"00000000:{number:02X}:00.0")
    for number in range(16)
)
SEEN = Sample(asked=frozenset())
SHARED = "nvidia.com/gpu"
PODS_PATH = "/api/v1/namespaces/default/pods"
OF_THE_NODE = BURST + int(HOUR / PER) + 1
"""The largest number of Events of the Node in an hour."""

PATIENCE = (
    (connection, "ANSWER_TIMEOUT"),
    (connection, "CONNECT_TIMEOUT"),
    (keeper, "PATIENCE"),
)
"""Timeouts of code that waits for the API server, which does not use the virtual clock."""

EVERYTHING = {
    "node_events": True,
    "pod_events": True,
    "node_condition": True,
    "node_taint": "NoSchedule",
    "cordon_annotation": True,
    "flap_guard": "0s",
}


class Ends(NodeMetadata):
    """A watch that ends at its timeout on the virtual clock, which the API server does not have."""

    async def _watch(self, server: Connection, seconds: int) -> None:
        with anyio.move_on_after(seconds):
            await super()._watch(server, seconds)


async def ask(self: Connection, *given: Any, asked: Any = Connection.ask) -> Any:
    """Send a request as the plugin does. The virtual clock stops until the response: otherwise the server would seem slow."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, HurriedLoop)
    with loop.unhurried():
        return await asked(self, *given)


@dataclass
class Cost:
    """The cost of an hour: requests by verb and resource, and bytes on the wire, including TLS."""

    requests: Counter[str]
    connections: int
    sent: int
    received: int

    def __str__(self) -> str:
        asked = ", ".join(f"{count} {what}" for what, count in sorted(self.requests.items()))
        wire = f"{self.connections} connections, {self.sent} B sent, {self.received} B received"
        return f"{self.requests.total()} requests ({asked}), {wire}"


def counts(cluster: Cluster) -> Counter[str]:
    """Return the API server's counts of requests for nodes and Events by verb and resource."""
    found: Counter[str] = Counter()
    for line in cluster.api.raw("GET", "/metrics").splitlines():
        if line.startswith("apiserver_request_total{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            if labels["resource"] in {"nodes", "events", "pods"}:
                subresource = f"/{labels['subresource']}" if labels["subresource"] else ""
                found[f"{labels['verb']} {labels['resource']}{subresource}"] += int(float(line.rpartition(" ")[2]))
    return found


@contextmanager
def alone(cluster: Cluster) -> Iterator[None]:
    """Stop all other clients that request nodes from the API server inside the context."""
    pieces = [cluster.plugin, cluster.kubelet, cluster.scheduler, cluster.controller_manager]
    for piece in pieces:
        piece.stop()
    try:
        yield
    finally:
        for piece in reversed(pieces):
            piece.start()


def report(cluster: Cluster, number: int) -> None:
    """Write a node status that differs from the former status, as the kubelet does."""
    status = {"conditions": [{"type": "Beat", "status": "True", "reason": f"Report{number}"}]}
    cluster.api.raw("PATCH", f"{NODE_PATH}/status", {"status": status}, "application/strategic-merge-patch+json")


@dataclass(frozen=True)
class Pods:
    """The pods that hold the GPUs: `number` pods share each GPU."""

    number: int = 0

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the uuid of a GPU and the name of a pod for each share of each GPU."""
        for gpu in GPUS:
            for share in range(self.number):
                yield gpu.uuid, f"share-{gpu.index}-{share}"

    async def held(self) -> HoldersByDevice:
        return {
            (SHARED, f"{uuid}::{name}"): frozenset({Holder("default", name, "main")}) for uuid, name in self.names()
        }

    def resource(self) -> ResourceView:
        devices = tuple(Device(f"{uuid}::{name}", uuid, uuid, "") for uuid, name in self.names())
        return ResourceView.of(Resource(SHARED, devices), Access(), Placement())

    @contextmanager
    def made(self, cluster: Cluster) -> Iterator[None]:
        """Create the pods, since the plugin requests them from the API server. They are never scheduled."""
        spec = {
            "schedulingGates": [{"name": "example.com/never"}],
            "automountServiceAccountToken": False,
            "containers": [{"name": "main", "image": "none"}],
        }
        try:
            for _, name in self.names():
                cluster.api.create(PODS_PATH, {"metadata": {"name": name, "labels": {"share": "yes"}}, "spec": spec})
            yield
        finally:
            if self.number:
                cluster.api.delete(f"{PODS_PATH}?labelSelector=share%3Dyes", grace=0)


def measure(
    cluster: Cluster,
    directory: Path,
    asked: Mapping[str, object],
    hour: Callable[[Settings], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> Cost:
    """Run `hour` with the settings `asked` on a virtual clock, and return the cost of its requests to the API server."""
    content = json.loads(cluster.plugin_kubeconfig.read_text())
    server = content["clusters"][0]["cluster"]
    with CountingProxy(int(server["server"].rpartition(":")[2])) as proxy, monkeypatch.context() as patched:
        for module, name in PATIENCE:
            patched.setattr(module, name, 600.0)
        patched.setattr(Connection, "ask", ask)
        server["server"] = f"https://127.0.0.1:{proxy.port}"
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(json.dumps(content))
        settings = resolve({"state_dir": str(directory), "node_name": NODE, "kubeconfig": str(kubeconfig), **asked}, {})
        before = counts(cluster)
        in_a_thread(anyio.run, hour, settings, backend_options={"loop_factory": HurriedLoop})
        spent = counts(cluster)
        spent.subtract(before)
        wire = proxy.counted()
    return Cost(+spent, wire["connections"], wire["sent"], wire["received"])


def measure_reporting(
    cluster: Cluster,
    directory: Path,
    happens: Callable[[HealthWatch, int], None],
    monkeypatch: pytest.MonkeyPatch,
    pods: Pods = Pods(),
) -> Cost:
    """Run an hour of a node with all reports. `happens` is called every 10 s with the seconds since the start."""
    reports = 0

    async def hour(settings: Settings) -> None:
        nonlocal reports
        clock = anyio.current_time
        began, zero = clock(), 1_800_000_000.0
        health = HealthWatch(
            settings, "boot", Pulse(), ReportedErrors(), wall=lambda: zero, clock=lambda: clock() - began
        )
        health.watch(GPUS)
        for gpu in GPUS:
            health.observe(gpu.uuid, SEEN)
        inventory = Inventory(SnapshotStore(), health.ledger.health)
        inventory.store.publish({SHARED: pods.resource()})
        inventory.found(GPUS)

        async def written(_: float) -> None:
            """Return True at once: the journal takes no time here."""

        ends = Ends(NODE, settings.kubeconfig)
        reporting = ClusterReporting(
            configuration=cast("Configuration", SimpleNamespace(settings=settings, node=ends)),
            health=health,
            store=inventory.store,
            attribution=cast("PodAttribution", SimpleNamespace(newest=pods.held)),
            now=cast("Now", SimpleNamespace(driver_trouble="")),
            wall=lambda: zero + clock() - began,
            clock=clock,
        )
        health.reports.subscribe(reporting.health_changed)

        def status() -> model.Cluster:
            found = reporting.status()
            assert found is not None
            return found

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reporting.run)
            tasks.start_soon(health.publish, cast("Recorder", SimpleNamespace(written=written)), inventory)
            for at in range(0, int(HOUR), 10):
                await anyio.sleep(max(0.0, began + at - clock()))
                happens(health, at)
                if at >= (reports + 1) * KUBELET_REPORTS:
                    reports += 1
                    await anyio.to_thread.run_sync(report, cluster, reports)
            await anyio.sleep(max(0.0, began + HOUR - clock()))
            with anyio.fail_after(10):
                while status().events["waiting"]:
                    await anyio.sleep(STEP)
            assert not status().trouble
            tasks.cancel_scope.cancel()

    with pods.made(cluster):
        cost = measure(cluster, directory, EVERYTHING, hour, monkeypatch)
    cost.requests["PATCH nodes/status"] -= reports  # the requests of the kubelet, which this test replaces
    cost.requests += Counter()
    return cost


def flapping(health: HealthWatch, at: int) -> None:
    """Remove and return each GPU in turn, with one change every 10 s."""
    gpu = GPUS[at // 10 % len(GPUS)]
    if at // 10 // len(GPUS) % 2 == 0:
        health.observe(gpu.uuid, XidEvent(79))
    else:
        health.override(gpu.uuid)


@pytest.fixture
def rights(cluster: Cluster) -> Iterator[Cluster]:
    with granted(cluster, PATCH, STATUS, EVENTS, PODS, FOLLOW), alone(cluster):
        yield cluster
        cluster.api.patch(NODE_PATH, {"spec": {"taints": None}})


def test_an_hour_of_a_sound_node(
    rights: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = measure_reporting(rights, tmp_path, lambda *_: None, monkeypatch)
    with capsys.disabled():
        print(f"\nsound: {cost}")
    assert 10 <= cost.requests["APPLY nodes/status"] <= 12
    assert 6 <= cost.requests["WATCH nodes"] <= 13
    assert cost.requests["GET nodes"] == 2
    assert cost.requests["LIST nodes"] == 0
    assert cost.requests.total() <= 27
    assert cost.sent + cost.received <= 200_000


def test_an_hour_in_which_every_gpu_comes_and_goes(
    rights: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = measure_reporting(rights, tmp_path, flapping, monkeypatch)
    with capsys.disabled():
        print(f"\nevery GPU comes and goes: {cost}")
    assert cost.requests["POST events"] + cost.requests["PATCH events"] <= OF_THE_NODE
    assert cost.requests["APPLY nodes/status"] <= 5 + 60 + 13
    assert cost.requests["LIST nodes"] == 0
    assert cost.requests.total() <= 180
    assert cost.sent + cost.received <= 1_500_000


def test_an_hour_in_which_every_gpu_comes_and_goes_and_28_pods_share_each(
    rights: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = measure_reporting(rights, tmp_path, flapping, monkeypatch, Pods(28))
    with capsys.disabled():
        print(f"\nevery GPU comes and goes, 28 pods on each: {cost}")
    bound = PODS_BURST + int(HOUR / PODS_PER)
    assert bound - 28 <= cost.requests["POST events"] + cost.requests["PATCH events"] <= bound + OF_THE_NODE
    assert cost.requests["GET pods"] <= bound
    assert cost.requests["LIST pods"] == cost.requests["LIST nodes"] == 0
    assert cost.requests.total() <= 2 * bound + 180
    assert cost.sent + cost.received <= 6_000_000


def test_an_hour_of_labels_by_the_api(
    rights: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described = tuple(
        replace(gpu, model="NVIDIA H100 80GB HBM3", memory_bytes=81559 << 20, compute_capability=(9, 0)) for gpu in GPUS
    )
    seen = []

    async def hour(settings: Settings) -> None:
        labels = NodeLabels(SettingsStore(settings), LinuxHost(), StateDirectory(tmp_path), dice=lambda: 0.0)
        async with anyio.create_task_group() as tasks:
            labels.follow(Node(described, driver_version="580.159.04", cuda_version=(13, 0)))
            tasks.start_soon(labels.run)
            await anyio.sleep(HOUR - 60)
            seen.append(counts(rights))
            labels.follow(Node(described[1:], driver_version="580.159.04", cuda_version=(13, 0)))
            await anyio.sleep(60)
            assert not labels.trouble
            tasks.cancel_scope.cancel()

    before = counts(rights)
    cost = measure(rights, tmp_path, {"node_labels": "api"}, hour, monkeypatch)
    carried = rights.api.get(NODE_PATH)["metadata"]["labels"]
    in_a_thread(anyio.run, NodeApi(NODE, str(rights.plugin_kubeconfig)).apply_labels, {})
    with capsys.disabled():
        print(f"\nlabels by the API: {cost}")
    (unchanged,) = seen
    assert unchanged - before == {"GET nodes": 1, "APPLY nodes": 2}, "the start, and once more within the hour"
    assert cost.requests == {"GET nodes": 1, "APPLY nodes": 3}, "and a GPU less"
    assert carried["nvidia.com/gpu.count"] == str(len(described) - 1)
    assert cost.sent + cost.received <= 60_000
