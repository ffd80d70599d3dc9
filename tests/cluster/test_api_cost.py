"""What one node costs the API server in an hour, by the API server's own count: docs/scale.md has the figures."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from gpu_plugin.cluster import connection, node_api, node_metadata
from gpu_plugin.cluster.node_metadata import NodeMetadata
from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon.cluster_reporting import ClusterReporting
from gpu_plugin.daemon.health_watch import HealthWatch
from gpu_plugin.devices.node import Gpu
from gpu_plugin.health.observation import Sample, XidEvent

from .harness.cluster import NODE_PATH, Cluster
from .harness.layout import NODE
from .test_node_reporting import EVENTS, FOLLOW, PATCH, PODS, STATUS, granted, in_a_thread
from .virtual_hour import CountingProxy, HurriedLoop

if TYPE_CHECKING:
    import httpx2

    from gpu_plugin.inventory.snapshot import Snapshot

HOUR = 3600.0
KUBELET_REPORTS = 300.0
"""Seconds between two node statuses where nothing changes (nodeStatusReportFrequency, 5 minutes by default)."""

GPUS = tuple(
    Gpu(f"GPU-{number:08x}-0000-0000-0000-000000000000", number, pci_bus_id=f"00000000:{number:02X}:00.0")
    for number in range(16)
)
SEEN = Sample(asked=frozenset())
EVERYTHING = {
    "node_events": True,
    "pod_events": True,
    "node_condition": True,
    "node_taint": "NoSchedule",
    "cordon_annotation": True,
    "flap_guard": "0s",
}


class Ends(NodeMetadata):
    """A watch that the API server ends in time: it cannot know of our clock."""

    async def _watch(self, client: "httpx2.AsyncClient", seconds: int) -> None:
        with anyio.move_on_after(seconds):
            await super()._watch(client, seconds)


@dataclass
class Cost:
    """What an hour took: requests by verb and resource, and bytes on the wire, TLS included."""

    requests: Counter[str]
    connections: int
    sent: int
    received: int

    def __str__(self) -> str:
        asked = ", ".join(f"{count} {what}" for what, count in sorted(self.requests.items()))
        wire = f"{self.connections} connections, {self.sent} B sent, {self.received} B received"
        return f"{self.requests.total()} requests ({asked}), {wire}"


def counts(cluster: Cluster) -> Counter[str]:
    """Requests about nodes and Events by verb and resource, as the API server counts them."""
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
    """Nobody but us asks the API server about nodes."""
    pieces = [cluster.plugin, cluster.kubelet, cluster.scheduler, cluster.controller_manager]
    for piece in pieces:
        piece.stop()
    try:
        yield
    finally:
        for piece in reversed(pieces):
            piece.start()


def report(cluster: Cluster, number: int) -> None:
    """A node status that differs from the one before, as the kubelet's do."""
    status = {"conditions": [{"type": "Beat", "status": "True", "reason": f"Report{number}"}]}
    cluster.api.raw("PATCH", f"{NODE_PATH}/status", {"status": status}, "application/strategic-merge-patch+json")


def measure(
    cluster: Cluster, directory: Path, happens: Callable[[HealthWatch, int], None], monkeypatch: pytest.MonkeyPatch
) -> Cost:
    """An hour of one node, in which `happens` is called every 10 s with the seconds that have passed."""
    for module in (connection, node_api, node_metadata):
        monkeypatch.setattr(module, "ANSWER_TIMEOUT", 600.0)
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 600.0)
    content = json.loads(cluster.plugin_kubeconfig.read_text())
    server = content["clusters"][0]["cluster"]
    with CountingProxy(int(server["server"].rpartition(":")[2])) as proxy, alone(cluster):
        server["server"] = f"https://127.0.0.1:{proxy.port}"
        kubeconfig = directory / "kubeconfig"
        kubeconfig.write_text(json.dumps(content))
        settings = resolve(
            {"state_dir": str(directory), "node_name": NODE, "kubeconfig": str(kubeconfig), **EVERYTHING}, {}
        )
        before = counts(cluster)
        reports = 0

        async def hour() -> None:
            nonlocal reports
            clock = anyio.current_time
            began, zero = clock(), 1_800_000_000.0
            health = HealthWatch(
                settings, "boot", lambda: None, lambda _: None, wall=lambda: zero, clock=lambda: clock() - began
            )
            health.watch(GPUS)
            for gpu in GPUS:
                health.observe(gpu.uuid, SEEN)

            async def nobody() -> dict[Any, Any]:
                return {}

            reporting = ClusterReporting(
                settings=lambda: settings,
                health=health,
                snapshot=lambda: cast("Snapshot", SimpleNamespace(resources={})),
                holders=nobody,
                trouble=lambda: "",
                node=Ends(NODE, str(kubeconfig)),
                wall=lambda: zero + clock() - began,
                clock=clock,
            )
            health.reports.subscribe(reporting.heard)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reporting.run)
                for at in range(0, int(HOUR), 10):
                    await anyio.sleep(max(0.0, began + at - clock()))
                    happens(health, at)
                    if at >= (reports + 1) * KUBELET_REPORTS:
                        reports += 1
                        await anyio.to_thread.run_sync(report, cluster, reports)
                await anyio.sleep(max(0.0, began + HOUR - clock()))
                assert not (reporting.status() or {})["trouble"]
                tasks.cancel_scope.cancel()

        in_a_thread(anyio.run, hour, backend_options={"loop_factory": HurriedLoop})
        spent = counts(cluster)
        spent.subtract(before)
        spent["PATCH nodes/status"] -= reports
        wire = proxy.counted()
    return Cost(+spent, wire["connections"], wire["sent"], wire["received"])


@pytest.fixture
def rights(cluster: Cluster) -> Iterator[Cluster]:
    with granted(cluster, PATCH, STATUS, EVENTS, PODS, FOLLOW):
        yield cluster
    cluster.api.patch(NODE_PATH, {"spec": {"taints": None}})


def test_an_hour_of_a_sound_node(
    rights: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = measure(rights, tmp_path, lambda *_: None, monkeypatch)
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
    def flapping(health: HealthWatch, at: int) -> None:
        gpu = GPUS[at // 10 % len(GPUS)]
        if at // 10 // len(GPUS) % 2 == 0:
            health.observe(gpu.uuid, XidEvent(79))
        else:
            health.override(gpu.uuid)

    cost = measure(rights, tmp_path, flapping, monkeypatch)
    with capsys.disabled():
        print(f"\nevery GPU comes and goes: {cost}")
    assert cost.requests["POST events"] + cost.requests["PATCH events"] <= 25 + 12 + 1
    assert cost.requests["APPLY nodes/status"] <= 5 + 60 + 13
    assert cost.requests["LIST nodes"] == 0
    assert cost.requests.total() <= 180
    assert cost.sent + cost.received <= 1_500_000
