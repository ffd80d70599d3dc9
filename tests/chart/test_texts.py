"""Names and paths stay texts, even if YAML would read them as other types."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.helm import CHART, Helm, facts, pods
from tests.chart.value_table import CDI, MPS
from tests.cluster.harness.binaries import KUBERNETES_VERSIONS

NUMBERS = ("123", "007", "1e3", "true", "null", "0x1f")
PATHS = ("/a b", "/a #b", "/{a}", "/[a]", "/a'b", '/a"b', "/a,b", "/é", "/&a", "/*a", "/a\\b", "/%a", "/@", "/a- b")


def _rendered(helm: Helm, release: str, values: dict[str, Any]) -> str:
    return helm.run("template", release, str(CHART), "--kube-version", KUBERNETES_VERSIONS[0], stdin=json.dumps(values))


def _named(name: str) -> dict[str, Any]:
    return {
        **MPS,
        "nameOverride": name,  # equal to the release, so it is the whole name
        "namespaceOverride": name,
        "priorityClassName": name,
        "runtimeClassName": name,
        "commonLabels": {"l": name},
        "commonAnnotations": {"a": name},
        "nodeSelector": {"n": name},
        "podLabels": {"p": name},
        "image": {"tag": name},
        "networkPolicy": {"enabled": True},
        "podMonitor": {"enabled": True, "labels": {"m": name}},
        "prometheusRule": {"enabled": True, "labels": {"m": name}, "alertLabels": {"team": name}},
        "dashboard": {"enabled": True, "labels": {"d": name}, "annotations": {"folder": name}},
        "cluster": {"nodeEvents": True, "podEvents": True, "nodeTaint": "NoSchedule", "nodeCondition": True},
    }


@pytest.fixture(scope="session")
def numbered(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of manifests whose names look like numbers, booleans or null."""
    folder = tmp_path_factory.mktemp("numbered")
    for name in NUMBERS:
        for number, config in enumerate(({}, {"name": name}, {"map": {name: "version: v1"}, "default": name})):
            values = _named(name) | ({"config": config} if config else {})
            (folder / f"{name}-{number}.yaml").write_text(_rendered(helm, name, values))
    return folder


def test_names_are_texts(numbered: Path, kubeconform: Path, schemas: Path) -> None:
    # It reads YAML as Kubernetes does, and its schemas ask for texts.
    location = f"{schemas}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    command = [str(kubeconform), "-strict", "-summary", "-output", "json", "-schema-location", location, str(numbered)]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    assert [(each["filename"], each["name"], each["msg"]) for each in said["resources"]] == []
    assert said["summary"]["valid"] > 10 * len(NUMBERS)


@pytest.mark.parametrize("path", PATHS)
def test_paths_stay_what_they_are(helm: Helm, path: str) -> None:
    given = {
        "stateDir": f"{path}/1",
        "nvidiaDriverRoot": f"{path}/2",
        "nvidiaDevRoot": f"{path}/3",
        "driverRootCtrPath": f"{path}/4",
        "kubelet": {"devicePluginDir": f"{path}/5", "podResourcesDir": f"{path}/6"},
        "cdi": {"dir": f"{path}/7", "nvidiaHookPath": f"{path}/8"},
        "cluster": {"nodeLabels": "file", "featuresDir": f"{path}/10"},
        "mps": {"root": f"{path}/9"},
    }
    objects = [each for each in yaml.safe_load_all(_rendered(helm, "try", {**MPS, **CDI, **given})) if each]
    found = pods(objects)
    plugin, mps = found["device-plugin"], found["mps-control-daemon"]
    hosts = {each["name"]: each["hostPath"]["path"] for each in plugin["volumes"] if "hostPath" in each}
    assert hosts == {
        "device-plugins": f"{path}/5",
        "pod-resources": f"{path}/6",
        "state": f"{path}/1",
        "cdi": f"{path}/7",
        "features": f"{path}/10",
        "driver-root": f"{path}/2",
        "mps-root": f"{path}/9",
    }
    mounts = {each["name"]: each["mountPath"] for each in plugin["containers"][0]["volumeMounts"]}
    assert mounts == {
        "device-plugins": f"{path}/5",
        "pod-resources": f"{path}/6",
        "state": f"{path}/1",
        "cdi": f"{path}/7",
        "features": f"{path}/10",
        "driver-root": f"{path}/4",
        "mps-root": "/mps",
        "configs": "/available-configs",
    }
    assert f"{path}/9/shm" in [each["hostPath"]["path"] for each in mps["volumes"] if "hostPath" in each]
    assert f"{path}/4" in [each["mountPath"] for each in mps["containers"][0]["volumeMounts"]]
    environment = {each["name"]: each.get("value") for each in plugin["containers"][0]["env"]}
    assert environment["NVIDIA_DEV_ROOT"] == f"{path}/3"
    assert environment["NVIDIA_CDI_HOOK_PATH"] == f"{path}/8"


def test_a_version_with_a_plus_sign_gives_labels_that_may_be(helm: Helm, tmp_path: Path) -> None:
    chart = tmp_path / "gpu-plugin"
    shutil.copytree(CHART, chart)
    written = yaml.safe_load((chart / "Chart.yaml").read_text())
    built = written | {"version": "1.2.3+build.4", "appVersion": "1.2.3+build.4"}
    (chart / "Chart.yaml").write_text(yaml.safe_dump(built))
    objects = [each for each in yaml.safe_load_all(helm.template({"image": {"tag": "x"}}, chart)) if each]
    for each in objects:
        assert each["metadata"]["labels"]["helm.sh/chart"] == "gpu-plugin-1.2.3_build.4"
        assert each["metadata"]["labels"]["app.kubernetes.io/version"] == "1.2.3_build.4"


@pytest.mark.parametrize(
    "values",
    [{"fullnameOverride": "a" * 42 + "--b"}, {"nameOverride": "b" * 38 + "---c"}, {"nameOverride": "c" * 61 + "--d"}],
)
def test_a_name_that_is_cut_ends_as_a_name_may(helm: Helm, values: dict[str, Any]) -> None:
    for each in helm.objects(values):
        assert each["metadata"]["name"][-1].isalnum()
        for label in each["metadata"]["labels"].values():
            assert label[-1].isalnum()


@pytest.mark.parametrize("given", [2, [0, 2], ["0", "GPU-1"], "2"])
def test_gpus_may_be_numbers(helm: Helm, given: object) -> None:
    words = ",".join(map(str, given)) if isinstance(given, list) else str(given)
    for path, variable in (("includeGPUs", "INCLUDE_GPUS"), ("excludeGPUs", "EXCLUDE_GPUS")):
        found = facts(helm.objects({path: given}))
        assert f"DaemonSet.spec.template.spec.containers.gpu-plugin.env.{variable}={words}" in found
