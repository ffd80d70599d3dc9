"""From NVIDIA's chart to this one, as docs/migration.md has it, while pods use GPUs that NVIDIA's plugin gave them.

`nvidia_chart` has the objects, labels, selectors, paths and sockets of NVIDIA's chart 0.20.0: the DaemonSets of the plugin, the
MPS control daemon and GPU Feature Discovery, and a ConfigMap. Its pods run small replacements of NVIDIA's programs.
"""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness.cluster import Cluster
from .harness.layout import DEVICE_PLUGINS, NODE
from .harness.plugin import GPUS
from .harness.pods import PATH as PODS
from .harness.pods import Pod
from .harness.process import PieceError
from .harness.release import IMAGE, KINDS, NAME, NAMESPACE, Release
from .harness.wait import expect, wait_until

NVIDIAS_CHART = Path(__file__).parent / "nvidia_chart"
NVIDIAS_LABELS = f"app.kubernetes.io/instance={NAME},!app.kubernetes.io/component"
"""Selects the objects and pods of NVIDIA's release. All objects of this chart have the label of a component."""

OUR_LABELS = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component"
NVIDIAS_SOCKET = DEVICE_PLUGINS / "nvidia-gpu.sock"
NVIDIAS_PROGRAMS = ("", "-mps-control-daemon", "-gpu-feature-discovery")
"""The suffixes of the names of NVIDIA's DaemonSets."""

MPS_CAPABLE = "nvidia.com/mps.capable"
"""The node label that NVIDIA's MPS control daemon needs."""

CONFIGS = {
    "default": "version: v1\nflags: {migStrategy: none}\n",
    "shared": "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n",
}
CDI_FILE = "k8s.device-plugin.nvidia.com-gpu.json"
OBJECTS = "daemonsets,pods,configmaps,serviceaccounts"
OF_EVERY_NAMESPACE = {"configmap/kube-root-ca.crt", "serviceaccount/default"}

FILE_CHECK_SECONDS = 60
"""The pause between two checks of the file of labels (docs/labels.md)."""


class Migration:
    """A release of NVIDIA's chart, and three running pods, the tenants, with four GPUs that its plugin gave them."""

    def __init__(self, cluster: Cluster, release: Release, gpus: list[str]) -> None:
        self.cluster = cluster
        self.release = release
        self.labels = cluster.layout.root / "features.d" / "gfd"
        self.cdi = cluster.layout.cdi / CDI_FILE
        self.tenants: list[Pod] = []
        self._gpus = gpus

    def begin(self, fullname: str = f"{NAME}-nvidia-device-plugin", **names: str) -> None:
        """Install NVIDIA's chart with the values `names`, which make `fullname` of it, and start the tenants."""
        root = self.cluster.layout.root
        values = {
            "image": {"repository": IMAGE, "tag": "1", "pullPolicy": "Never"},
            "config": {"map": CONFIGS, "default": "default"},
            "gfd": {"enabled": True},
            "nfd": {"enableNodeFeatureApi": False},
            "mps": {"root": str(root / "nvidia-mps")},
            "standIn": {"gpus": self._gpus, "cdi": str(self.cdi.parent), "features": str(self.labels.parent)},
            **names,
        }
        file = root / "nvidias-values.json"
        file.write_text(json.dumps(values))
        self.labels.parent.mkdir(exist_ok=True)
        self.cdi.parent.mkdir(exist_ok=True)
        # NVIDIA's plugin leaves its specification when it ends.
        devices = [{"name": gpu, "containerEdits": {"env": ["BY=STAND-IN"]}} for gpu in self._gpus]
        spec = {"cdiVersion": "0.5.0", "kind": "k8s.device-plugin.nvidia.com/gpu", "devices": devices}
        self.cdi.write_text(json.dumps(spec))
        self.cluster.label_node(MPS_CAPABLE, "true")
        self.release.helm("install", NAME, str(NVIDIAS_CHART), "--create-namespace", f"--values={file}", "--wait")
        self.cluster.wait_allocatable(GPUS)
        pods = self.cluster.pods
        self.tenants = [pods.run(name, gpus=gpus) for name, gpus in (("one", 1), ("two", 1), ("pair", 2))]
        for pod in self.tenants:
            assert visible_gpus(self.cluster, pod) == set(pod.device_health)
        assert self.objects("daemonsets") == {f"daemonset.apps/{fullname}{program}" for program in NVIDIAS_PROGRAMS}
        assert len(self.objects("pods")) == len(NVIDIAS_PROGRAMS)
        assert f"configmap/{fullname}-configs" in self.objects("configmaps")
        assert "STAND-IN" in self.labels.read_text()

    def values(self) -> tuple[dict[str, Any], ...]:
        """The values of NVIDIA's release, as a user reads them from it, and a directory of this machine."""
        values = json.loads(self.release.helm("get", "values", NAME, "--output=json"))
        del values["standIn"]
        return values, {"cluster": {"featuresDir": str(self.labels.parent)}}

    def objects(self, kinds: str, *options: str) -> set[str]:
        """The objects of these kinds in the release's namespace, as kind/name."""
        return set(self.release.kubectl("get", kinds, f"--namespace={NAMESPACE}", "--output=name", *options).split())

    def delete(self, *arguments: str) -> None:
        """`kubectl delete` in the release's namespace."""
        self.release.kubectl("delete", f"--namespace={NAMESPACE}", *arguments)

    def nothing_is_left(self, labels: str = NVIDIAS_LABELS) -> None:
        """Wait until no object with these labels and no socket of NVIDIA's plugin is left."""

        def condition() -> None:
            kinds = ",".join(KINDS)
            left = self.release.kubectl("get", kinds, "--all-namespaces", "--output=name", f"--selector={labels}")
            expect(holds=left == "", seen=left)
            expect(holds=labels == OUR_LABELS or not NVIDIAS_SOCKET.exists(), seen=NVIDIAS_SOCKET)

        wait_until(condition, "the former release is gone", within=60)

    def has_taken_over(self, fullname: str = f"{NAME}-gpu-plugin") -> None:
        """This plugin serves all GPUs, the tenants run on, and every object belongs to this chart."""
        release = self.release
        self.nothing_is_left()
        wait_until(
            lambda: expect(holds=release.ask("/readyz")[0] == 200, seen=release.ask("/readyz")), "ready", within=60
        )
        self.cluster.wait_allocatable(GPUS)
        self.each_gpu_is_held_once()
        plugin = release.pod()
        assert plugin.content["metadata"]["ownerReferences"][0]["name"] == fullname
        assert self.objects(OBJECTS) - OF_EVERY_NAMESPACE == {
            f"daemonset.apps/{fullname}",
            f"pod/{plugin.name}",
            f"configmap/{fullname}-configs",
            f"serviceaccount/{fullname}",
        }

        specification = self.cdi.read_text()
        assert "STAND-IN" not in specification
        assert "/dev/nvidia0" in specification

        # GPU Feature Discovery removes the file when it ends, also if this plugin wrote it.
        def labelled() -> None:
            text = self.labels.read_text() if self.labels.exists() else ""
            expect(holds="nvidia.com/gpu.present=true\n" in text and "STAND-IN" not in text, seen=text)

        wait_until(labelled, "the file has the labels of this plugin", within=FILE_CHECK_SECONDS + 15)

    def is_back(self, fullname: str = f"{NAME}-nvidia-device-plugin") -> None:
        """NVIDIA's plugin serves all GPUs again, the tenants run on, and no object belongs to this chart."""
        self.nothing_is_left(OUR_LABELS)
        self.cluster.wait_allocatable(GPUS)
        self.each_gpu_is_held_once()
        assert self.objects("daemonsets") == {f"daemonset.apps/{fullname}{program}" for program in NVIDIAS_PROGRAMS}
        assert len(self.objects("pods")) == len(NVIDIAS_PROGRAMS)
        assert "STAND-IN" in self.labels.read_text()

    def tenants_run_on(self) -> None:
        """The tenants have their first containers and their GPUs."""
        for pod in self.tenants:
            now = self.cluster.pods.get(pod.name)
            assert (now.container_id, now.restarts, now.running) == (pod.container_id, 0, True), str(now)
            assert now.device_health.keys() == pod.device_health.keys()

    def each_gpu_is_held_once(self) -> None:
        """New pods get exactly the GPUs that no tenant has, and a further pod gets none; then they are deleted."""
        pods = self.cluster.pods
        held = [device for pod in self.tenants for device in pod.device_health]
        names = [f"new-{number}" for number in range(GPUS - len(held))]
        new = [pods.run(name, gpus=1) for name in names]
        given = [device for pod in new for device in pod.device_health]
        assert len(given) == len(set(given)) == GPUS - len(held)
        assert not set(given) & set(held)
        pods.create("one-too-many", gpus=1)
        stays_pending(self.cluster, "one-too-many")
        self.tenants_run_on()
        pods.delete("one-too-many", *names)


@pytest.fixture
def migration(cluster: Cluster, release: Release, numbers: dict[str, int]) -> Iterator[Migration]:
    migration = Migration(cluster, release, sorted(numbers))
    yield migration
    cluster.pods.delete_all()
    release.uninstall()
    # A rollback does not clean the node as an uninstallation does.
    migration.cdi.unlink(missing_ok=True)
    shutil.rmtree(release.state_dir, ignore_errors=True)
    cluster.label_node(MPS_CAPABLE, None)


def test_uninstall_and_install(migration: Migration, capsys: pytest.CaptureFixture[str]) -> None:
    migration.begin()
    cluster, release, pods = migration.cluster, migration.release, migration.cluster.pods
    values = migration.values()
    restarted = pods.run("restarted", gpus=1, restart="Always")

    began = time.monotonic()
    release.helm("uninstall", NAME, "--wait")
    uninstalled = time.monotonic() - began
    migration.nothing_is_left()
    assert migration.objects(OBJECTS) == OF_EVERY_NAMESPACE
    assert not migration.labels.exists()
    cluster.wait_allocatable(0)
    assert cluster.node_gpus() == (GPUS, 0)

    pods.signal(restarted, signal.SIGTERM)
    wait_until(
        lambda: expect(holds=pods.get("restarted").restarts == 1, seen=pods.get("restarted")), "it ended", within=30
    )
    assert visible_gpus(cluster, pods.wait_running("restarted")) == set(restarted.device_health)
    pods.create("waiting", gpus=1)
    stays_pending(cluster, "waiting")
    pods.create("too-early", gpus=1)
    bind(cluster, "too-early")
    wait_until(
        lambda: expect(holds=pods.get("too-early").phase == "Failed", seen=pods.get("too-early")), "failed", within=30
    )
    assert pods.get("too-early").reason.startswith("UnexpectedAdmissionError ")
    migration.tenants_run_on()

    began = time.monotonic()
    release.install(*values, wait=False)
    waiting = pods.wait_running("waiting", within=60)
    with capsys.disabled():
        print(f"\nhelm uninstall: {uninstalled:.1f} s; helm install to a running pod: {time.monotonic() - began:.1f} s")
    held = [device for pod in (*migration.tenants, restarted) for device in pod.device_health]
    assert not set(waiting.device_health) & set(held)
    pods.delete("waiting", "restarted", "too-early")
    migration.has_taken_over()


def test_upgrade_of_the_same_release_and_back(migration: Migration) -> None:
    migration.begin()
    migration.release.upgrade(*migration.values())
    migration.has_taken_over()
    migration.release.helm("rollback", NAME, "1", "--wait")
    migration.is_back()
    migration.release.helm("uninstall", NAME, "--wait")
    migration.nothing_is_left()


@pytest.mark.parametrize("override", ["fullnameOverride", "nameOverride"])
def test_upgrade_where_both_charts_make_the_same_name(migration: Migration, override: str) -> None:
    # This nameOverride is a part of the release's name, so both charts use the release's name alone.
    migration.begin(NAME, **{override: {"fullnameOverride": NAME, "nameOverride": NAME[:3]}[override]})
    values, release = migration.values(), migration.release
    with pytest.raises(PieceError, match="field is immutable"):
        release.upgrade(*values)
    migration.tenants_run_on()
    assert len(migration.objects("pods", f"--selector={NVIDIAS_LABELS}")) == len(NVIDIAS_PROGRAMS)

    # All three DaemonSets have the same selector: MPS and GPU Feature Discovery would adopt the plugin's pods, and delete them.
    migration.delete("daemonset", f"{NAME}-mps-control-daemon", f"{NAME}-gpu-feature-discovery")
    migration.delete("daemonset", NAME, "--cascade=orphan")
    migration.cluster.pods.run("between", gpus=1)
    release.upgrade(*values)
    assert len(migration.objects("pods", f"--selector={NVIDIAS_LABELS}")) == 1
    migration.cluster.pods.delete("between")
    migration.delete("pods,controllerrevisions", f"--selector={NVIDIAS_LABELS}")
    migration.has_taken_over(NAME)

    # Kubelets up to 1.36 drop the newer plugin when the older one ends, and NVIDIA's plugin does not register again.
    migration.delete("daemonset", f"--selector={OUR_LABELS}", "--cascade=foreground")
    assert migration.objects("pods") == set()
    release.helm("rollback", NAME, "1", "--wait")
    migration.is_back(NAME)
    release.helm("uninstall", NAME, "--wait")
    migration.nothing_is_left()


def visible_gpus(cluster: Cluster, pod: Pod) -> set[str]:
    """The GPUs that the pod's container was given by NVIDIA's plugin."""
    return set(cluster.pods.environment(pod)["NVIDIA_VISIBLE_DEVICES"].split(","))


def bind(cluster: Cluster, name: str) -> None:
    """Assign the pod to the node, as a scheduler does with an older status of the node."""
    target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
    cluster.api.create(f"{PODS}/{name}/binding", body)


def stays_pending(cluster: Cluster, name: str) -> None:
    """Wait until the scheduler found no GPU for the pod."""

    def condition() -> None:
        events = cluster.pods.events(name)
        expect(holds=any("Insufficient nvidia.com/gpu" in event for event in events), seen=events)

    wait_until(condition, f"there is no GPU for {name}", within=30)
    assert cluster.pods.get(name).phase == "Pending"
