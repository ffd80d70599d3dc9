"""Every value of the chart does something, bad ones are refused in a line, and those of NVIDIA's chart carry over."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_plugin import __version__
from tests.chart.helm import CHART, Helm, RefusedError, at_path, facts, overlaid, pods
from tests.chart.value_table import CDI, COMBINATIONS, MPS, ONE_CONFIG, TABLE, TAKEN_AWAY, WITHOUT_EFFECT

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
NVIDIA = yaml.safe_load((Path(__file__).parent / "nvidia_values.yaml").read_text())

# A value that is wrong, and what of it the refusal names.
WRONG = {
    "migStrategy": ("double", "'none', 'single', 'mixed'"),
    "failOnInitError": ("maybe", "true, false"),
    "deviceListStrategy": ("cdi", "envvar|volume-mounts|cdi-annotations|cdi-cri"),
    "deviceIDStrategy": ("name", "'uuid', 'index'"),
    "deviceDiscoveryStrategy": ("luck", "'auto', 'nvml', 'tegra'"),
    "sharedDevicesAllocationPolicy": ("even", "'distributed', 'packed', 'spread'"),
    "gdrcopyEnabled": (3, "true, false"),
    "nvidiaDriverRoot": ("driver", "'driver' does not match"),
    "imex.channelIDs": ([1], "value must be one of 0"),
    "cdi.dir": ("cdi", "'cdi' does not match"),
    "health.pollInterval": ("5 seconds", "'5 seconds' does not match"),
    "health.pollinterval": ("5s", "'pollinterval' not allowed"),
    "http.port": (70000, "65,535"),
    "probes.liveness.periodSeconds": (0, "minimum"),
    "kubelet.devicePluginDir": ("/" + "d" * 80, "maxLength"),
    "log.level": ("loud", "'debug', 'info', 'warning', 'error'"),
    "log.format": ("xml", "'text', 'json'"),
    "eventLoop": ("trio", "'asyncio', 'uvloop'"),
    "updateStrategy.type": ("Never", "'RollingUpdate', 'OnDelete'"),
    "image.pullPolicy": ("Sometimes", "'Always', 'IfNotPresent', 'Never'"),
    "config.fallbackStrategies": (["none"], "'named', 'single', 'empty'"),
    "config.map": ({"a b": ""}, "'a b' not allowed"),
    "tolerations": ({}, "want null or array"),
    "extraArgs": ("--simulate=x", "want array"),
    "nodeSelector": ({"gpu": True}, "want string"),
    "uninstall.timeout": ("soon", "'soon' does not match"),
    "colour": ("green", "'colour' not allowed"),
}

# Values that no schema can judge, and the whole refusal.
REFUSED: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"namespace": "gpu"}, "the value namespace does nothing: say --namespace to helm, or set namespaceOverride"),
    (
        {"config": {"name": "a", "map": {"b": "version: v1"}}},
        "config.name and config.map: the configs come from one ConfigMap; leave one of them out",
    ),
    ({"config": {"map": {"a": "x"}, "default": "b"}}, "config.default b is not in config.map, which has a"),
    (
        {"config": {"map": {"a": "version: v1", "b": "version: v1"}}},
        "config.map has no config for nodes without the label: set config.default to one of a, b",
    ),
    ({"config": {"map": {"a": "flags: ["}}}, "config.map.a is not YAML: "),
)


def _leaves(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in schema["properties"].items():
        at = f"{path}.{key}" if path else key
        # A probe's fields are the kubelet's, one entry stands for all of them.
        yield from _leaves(value, at) if "properties" in value and path != "probes" else [at]


def _keys(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        at = f"{path}.{key}" if path else key
        yield at
        if isinstance(value, Mapping):
            yield from _keys(value, at)


LEAVES = tuple(_leaves(SCHEMA))


def test_every_value_has_an_entry_and_every_entry_a_value() -> None:
    assert set(TABLE) | set(WITHOUT_EFFECT) == set(LEAVES)
    assert not set(TABLE) & set(WITHOUT_EFFECT)
    assert {path for path, shown in TABLE.items() if not shown.fact} == set(TAKEN_AWAY)


def test_every_value_stands_in_the_values_file() -> None:
    # Whether affinity is set at all makes a difference, so its default is not to be there.
    assert set(LEAVES) - set(_keys(DEFAULTS)) == {"affinity", "global", "namespace"}
    assert "affinity:" in (CHART / "values.yaml").read_text()


@pytest.mark.parametrize("path", TABLE)
def test_a_value_shows_in_what_is_rendered(helm: Helm, path: str) -> None:
    shown = TABLE[path]
    before = facts(helm.objects(shown.given))
    after = facts(helm.objects(overlaid(shown.given, at_path(path, shown.value))))
    if not shown.fact:
        before, after = after, before
    fact = shown.fact or TAKEN_AWAY[path]
    assert fact in after
    assert fact not in before


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_value_is_refused_in_a_line_that_names_it(helm: Helm, helm3: Helm, path: str) -> None:
    value, why = WRONG[path]
    for each in (helm, helm3):
        with pytest.raises(RefusedError) as refused:
            each.template(at_path(path, value))
        lines = [line for line in str(refused.value).splitlines() if line.startswith("- at")]
        assert len(lines) == 1
        assert path.rpartition(".")[2] in lines[0]
        assert why in lines[0]


@pytest.mark.parametrize(("values", "why"), REFUSED)
def test_values_that_contradict_each_other_are_refused(helm: Helm, values: Mapping[str, Any], why: str) -> None:
    with pytest.raises(RefusedError) as refused:
        helm.template(values)
    first, *more = str(refused.value).splitlines()
    assert f": {why}" in first
    assert "".join(more) in {"", "Use --debug flag to render out invalid YAML"}  # Helm's own


def test_values_of_nvidias_chart_give_what_ours_give(helm: Helm) -> None:
    values = overlaid(NVIDIA, {"image": {"repository": "gpu-plugin"}})
    # Its affinity names no architecture.
    assert facts(helm.objects(values)) == facts(helm.objects({"affinity": NVIDIA["affinity"]}))


@pytest.mark.parametrize("values", [*COMBINATIONS, NVIDIA])
def test_both_helms_render_the_same(helm: Helm, helm3: Helm, values: Mapping[str, Any]) -> None:
    assert sorted(map(json.dumps, helm.objects(values))) == sorted(map(json.dumps, helm3.objects(values)))


def test_switches_work_in_quotes_too(helm: Helm) -> None:
    paths = [
        path for path in LEAVES if (allowed := _at(SCHEMA, path).get("enum")) and True in allowed and path in TABLE
    ]
    assert len(paths) > 15
    for path in paths:
        given = TABLE[path].given
        for word in ("true", "false"):
            quoted, plain = (overlaid(given, at_path(path, value)) for value in (word, word == "true"))
            assert helm.template(quoted) == helm.template(plain), path


def _at(schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for key in path.split("."):
        schema = schema["properties"][key]
    return schema


@pytest.mark.parametrize("affinity", [None, {}])
def test_the_choice_of_nodes_can_be_switched_off(helm: Helm, helm3: Helm, affinity: object) -> None:
    for each in (helm, helm3):
        terms = pods(each.objects({"affinity": affinity}))["device-plugin"]["affinity"]["nodeAffinity"]
        (term,) = terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert [expression["key"] for expression in term["matchExpressions"]] == ["kubernetes.io/arch"]


def test_the_versions_are_those_of_the_program() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_a_new_version_of_the_chart_alone_restarts_no_pod(helm: Helm) -> None:
    labels = [fact for fact in facts(helm.objects(MPS)) if ".template.metadata.labels." in fact]
    assert labels
    assert not [fact for fact in labels if __version__ in fact]


def test_an_edited_config_restarts_no_pod(helm: Helm) -> None:
    def rendered(config: str) -> list[Any]:
        objects = helm.objects({"config": {"map": {"default": config}}})
        return [each for each in objects if each["kind"] != "ConfigMap"]

    assert rendered("version: v1\n") == rendered("version: v1\nflags: {failOnInitError: false}\n")


NOTES: tuple[tuple[Mapping[str, Any], list[str]], ...] = (
    (
        {},
        [
            "rollout status daemonset/try-gpu-plugin",
            "helm --namespace gpu-room test try",
            "nvidia.com/gpu.present=true",
        ],
    ),
    ({"affinity": None}, ["rollout status"]),
    (ONE_CONFIG, ["kubectl label node NODE nvidia.com/device-plugin.config=NAME"]),
    (CDI, ["set nvidiaDriverRoot"]),
    ({"privileged": True}, ["found only with nvidiaDriverRoot"]),
    ({"config": {"name": "mine"}}, ["nvidia.com/mps.capable=true", "nvidia.com/device-plugin.config=NAME"]),
    ({"gfd": {"enabled": True}}, ["gfd.enabled does nothing here"]),
    ({"nfd": {"enabled": "true"}}, ["nfd.enabled does nothing here"]),
    ({"devicePlugin": {"enabled": False}}, []),
)


@pytest.mark.parametrize(("values", "said"), NOTES)
def test_the_notes_say_what_comes_next(helm: Helm, values: Mapping[str, Any], said: list[str]) -> None:
    notes = helm.notes(values)
    for text in said:
        assert text in notes
    advice = (
        "gfd.enabled",
        "nfd.enabled",
        "set nvidiaDriverRoot",
        "mps.capable",
        "device-plugin.config",
        "found only with",
    )
    assert [text for text in advice if text in notes] == [text for text in advice if text in " ".join(said)]
    assert ("nvidia.com/gpu.present" in notes) == ("affinity" not in values and "devicePlugin" not in values)


def test_lint_finds_nothing(helm: Helm) -> None:
    said = helm.run("lint", str(CHART), "--strict")
    assert "0 chart(s) failed" in said
    assert "[WARNING]" not in said
