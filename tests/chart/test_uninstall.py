"""The arguments of the chart's Job for `helm uninstall`, run against an API server that has the rendered DaemonSets."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpu_plugin.cli import main
from gpu_plugin.cli.uninstall import nodes
from tests.chart.helm import NAMESPACE, RELEASE, Helm
from tests.unit.cli.uninstall.test_nodes import Api, status

OF_THE_RELEASE = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
VALUES: tuple[Mapping[str, object], ...] = (
    {},
    {"namespaceOverride": "gpus", "nameOverride": "other"},
    {"mps": {"enabled": True}},
)


def uninstalled(helm: Helm, values: Mapping[str, object], annotations: Mapping[str, str], directory: Path) -> bool:
    """Whether the Job of the chart deletes the DaemonSets of the chart if they have these annotations, too."""
    objects: list[dict[str, Any]] = copy.deepcopy([dict(each) for each in helm.objects(values)])
    [job] = [each for each in objects if each["kind"] == "Job"]
    daemonsets = {each["metadata"]["name"]: each for each in objects if each["kind"] == "DaemonSet"}
    for each in daemonsets.values():
        each["metadata"].setdefault("annotations", {}).update(annotations)
        each["status"] = status(1, 1)
    with Api(None, status(1, 1)) as api:
        api.namespace = job["metadata"]["namespace"]
        api.objects.update(daemonsets)
        [container] = job["spec"]["template"]["spec"]["containers"]
        assert main([*container["args"], "--kubeconfig", api.kubeconfig(directory)]) == 0
        assert set(api.objects) in (set(), set(daemonsets))
        return not api.objects


@pytest.mark.parametrize("values", VALUES, ids=["defaults", "names", "mps"])
def test_the_job_deletes_only_daemonsets_that_its_helm_release_installed(
    helm: Helm, values: Mapping[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "POLL_INTERVAL", 0.01)
    assert not uninstalled(helm, values, {}, tmp_path)
    assert not uninstalled(helm, values, OF_THE_RELEASE | {"meta.helm.sh/release-name": "another"}, tmp_path)
    assert uninstalled(helm, values, OF_THE_RELEASE, tmp_path)
