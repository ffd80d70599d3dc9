"""Installs the chart with helm, and inspects the plugin's pod."""

import http.client
import json
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from .cluster import Cluster
from .pods import Pod
from .process import run
from .wait import NotYet, expect, wait_until

CHART = Path(__file__).parents[3] / "helm" / "gpu-plugin"
IMAGE = "localhost/gpu-plugin-e2e/gpu-plugin"

NEXT = "0.1.1"
"""The version after the upgrade."""

IMAGES = ((f"{IMAGE}:1", None), (f"{IMAGE}:2", NEXT))
"""Names and versions of the images that are installed; None: the version of the checkout."""
LABEL = "nvidia.com/device-plugin.config"
"""The node label that selects a config file."""

PRESENT = "nvidia.com/gpu.present"
"""The node label that the chart's affinity requires."""

NAME = "gpus"
NAMESPACE = "gpu-system"
PORT = 9480
"""The port of the chart's HTTP listener."""

KINDS = (
    *("daemonsets", "controllerrevisions", "jobs", "pods", "serviceaccounts", "configmaps", "secrets"),
    *("roles", "rolebindings", "clusterroles", "clusterrolebindings", "networkpolicies", "services"),
)
"""Every kind of object that the chart, helm or the controllers create."""


class Release:
    """A release of the chart on the cluster's node. Its daemon serves a simulated node."""

    def __init__(self, cluster: Cluster, helm: Path) -> None:
        self._cluster = cluster
        self._helm = helm
        root = cluster.layout.root
        self.state_dir = root / "installed" / "gpu-plugin"
        self._kubeconfig = cluster.admin_kubeconfig
        self._environment = {"PATH": "/usr/bin:/bin", "HOME": str(root / "helm"), "KUBECONFIG": str(self._kubeconfig)}

    @property
    def values(self) -> dict[str, Any]:
        """Values for this machine and the simulated node, and short intervals. All other values are the chart's defaults."""
        layout = self._cluster.layout
        return {
            "image": {"repository": IMAGE, "tag": "1", "pullPolicy": "Never"},
            "simulate": "hgx-h100",
            "deviceListStrategy": "cdi-cri",
            "cdi": {"dir": str(layout.cdi)},
            "kubelet": {"podResourcesDir": str(layout.pod_resources.parent)},
            "stateDir": str(self.state_dir),
            "health": {"pollInterval": "500ms", "flapGuard": "0s"},
            "log": {"level": "debug"},
        }

    def helm(self, *arguments: str, within: float = 120.0) -> str:
        """Run helm in the release's namespace and return its output."""
        command = [str(self._helm), *arguments, f"--namespace={NAMESPACE}"]
        return run(command, within=within, environment=self._environment)

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl as an administrator and return its output."""
        return run([str(self._cluster.kubectl), *arguments], environment=self._environment)

    def install(self, *values: dict[str, Any], wait: bool = True) -> None:
        """Run `helm install` with the chart of the checkout. Later values override earlier values."""
        self.helm(
            "install", NAME, str(CHART), "--create-namespace", *self._given(values), *(["--wait"] if wait else [])
        )

    def upgrade(self, *values: dict[str, Any]) -> None:
        """Run `helm upgrade` with the usual values and these values, without values of an earlier command."""
        self.helm("upgrade", NAME, str(CHART), "--wait", *self._given(values))

    def uninstall(self) -> None:
        """Run `helm uninstall` if the release exists, and wait until its pods have ended."""
        self.helm("uninstall", NAME, "--ignore-not-found", "--wait")
        wait_until(lambda: expect(holds=not self.pods(), seen=self.pods()), "the plugin's pods are gone", within=30)

    def rendered(self) -> Path:
        """Write the output of `helm template`, including hooks, to a file and return its path."""
        file = self._cluster.layout.root / "helm" / "rendered.yaml"
        values = self._given(())
        file.write_text(self.helm("template", NAME, str(CHART), *values))
        return file

    def left_in_the_api(self) -> str:
        """Return the names of this release's objects in the API server, without objects that are being deleted."""
        selectors = (f"app.kubernetes.io/instance={NAME}", f"name={NAME},owner=helm")
        return "".join(
            self.kubectl("get", ",".join(KINDS), "--all-namespaces", "--output=name", f"--selector={selector}")
            for selector in selectors
        )

    def pods(self) -> list[Pod]:
        """Return the plugin's pods, including pods that are being deleted."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app.kubernetes.io%2Fcomponent%3Ddevice-plugin"
        return [Pod(content) for content in self._cluster.api.get(path)["items"]]

    def pod(self) -> Pod:
        """Return the only plugin pod. Raises NotYet if there is no pod or more than one."""
        found = [pod for pod in self.pods() if "deletionTimestamp" not in pod.content["metadata"]]
        expect(holds=len(found) == 1, seen=[str(pod) for pod in found])
        return found[0]

    def gpu_plugin(self, *arguments: str) -> str:
        """Run `gpu-plugin` inside the plugin's container."""
        return self._cluster.containerd.execute(self.pod().container_id, ["gpu-plugin", *arguments])

    def ask(self, path: str) -> tuple[int, str]:
        """Send a GET request to the listener and return the status and the body. Raises NotYet without a response."""
        address = self.pod().content["status"].get("podIP")
        try:
            with urllib.request.urlopen(f"http://{address}:{PORT}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise NotYet(f"{address}: {error}") from error

    def shared_mount(self) -> Path:
        """Return a directory with shared mount propagation, as / has on a node with systemd. The sweep unmounts it."""
        place = self._cluster.layout.root / "shared"
        place.mkdir(exist_ok=True)
        if not place.is_mount():
            run(["mount", "--bind", str(place), str(place)])
            run(["mount", "--make-shared", str(place)])
        return place

    def log(self) -> str:
        """Return the logs of all plugin pods of the release, including former pods whose logs the kubelet kept."""
        files = self._cluster.layout.pod_logs.glob(f"{NAMESPACE}_*/*/*.log")
        return "\n".join(file.read_text(errors="replace") for file in sorted(files))

    def label_node(self, label: str, value: str | None) -> None:
        """See `Cluster.label_node`."""
        self._cluster.label_node(label, value)

    def _given(self, values: tuple[dict[str, Any], ...]) -> list[str]:
        directory = self._cluster.layout.root / "helm"
        directory.mkdir(exist_ok=True)
        given = []
        for number, each in enumerate((self.values, *values)):
            file = directory / f"values-{number}.json"
            file.write_text(json.dumps(each))
            given.append(f"--values={file}")
        return given
