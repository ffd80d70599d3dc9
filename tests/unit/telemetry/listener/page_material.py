"""Content of status pages for tests: a node with two GPUs, and a node with any number of GPUs."""

from typing import Any

from gpu_plugin.telemetry.listener.page_data import Material

from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.kubelet.pod_listing import Holder
from gpu_plugin.placement.views.report import report
from tests.unit.cli.test_status import STATUS, gpu

GPU = "nvidia.com/gpu"

HOSTILE = "<script>alert(1)</script>\" onerror='x' &amp;\u202e\x1b]0;\x07\n"
"""A hostile text for the name of a pod, the version of a driver, or a reason."""

READINGS = {
    "temperature_celsius": 61,
    "slowdown_celsius": 89,
    "shutdown_celsius": 95,
    "power_watts": 312.4,
    "power_limit_watts": 700,
    "utilization_ratio": 0.87,
    "memory_used_bytes": 40 * 2**30,
    "memory_total_bytes": 80 * 2**30,
}


def hardware(at: int, listed: int = 1, healthy: int | None = None, **more: object) -> dict[str, Any]:
    return {
        "gpu": f"GPU-{at}",
        "visible_id": f"GPU-{at}",
        "index": str(at),
        "kind": "gpu",
        "listed": listed,
        "healthy": listed if healthy is None else healthy,
        "retired": 0,
        "reason": "",
        "shared": "time-slicing" if listed > 1 else "",
        **more,
    }


def signal(detail: str, verdict: str = "FATAL", **more: object) -> dict[str, Any]:
    return {
        "name": "xid",
        "detail": detail,
        "verdict": verdict,
        "since": 3600.0,
        "action": "drain the node and reboot it",
        "clears": "a reboot of the node",
        **more,
    }


def topology(count: int, pieces: list[dict[str, Any]]) -> dict[str, Any]:
    gpus = tuple(
        Gpu(f"GPU-{index}", index, pci_bus_id=f"00000000:{index:02X}:00.0", numa_node=0) for index in range(count)
    )
    links = {
        tuple(sorted((one.uuid, other.uuid))): Link(nvlinks=4, ancestor=10)
        for one in gpus
        for other in gpus
        if one is not other
    }
    told = dict(report(Node(gpus, links), []))  # type: ignore[arg-type]
    return {**told, "resources": [{"name": GPU, "policy": "distributed", "hardware": pieces}]}


def holder(pod: str, container: str = "main", namespace: str = "team-a") -> Holder:
    return Holder(namespace, pod, container)


def material(**changed: Any) -> Material:
    """GPU 0 is Healthy and held, GPU 1 is Unhealthy and held."""
    gpus = [gpu(0, readings=READINGS), gpu(1, "unhealthy", "FATAL", "Xid 79", readings=dict.fromkeys(READINGS))]
    told: dict[str, Any] = {
        "node": "node-1",
        "status": {**STATUS, "health": {**STATUS["health"], "gpus": gpus}},
        "troubles": (),
        "explained": [{"uuid": "GPU-0", "signals": []}, {"uuid": "GPU-1", "signals": [signal("Xid 79")]}],
        "topology": topology(2, [hardware(0), hardware(1, healthy=0, reason="Xid 79")]),
        "events": [
            {"at": 1.0, "kind": "daemon", "text": "started"},
            {"at": 3600.0, "kind": "health", "text": "Unhealthy: Xid 79", "index": 1, "verdict": "FATAL"},
        ],
        "held": {(GPU, "GPU-0"): frozenset({holder("train-0")}), (GPU, "GPU-1"): frozenset({holder("train-1")})},
    }
    return Material(**{**told, **changed})


def crowded(gpus: int = 16, replicas: int = 28, pods: int = 100) -> Material:
    """A node whose GPUs are shared by many pods, and readings of each."""
    status = {
        **STATUS,
        "resources": {
            GPU: {"devices": gpus * replicas, "healthy": gpus * replicas, "retired": 0, "sharing": ["time-slicing"]}
        },
        "health": {**STATUS["health"], "gpus": [gpu(index, readings=READINGS) for index in range(gpus)]},
    }
    held = {
        (GPU, f"GPU-{pod % gpus}::{pod // gpus}"): frozenset({holder(f"train-{pod:05d}-worker", namespace="research")})
        for pod in range(pods)
    }
    return material(
        status=status,
        explained=[],
        topology=topology(gpus, [hardware(index, replicas) for index in range(gpus)]),
        held=held,
    )
