"""The manifests in deploy/ and the table of values are what the chart gives now, and what kubectl can apply."""

from pathlib import Path

import pytest
import yaml

from deploy import generate
from gpu_plugin import __version__
from gpu_plugin.config.resolve import resolve
from tests.chart.helm import Helm
from tests.chart.test_manifests import judged
from tests.chart.test_values import LEAVES

FILES = [*generate.MANIFESTS, generate.POD]


def test_every_generated_file_is_what_the_chart_gives(helm: Helm) -> None:
    template = generate.with_helm(str(helm.program))
    stale = [path.name for path, text in generate.files(template) if not path.exists() or path.read_text() != text]
    assert not stale, "make manifests"


def test_both_helms_generate_the_same(helm: Helm, helm3: Helm) -> None:
    ones, others = (dict(generate.files(generate.with_helm(str(each.program)))) for each in (helm, helm3))
    assert ones == others


@pytest.mark.parametrize("name", FILES)
def test_every_version_of_kubernetes_takes_the_manifests(
    kubeconform: Path, schemas: Path, tmp_path: Path, name: str
) -> None:
    objects = [each for each in yaml.safe_load_all((generate.DEPLOY / name).read_text()) if each]
    said = judged(kubeconform, schemas, objects, tmp_path)
    assert said["resources"] == []
    assert said["summary"]["valid"] == len(objects)


@pytest.mark.parametrize("name", FILES)
def test_manifests_say_nothing_that_only_helm_needs(name: str) -> None:
    text = (generate.DEPLOY / name).read_text()
    assert "helm.sh" not in text
    assert "managed-by" not in text
    assert f"gpu-plugin:{__version__}" in text


def test_the_configs_of_the_manifests_are_configs() -> None:
    for name in generate.MANIFESTS:
        objects = [each for each in yaml.safe_load_all((generate.DEPLOY / name).read_text()) if each]
        for config in (each["data"] for each in objects if each["kind"] == "ConfigMap"):
            for content in config.values():
                resolve({"mps_root": "/run/nvidia/mps"}, {}, yaml.safe_load(content))


def test_every_value_is_explained_in_one_row_of_the_table() -> None:
    rows = [
        line.split(" | ") for line in (generate.CHART / "README.md").read_text().splitlines() if line.startswith("| `")
    ]
    paths = [row[0].strip("| `") for row in rows]
    assert sorted(paths) == sorted(set(LEAVES) - {"enabled", "global", "legacyDaemonsetAPI", "namespace"})
    assert all(row[2].strip(" |").endswith(".") for row in rows)


def test_without_helm_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["generate", "--check", "--helm", "/no/helm"])
    with pytest.raises(SystemExit) as ended:
        generate.main()
    assert ended.value.code == 2
    said = "make manifests: the program /no/helm does not exist: install Helm 3 or 4"
    assert capsys.readouterr().err.startswith(said)
