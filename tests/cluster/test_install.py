"""The chart on a real cluster, with the image of this checkout: install, use, upgrade, rollback and uninstall."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from gpu_plugin.kubelet import pod_resources
from gpu_plugin.kubelet.bounded_channel import CallError

from .harness import binaries
from .harness.cluster import Cluster
from .harness.layout import DEVICE_PLUGINS
from .harness.plugin import GPUS, RESOURCE
from .harness.pods import Pod
from .harness.process import PieceError
from .harness.release import CHART, IMAGE, LABEL, NAME, NAMESPACE, NEXT, Release
from .harness.wait import expect, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"

INSTALL_TO_POD = 15.0
"""Limit in seconds from `helm install` to the first running GPU pod, with present images. The test prints the time."""


def ready(release: Release) -> Pod:
    """Wait until the plugin's pod is Ready, and return it."""

    def condition() -> Pod:
        pod = release.pod()
        conditions = {each["type"]: each["status"] for each in pod.content["status"].get("conditions", [])}
        expect(holds=conditions.get("Ready") == "True", seen=f"{pod}: {conditions}")
        return pod

    return wait_until(condition, "the plugin's pod is Ready", within=60)


def proc_status(cluster: Cluster, pod: Pod) -> dict[str, str]:
    """Return /proc/PID/status of a container's first process."""
    pid = (cluster.layout.tasks / pod.container_id / "init.pid").read_text()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_install_use_and_uninstall(cluster: Cluster, release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    release.install(wait=False)
    pod = cluster.pods.create("first", gpus=2)
    pod = cluster.pods.wait_running("first", within=60)
    seconds = time.monotonic() - began
    with capsys.disabled():
        print(f"\nhelm install to the first GPU pod running: {seconds:.1f} s")
    assert seconds < INSTALL_TO_POD
    assert len(pod.device_health) == 2
    assert set(pod.device_health.values()) == {"Healthy"}
    assert len(cluster.pods.gpu_numbers(pod)) == 2
    assert cluster.node_gpus() == (GPUS, GPUS)

    plugin = ready(release)
    status = proc_status(cluster, plugin)
    assert (
        int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 1 << 27
    )  # CAP_MKNOD, for the simulated node's devices
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    spec = plugin.content["spec"]
    assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    assert not any(volume.get("projected") for volume in spec["volumes"])  # the pod does not use the API
    assert {volume["hostPath"]["path"] for volume in spec["volumes"]} == {
        str(DEVICE_PLUGINS),
        str(cluster.layout.pod_resources.parent),
        str(release.state_dir),
        str(cluster.layout.cdi),
    }

    for path in ("/livez", "/readyz", "/startupz"):
        code, body = release.ask(path)
        assert code == 200, body
    code, metrics = release.ask("/metrics")
    assert code == 200
    assert 'gpu_plugin_devices{resource="nvidia.com/gpu",state="healthy"} 8' in metrics

    release.helm("test", NAME)

    held = sorted(cluster.pods.gpu_numbers(pod))
    release.gpu_plugin("fault", "--gpu", str(held[0]), "--xid", "79")
    cluster.wait_allocatable(GPUS - 1)
    wait_until(
        lambda: expect(
            holds=sorted(cluster.pods.get("first").device_health.values()) == ["Healthy", "Unhealthy"],
            seen=cluster.pods.get("first").device_health,
        ),
        "the pod's status tells of the fault",
        within=20,
    )
    release.gpu_plugin("fault", "--gpu", str(held[0]), "--heal")
    cluster.wait_allocatable(GPUS, within=60)

    cluster.kubelet.restart()
    cluster.wait_allocatable(GPUS)
    after = ready(release)
    assert (after.uid, after.restarts) == (plugin.uid, 0)
    assert cluster.pods.run("second", gpus=1).running

    cluster.pods.delete_all()
    assert release.state_dir.is_dir()
    release.uninstall()
    assert release.left_in_the_api() == ""
    assert not release.state_dir.exists()
    assert [path.name for path in DEVICE_PLUGINS.glob("gpu-plugin-*")] == []
    assert list(cluster.layout.cdi.iterdir()) == []
    wait_until(
        lambda: expect(holds=cluster.node_gpus()[1] == 0, seen=cluster.node_gpus()), "nothing is offered", within=20
    )


def test_upgrade_and_roll_back_under_running_pods(cluster: Cluster, release: Release) -> None:
    release.install()
    pods = [cluster.pods.run(f"tenant-{number}", gpus=1) for number in range(2)]
    first = ready(release)

    def undisturbed() -> None:
        for pod in pods:
            now = cluster.pods.get(pod.name)
            expect(holds=(now.container_id, now.restarts, now.running) == (pod.container_id, 0, True), seen=str(now))
            expect(holds=now.device_health.keys() == pod.device_health.keys(), seen=now.device_health)

    release.gpu_plugin("cordon", "7")
    cluster.wait_allocatable(GPUS - 1)
    release.upgrade({"image": {"tag": "2"}, "health": {"pollInterval": "1s"}})
    second = ready(release)
    assert second.uid != first.uid
    assert second.content["spec"]["containers"][0]["image"] == f"{IMAGE}:2"
    assert release.gpu_plugin("--version").strip() == f"gpu-plugin {NEXT}"
    cluster.wait_allocatable(GPUS - 1)  # the evidence against a GPU outlives the plugin's pod
    undisturbed()

    configs = {
        "default": "version: v1\n",
        "shared": f"version: v1\nsharing: {{timeSlicing: {{resources: [{{name: {RESOURCE}, replicas: 2}}]}}}}\n",
    }
    release.upgrade({"image": {"tag": "2"}, "config": {"map": configs, "default": "default"}})
    third = ready(release)
    cluster.wait_allocatable(GPUS - 1)
    release.label_node(LABEL, "shared")
    cluster.wait_offers({RESOURCE: 2 * (GPUS - 1 - len(pods))})  # GPUs that pods hold as whole GPUs are not shared
    release.label_node(LABEL, None)
    cluster.wait_allocatable(GPUS - 1)
    assert ready(release).uid == third.uid  # the running process applies the label
    undisturbed()

    release.helm("rollback", NAME, "1", "--wait")
    assert ready(release).content["spec"]["containers"][0]["image"] == f"{IMAGE}:1"
    cluster.wait_allocatable(GPUS - 1)
    undisturbed()
    release.gpu_plugin("uncordon", "7")
    cluster.wait_allocatable(GPUS)


class Capacity(threading.Thread):
    """Requests the kubelet's healthy GPUs continuously, and measures for how long it had no healthy GPU."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self._socket = cluster.layout.pod_resources
        self._over = threading.Event()
        self.answers = 0
        self.empty = 0
        """Number of answers without a GPU."""
        self.longest_gap = 0.0
        """Upper bound of the gap: seconds from the last request whose answer had a GPU to the next answer with a GPU."""

    def run(self) -> None:
        anyio.run(self._ask)

    async def _ask(self) -> None:
        full, empty = time.monotonic(), False
        while not self._over.is_set():
            asked = time.monotonic()
            try:
                healthy = await pod_resources.allocatable(self._socket)
            except CallError:  # the kubelet answers fewer requests in a second
                continue
            self.answers += 1
            if healthy.get(RESOURCE):
                if empty:
                    self.longest_gap = max(self.longest_gap, time.monotonic() - full)
                full, empty = asked, False
            else:
                self.empty += 1
                empty = True
            await anyio.sleep(0.012)

    def stop(self) -> None:
        """Stop and wait for the last answer."""
        self._over.set()
        self.join()


def test_every_pod_starts_during_an_upgrade(
    cluster: Cluster, release: Release, capsys: pytest.CaptureFixture[str]
) -> None:
    release.install()
    first = ready(release)
    capacity = Capacity(cluster)
    capacity.start()
    upgrade = threading.Thread(target=release.upgrade, args=({"image": {"tag": "2"}},), daemon=True)
    upgrade.start()
    created, until = 0, 0.0
    while upgrade.is_alive() or len(release.pods()) > 1 or time.monotonic() < until:
        until = time.monotonic() + 2 if upgrade.is_alive() else until
        pods = cluster.pods.all()
        ended = [pod.name for pod in pods if pod.phase == "Succeeded"]
        for name in ended:
            cluster.api.delete(f"/api/v1/namespaces/default/pods/{name}", grace=0)
        if len(pods) - len(ended) < GPUS:
            cluster.pods.create(f"short-{created}", gpus=1, shell="true")
            created += 1
        time.sleep(
            0.25
        )  # more pods at a time overload two processors, and the gap would measure the load, not the takeover
    capacity.stop()
    pods = cluster.pods.all()
    refused = [f"{pod}: {pod.content['status'].get('message')}" for pod in pods if pod.phase == "Failed"]
    assert ready(release).uid != first.uid
    with capsys.disabled():
        print(
            f"\nhelm upgrade on Kubernetes {binaries.kubernetes_version()}: {created} pods created, {len(refused)} refused; "
            f"{capacity.empty} of {capacity.answers} answers without a GPU, for at most {capacity.longest_gap * 1000:.0f} ms"
        )
    assert created > GPUS
    if binaries.kubernetes_version().startswith("1.36."):
        assert len(refused) <= 1, refused  # the kubelet drops the new plugin when the former plugin's stream ends
        assert capacity.longest_gap <= 0.2  # about 0.03 s on an idle machine
    else:
        assert not refused
        assert not capacity.empty


NVIDIAS_VALUES: dict[str, Any] = {
    "config": {"name": "", "default": "", "fallbackStrategies": ["named", "single"], "map": {
        "default": "version: v1\nflags:\n  migStrategy: none\n",
        "sharing": "version: v1\nsharing:\n  timeSlicing:\n    renameByDefault: true\n    resources:\n"
        "      - name: nvidia.com/gpu\n        replicas: 4\n",
    }},
    "compatWithCPUManager": None,
    "migStrategy": "none",
    "failOnInitError": "true",
    "deviceListStrategy": "envvar",
    "deviceIDStrategy": "uuid",
    "gdsEnabled": None,
    "allowDefaultNamespace": True,
    "runtimeClassName": None,
    "gfd": {"enabled": True, "noTimestamp": None},
    "nfd": {"master": {"extraLabelNs": ["nvidia.com"]}},
    "mps": {"root": "/run/nvidia/mps"},
    "cdi": {"nvidiaHookPath": None, "featureFlags": None},
    "updateStrategy": {"type": "RollingUpdate"},
}  # fmt: skip
"""An operator's values file for NVIDIA's chart."""


def test_nvidias_values_file_is_taken_under_running_pods(cluster: Cluster, release: Release) -> None:
    release.install()
    pod = cluster.pods.run("tenant", gpus=1)
    release.upgrade(NVIDIAS_VALUES)
    ready(release)
    cluster.wait_allocatable(GPUS)
    assert "gfd.enabled: the plugin writes its labels to" in release.helm("get", "notes", NAME)
    release.label_node(LABEL, "sharing")
    cluster.wait_offers({"nvidia.com/gpu.shared": 4 * (GPUS - 1)})
    now = cluster.pods.get("tenant")
    assert (now.container_id, now.running, now.restarts) == (pod.container_id, True, 0)
    shared = cluster.pods.run("shared", gpus=1, resource="nvidia.com/gpu.shared")
    assert cluster.pods.environment(shared)["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-")


def test_an_uninstall_that_fails_is_undone_by_a_rollback(cluster: Cluster, release: Release) -> None:
    release.install()
    serving = ready(release)
    release.helm("upgrade", NAME, str(CHART), "--reset-then-reuse-values", "--set", "image.tag=nowhere", "--wait=false")
    # The hook of the uninstall needs an image that does not exist.
    with pytest.raises(PieceError, match="gpus-gpu-plugin-uninstall not ready"):
        release.helm("uninstall", NAME, "--timeout", "10s")
    with pytest.raises(PieceError, match="no deployed releases"):
        release.upgrade()
    release.helm("rollback", NAME, "1", "--wait")
    assert ready(release).uid == serving.uid  # the former pod served all the time, also while the new pod had no image
    cluster.wait_allocatable(GPUS)
    assert not any(name in release.left_in_the_api() for name in ("uninstall", "cleanup"))


def test_mps_daemons_serve_their_resource_and_leave_nothing(cluster: Cluster, release: Release) -> None:
    root = release.shared_mount() / "mps"
    shared = f"version: v1\nsharing: {{mps: {{resources: [{{name: {RESOURCE}, replicas: 2}}]}}}}\n"
    release.install({"config": {"map": {"default": shared}}, "mps": {"root": str(root)}})
    cluster.wait_offers({RESOURCE: 2 * GPUS}, within=60)  # unhealthy until their control daemon answers
    pod = cluster.pods.run("client", gpus=1)
    environment = cluster.pods.environment(pod)
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == f"/mps/{RESOURCE}/pipe"
    assert "control" in cluster.pods.execute(pod, "ls", environment["CUDA_MPS_PIPE_DIRECTORY"])
    assert (root / "shm").is_mount()

    cluster.pods.delete_all()
    release.uninstall()
    assert not root.exists()
    assert not release.state_dir.exists()
    assert release.left_in_the_api() == ""


def test_a_rendered_chart_that_is_applied_with_its_hooks_keeps_the_plugin(cluster: Cluster, release: Release) -> None:
    if not cluster.api.exists(f"/api/v1/namespaces/{NAMESPACE}"):
        cluster.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    manifest = [f"--namespace={NAMESPACE}", f"--filename={release.rendered()}"]
    release.kubectl("apply", *manifest)
    serving = ready(release)

    def ended() -> None:
        status = cluster.api.get(f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{NAME}-gpu-plugin-uninstall")["status"]
        expect(holds=status.get("succeeded") == 1, seen=status)

    wait_until(ended, "the Job of helm uninstall has ended", within=60)
    cluster.wait_allocatable(GPUS)
    assert ready(release).uid == serving.uid
    assert any(release.state_dir.iterdir())
    release.kubectl("delete", *manifest, "--wait")
    wait_until(lambda: expect(holds=not release.pods(), seen=release.pods()), "its pods are gone", within=30)


@pytest.mark.parametrize("manifest", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_the_api_server_takes_each_manifest(release: Release, manifest: Path) -> None:
    release.kubectl("apply", "--dry-run=server", f"--filename={manifest}")


VIOLATIONS = (
    *("host namespaces", "privileged", "hostPath volumes", "hostPort", "non-default capabilities", "seccompProfile"),
    *("allowPrivilegeEscalation != false", "unrestricted capabilities", "restricted volume types"),
    *("runAsNonRoot != true", "runAsUser=0"),
)
"""The names of the checks of pod security admission (k8s.io/pod-security-admission, policy/check_*.go)."""


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("baseline", {"hostPath volumes"}),
        ("restricted", {"restricted volume types", "runAsNonRoot != true", "runAsUser=0"}),
    ],
)
def test_pod_security_forbids_the_plugins_pod_what_the_documentation_says(
    cluster: Cluster, release: Release, level: str, expected: set[str]
) -> None:
    release.install({"deviceListStrategy": "envvar"})
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "plugin"}, "spec": _bare(ready(release))}
    file = cluster.layout.root / "helm" / "pod.json"
    file.write_text(json.dumps(pod))
    with namespace(cluster, level) as name:
        with pytest.raises(PieceError) as refused:
            release.kubectl("apply", "--dry-run=server", f"--namespace={name}", f"--filename={file}")
        assert {each for each in VIOLATIONS if each in str(refused.value)} == expected
        release.kubectl("apply", "--dry-run=server", f"--namespace={name}", f"--filename={DEPLOY / 'gpu-pod.yaml'}")


@contextmanager
def namespace(cluster: Cluster, level: str) -> Iterator[str]:
    """Create a namespace that enforces a level of pod security, with the service account that pods need."""
    name = f"level-{level}"
    labels = {"pod-security.kubernetes.io/enforce": level}
    cluster.api.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    wait_until(lambda: expect(holds=cluster.api.exists(account), seen="none"), f"{account} exists", within=20)
    yield name
    cluster.api.delete(f"/api/v1/namespaces/{name}", grace=0)


def _bare(pod: Pod) -> dict[str, Any]:
    """Return a pod's specification without the fields that the cluster added."""
    added = (
        "nodeName",
        "serviceAccount",
        "serviceAccountName",
        "priority",
        "affinity",
        "tolerations",
        "priorityClassName",
    )
    return {key: value for key, value in pod.content["spec"].items() if key not in added}
