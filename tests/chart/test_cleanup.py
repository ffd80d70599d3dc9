"""The DaemonSets that clean up after the DaemonSets of the chart, as `gpu-plugin uninstall` creates them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import generate
from gpu_plugin.cli.uninstall.nodes import CLEANUP, cleanup_daemonset
from tests.chart.helm import Helm, Object
from tests.chart.test_manifests import judged
from tests.chart.value_table import CDI, MATRIX, MPS

LABELLED = {"cluster": {"nodeLabels": "file", "nodeCondition": True}}
OF_ONE_POD = ("nodeSelector", "affinity", "tolerations", "serviceAccountName", "imagePullSecrets", "priorityClassName")
"""Fields of a pod that decide where it runs, and if it may."""


def cleanups(objects: list[Object]) -> Iterator[tuple[Object, Mapping[str, Any]]]:
    """Return each DaemonSet with the DaemonSet that cleans up after it."""
    for each in objects:
        if each["kind"] == "DaemonSet":
            yield each, cleanup_daemonset(each)


def cleaning(helm: Helm, values: Mapping[str, Any], component: str = "device-plugin") -> Mapping[str, Any]:
    """Return the specification of the pods that clean up after this component."""
    found = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: made for each, made in cleanups(helm.objects(values))
    }
    return dict(found[component]["spec"]["template"]["spec"])


def mounts(pod: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Return the directory on the node, its type and the path in the container of each volume of the container that cleans up."""
    places = {each["name"]: each["hostPath"] for each in pod["volumes"]}
    (container,) = pod["initContainers"]
    return {
        each["name"]: (places[each["name"]]["path"], places[each["name"]]["type"], each["mountPath"])
        for each in container["volumeMounts"]
    }


@pytest.mark.timeout(900)  # dozens of helm runs
def test_each_daemonset_is_cleaned_up_on_its_nodes_with_its_rights(helm: Helm) -> None:
    for values in MATRIX:
        for found, made in cleanups(helm.objects(values)):
            (old, pod), labels = (
                (each["spec"]["template"]["spec"] for each in (found, made)),
                made["metadata"]["labels"],
            )
            assert {key: old.get(key) for key in OF_ONE_POD} == {key: pod.get(key) for key in OF_ONE_POD}, values
            (container,), (staying,), [daemon] = pod["initContainers"], pod["containers"], old["containers"]
            environment = [each for each in daemon["env"] if each["name"] not in {"POD_IP", "HTTP_ADDRESS"}]
            assert container["env"] == environment
            assert container["securityContext"] == daemon["securityContext"]
            assert staying["args"] == ["cleanup", "--stay"]
            assert not {"hostNetwork", "hostPID"} & set(pod)
            is_mps = "mps" in daemon["args"][:1]
            assert pod["automountServiceAccountToken"] == (old["automountServiceAccountToken"] and not is_mps)
            (name,) = made["spec"]["selector"]["matchLabels"].values()
            assert name == labels[CLEANUP] == made["metadata"]["name"]
            dressed = made["spec"]["template"]["metadata"]["labels"]
            assert dressed[CLEANUP] == name
            assert not found["spec"]["selector"]["matchLabels"].items() <= dressed.items()


@pytest.mark.timeout(900)
def test_every_version_of_kubernetes_takes_them(helm: Helm, kubeconform: Path, schemas: Path, tmp_path: Path) -> None:
    made = [cleanup for values in MATRIX for _, cleanup in cleanups(helm.objects(values))]
    said = judged(kubeconform, schemas, made, tmp_path)
    assert said["resources"] == []
    assert said["summary"]["valid"] > 20


def test_the_parent_of_the_state_directory_is_mounted_because_a_mount_point_cannot_be_removed(helm: Helm) -> None:
    pod = cleaning(helm, CDI | LABELLED | {"stateDir": "/srv/gpus/state/", "extraArgs": ["--log-level=debug"]})
    assert mounts(pod) == {
        "state": ("/srv/gpus", "Directory", "/gpu-plugin-parent"),
        "device-plugins": ("/var/lib/kubelet/device-plugins", "Directory", "/var/lib/kubelet/device-plugins"),
        "cdi": ("/var/run/cdi", "DirectoryOrCreate", "/var/run/cdi"),
        "features": (features(pod), "DirectoryOrCreate", features(pod)),
    }
    (container,) = pod["initContainers"]
    assert container["args"] == ["cleanup", "--wait", "--state-dir=/gpu-plugin-parent/state", "--log-level=debug"]


def features(pod: Mapping[str, Any]) -> str:
    """Return the directory of the file of labels, as the environment names it."""
    return next(str(each["value"]) for each in pod["initContainers"][0]["env"] if each["name"] == "FEATURES_DIR")


def test_no_pod_gets_the_root_of_the_node(helm: Helm) -> None:
    values = MPS | {"stateDir": "/state", "mps": {"enabled": True, "root": "/mps-root"}}
    pod, mps = cleaning(helm, values), cleaning(helm, values, "mps-control-daemon")
    assert mounts(pod)["state"] == ("/state", "DirectoryOrCreate", "/state")
    assert mounts(mps) == {"mps-root": ("/mps-root", "DirectoryOrCreate", "/mps")}
    assert pod["initContainers"][0]["args"] == ["cleanup", "--wait"]
    assert mps["initContainers"][0]["args"] == ["cleanup", "--mps", "--wait"]


def test_the_shared_memory_of_mps_is_unmounted_on_the_node(helm: Helm) -> None:
    pod = cleaning(helm, {"mps": {"enabled": True}}, "mps-control-daemon")
    (container,) = pod["initContainers"]
    assert mounts(pod) == {"mps-root": ("/run/nvidia", "Directory", "/gpu-plugin-parent")}
    assert container["volumeMounts"][0]["mountPropagation"] == "Bidirectional"
    assert container["args"] == ["cleanup", "--mps", "--wait", "--mps-root=/gpu-plugin-parent/mps"]


@pytest.mark.parametrize("name", generate.MANIFESTS)
def test_the_manifests_have_them_as_well(name: str) -> None:
    objects = [each for each in yaml.safe_load_all((generate.DEPLOY / name).read_text()) if each]
    made = [cleanup for _, cleanup in cleanups(objects)]
    assert {each["metadata"]["namespace"] for each in made} == {generate.NAMESPACE}
    assert len(made) == sum(each["kind"] == "DaemonSet" for each in objects) > 0
