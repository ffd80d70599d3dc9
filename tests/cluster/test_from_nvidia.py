"""Migration from NVIDIA's chart, as described in docs/migration.md, while pods use GPUs of NVIDIA's plugin.

`nvidia_chart` has the objects, labels, selectors, paths and the socket of NVIDIA's chart 0.20.0. Its pods run a stand-in for
NVIDIA's plugin.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness.cluster import Cluster
from .harness.layout import DEVICE_PLUGINS
from .harness.plugin import GPUS
from .harness.pods import Pod
from .harness.release import IMAGE, KINDS, NAME, Release
from .harness.wait import expect, wait_until

NVIDIAS_CHART = Path(__file__).parent / "nvidia_chart"
NVIDIAS_LABELS = "app.kubernetes.io/name=nvidia-device-plugin"
NVIDIAS_SOCKET = DEVICE_PLUGINS / "nvidia-gpu.sock"


@pytest.fixture
def tenants(cluster: Cluster, release: Release, numbers: dict[str, int]) -> Iterator[list[Pod]]:
    """Three running pods that got four of the node's GPUs from the stand-in for NVIDIA's plugin, which still serves."""
    values = {
        "image": {"repository": IMAGE, "tag": "1", "pullPolicy": "Never"},
        "gpus": sorted(numbers),
        "mps": {"root": str(cluster.layout.root / "nvidia-mps")},
        "cdi": {"root": str(cluster.layout.cdi)},
    }
    file = cluster.layout.root / "nvidias-values.json"
    file.write_text(json.dumps(values))
    release.helm("install", NAME, str(NVIDIAS_CHART), "--create-namespace", f"--values={file}", "--wait")
    cluster.wait_allocatable(GPUS)
    pods = [cluster.pods.run(name, gpus=gpus) for name, gpus in (("one", 1), ("two", 1), ("pair", 2))]
    assert all(
        set(cluster.pods.environment(pod)["NVIDIA_VISIBLE_DEVICES"].split(",")) == pod.device_health.keys()
        for pod in pods
    )
    yield pods
    cluster.pods.delete_all()


def test_uninstall_and_install(cluster: Cluster, release: Release, tenants: list[Pod]) -> None:
    release.uninstall()
    release.install()
    has_taken_over(cluster, release, tenants)


def test_upgrade_of_the_same_release_and_back(cluster: Cluster, release: Release, tenants: list[Pod]) -> None:
    release.upgrade()
    has_taken_over(cluster, release, tenants)
    release.helm("rollback", NAME, "1", "--wait")
    cluster.wait_allocatable(GPUS)
    each_gpu_is_held_once(cluster, tenants)
    release.helm("uninstall", NAME, "--wait")


def has_taken_over(cluster: Cluster, release: Release, tenants: list[Pod]) -> None:
    """Check that this plugin serves all GPUs, the tenants still run, and NVIDIA's release has no objects."""

    def nothing_is_left() -> None:
        left = release.kubectl(
            "get", ",".join(KINDS), "--all-namespaces", "--output=name", f"--selector={NVIDIAS_LABELS}"
        )
        expect(holds=left == "", seen=left)
        expect(holds=not NVIDIAS_SOCKET.exists(), seen=NVIDIAS_SOCKET)

    wait_until(nothing_is_left, "NVIDIA's release is gone", within=60)
    wait_until(
        lambda: expect(holds=release.ask("/readyz")[0] == 200, seen=release.ask("/readyz")), "it is ready", within=60
    )
    cluster.wait_allocatable(GPUS)
    each_gpu_is_held_once(cluster, tenants)


def each_gpu_is_held_once(cluster: Cluster, tenants: list[Pod]) -> None:
    """Check that new pods get exactly the GPUs that no tenant holds, and that one more pod gets no GPU. Delete the new pods."""
    held = [device for pod in tenants for device in pod.device_health]
    names = [f"new-{number}" for number in range(GPUS - len(held))]
    new = [cluster.pods.run(name, gpus=1) for name in names]
    given = [device for pod in new for device in pod.device_health]
    assert len(given) == len(set(given)) == GPUS - len(held)
    assert not set(given) & set(held)
    cluster.pods.create("one-too-many", gpus=1)
    wait_until(
        lambda: expect(
            holds=any("Insufficient nvidia.com/gpu" in event for event in cluster.pods.events("one-too-many")),
            seen=cluster.pods.events("one-too-many"),
        ),
        "no GPU is left",
        within=30,
    )
    for pod in tenants:
        now = cluster.pods.get(pod.name)
        assert (now.container_id, now.restarts, now.running) == (pod.container_id, 0, True), str(now)
        assert now.device_health.keys() == pod.device_health.keys()
    cluster.pods.delete("one-too-many", *names)
