"""Every value of the chart has an effect, Helm refuses wrong values in one line, and accepts the values of NVIDIA's chart."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_plugin import __version__
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.config.resolve import resolve
from tests.chart.helm import CHART, Helm, RefusedError, at_path, facts, overlaid, pods
from tests.chart.value_table import CDI, COMBINATIONS, MPS, ONE_CONFIG, TABLE, TAKEN_AWAY, WITHOUT_EFFECT

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
NVIDIA = yaml.safe_load((Path(__file__).parent / "nvidia_values.yaml").read_text())

# A wrong value, and words of the refusal.
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
    "stateDir": ("/", "'/' does not match"),
    "driverRootCtrPath": ("//", "'//' does not match"),
    "mps.root": ("/run/../mps", "'/run/../mps' does not match"),
    "kubelet.podResourcesDir": ("/pod:resources", "'/pod:resources' does not match"),
    "nvidiaDevRoot": ("/a/..", "'/a/..' does not match"),
    "health.pollInterval": ("5 seconds", "'5 seconds' does not match"),
    "health.pollinterval": ("5s", "'pollinterval' not allowed"),
    "http.port": (70000, "65,535"),
    "probes.liveness.periodSeconds": (0, "minimum"),
    "probes.liveness.successThreshold": (2, "value must be 1"),
    "probes.startup.successThreshold": (2, "value must be 1"),
    "probes.readiness.terminationGracePeriodSeconds": (5, "'terminationGracePeriodSeconds' not allowed"),
    "kubelet.devicePluginDir": ("/" + "d" * 80, "maxLength"),
    "log.level": ("loud", "'debug', 'info', 'warning', 'error'"),
    "log.format": ("xml", "'text', 'json'"),
    "updateStrategy.type": ("Never", "'RollingUpdate', 'OnDelete'"),
    "image.pullPolicy": ("Sometimes", "'Always', 'IfNotPresent', 'Never'"),
    "config.fallbackStrategies": (["none"], "'named', 'single', 'empty'"),
    "config.map": ({"a b": ""}, "'a b' not allowed"),
    "test.resource": ("a gpu", "'a gpu' does not match"),
    "tolerations": ({}, "want null or array"),
    "extraArgs": ("--simulate=x", "want null or array"),
    "nodeSelector": ({"gpu": True}, "want string"),
    "uninstall.timeout": ("121s", "'121s' does not match"),
    "updateStrategy.rollingUpdate.maxSurge": ("10", "'10' does not match"),
    "updateStrategy.rollingUpdate.maxUnavailable": ("101%", "'101%' does not match"),
    "updateStrategy.rollingUpdate.maxunavailable": (1, "'maxunavailable' not allowed"),
    "resources.limit": ({"cpu": 1}, "'limit' not allowed"),
    "mps.resources.request": ({"cpu": 1}, "'request' not allowed"),
    "securityContext.runAsuser": (0, "'runAsuser' not allowed"),
    "podSecurityContext.privileged": (True, "'privileged' not allowed"),
    "networkPolicy.apiServerPorts": ([], "minItems"),
    "fullnameOverride": ("GPU", "'GPU' does not match"),
    "nameOverride": ("a b", "'a b' does not match"),
    "namespaceOverride": ("a.b", "'a.b' does not match"),
    "config.name": ("a: b", "'a: b' does not match"),
    "config.nodeLabel": ("example.com/", "'example.com/' does not match"),
    "priorityClassName": ("a #b", "'a #b' does not match"),
    "runtimeClassName": ("{}", "'{}' does not match"),
    "image.repository": ("https://registry.example.com/gpu", "'https://registry.example.com/gpu' does not match"),
    "image.tag": ("a:b", "'a:b' does not match"),
    "enabled": ("off", "want null or boolean"),
    "includeGPUs": ([-1], "minimum"),
    "podMonitor.interval": ("1.5s", "'1.5s' does not match"),
    "cluster.nodeTaint": ("NoRun", "'none', 'NoSchedule', 'PreferNoSchedule', 'NoExecute'"),
    "cluster.nodeLabels": ("nfd", "'none', 'file', 'api'"),
    "cluster.featuresDir": ("features.d", "'features.d' does not match"),
    "cluster.nodeevents": (True, "'nodeevents' not allowed"),
    "http.statusPage": ("off", "true, false"),
    "http.statusPageHosts": ([9480], "want string"),
    "prometheusRule.disabled": (["GpuHappy"], "'GpuUnhealthy', 'GpuNodeUnhealthy'"),
    "prometheusRule.job": ('a"b', "does not match"),
    "prometheusRule.documentation": ("docs", "'docs' does not match"),
    "dashboard.labels": ({"grafana_dashboard": 1}, "want string"),
    "colour": ("green", "'colour' not allowed"),
}

PRIVILEGED = (
    "securityContext.allowPrivilegeEscalation: a privileged container cannot do without; "
    "leave it out, or privileged, or compatWithCPUManager"
)

# Values that only the templates can refuse, and the whole refusal.
REFUSED: tuple[tuple[Mapping[str, Any], str], ...] = (
    *(
        (
            {"updateStrategy": {"rollingUpdate": {"maxSurge": none}}},
            "updateStrategy.rollingUpdate: no pod can be replaced with maxUnavailable 0 and maxSurge 0; set one of the two",
        )
        for none in (0, "0%", None)
    ),
    (
        {"image": {"repository": ""}},
        "image.repository: no public image exists; set this to your own image, such as registry.example.com/gpu-plugin",
    ),
    *(
        (
            {"image": {"repository": name}},
            f"image.repository: {name} is NVIDIA's plugin; set this to the name of your image of gpu-plugin",
        )
        for name in (
            "nvcr.io/nvidia/k8s-device-plugin",
            "nvcr.io/nvidia/k8s-device-plugin:v0.20.0",
            "mirror.example.com:5000/nvcr.io/nvidia/k8s-device-plugin",
            "nvidia/k8s-device-plugin",
        )
    ),
    *(
        (
            {"image": {"repository": name}},
            f"image.repository: {name} has a tag or digest; move that to image.tag, such as 0.1.0@sha256:...",
        )
        for name in ("registry.example.com:5000/gpu:1", "registry.example.com/gpu@sha256:0a")
    ),
    ({"enabled": False}, "enabled: only the condition of a chart that depends on this one reads it; leave it out"),
    (
        {"legacyDaemonsetAPI": True},
        "legacyDaemonsetAPI: Kubernetes has only the API apps/v1 for DaemonSets; leave it out",
    ),
    ({"namespace": "gpu"}, "the value namespace does nothing: say --namespace to helm, or set namespaceOverride"),
    (
        {"config": {"name": "a", "map": {"b": "version: v1"}}},
        "config.name and config.map: the configs come from one ConfigMap; leave one of them out",
    ),
    *(
        (
            {"config": {name: "example.com/a"}},
            f"config.{name}: there are no configs to choose from: set config.name to an existing ConfigMap, or config.map",
        )
        for name in ("default", "nodeLabel")
    ),
    ({"config": {"map": {"a": "version: v1"}, "default": "b"}}, "config.default b is not in config.map, which has a"),
    (
        {"config": {"map": {"a": "version: v1", "b": "version: v1"}}},
        "config.map has no config for nodes without the label: set config.default to one of a, b",
    ),
    ({"config": {"map": {"a": "flags: ["}}}, "config.map.a is not YAML: "),
    (
        {"selectorLabelsOverride": {"app.kubernetes.io/component": "a"}},
        "selectorLabelsOverride: the chart sets app.kubernetes.io/component itself; leave it out",
    ),
    *(
        (values, "runAsNonRoot: the plugin runs as root; leave it out, or set securityContext.runAsUser")
        for values in (
            {"podSecurityContext": {"runAsNonRoot": True}},
            {"securityContext": {"runAsNonRoot": True}},
        )
    ),
    (
        {"podMonitor": {"enabled": "true"}, "http": {"enabled": False}},
        "podMonitor.enabled: there are no metrics without http.enabled",
    ),
    (
        {"prometheusRule": {"enabled": True}, "http": {"enabled": "false"}},
        "prometheusRule.enabled: there are no metrics without http.enabled",
    ),
    *(
        (
            values | {"securityContext": {"allowPrivilegeEscalation": False, **more}},
            PRIVILEGED,
        )
        for values, more in (
            ({"privileged": True}, {}),
            ({"compatWithCPUManager": "true"}, {}),
            ({}, {"privileged": True}),
        )
    ),
    *(
        (at_path(f"health.{name}", given), f"health.{name}: {given} is not between {bounds}")
        for name, bounds, *wrong in (
            ("pollInterval", "50ms and 1h", "49ms", "1h1ms", "0s"),
            ("nvmlTimeout", "100ms and 1h", ".09s", "61m"),
            ("temperatureRecovery", "0s and 24h", "24h1s"),
            ("flapGuard", "0s and 24h", "1441m"),
            ("vanishedGPURetention", "1s and 720h", "999ms", "720h1s"),
        )
        for given in wrong
    ),
    *(
        (
            overlaid({"stateDir": "/state", "driverRootCtrPath": "/root"}, at_path(path, given)),
            f"{path}: {given.rstrip('/')} is {whose} already; name another directory",
        )
        for path, given, whose in (
            ("kubelet.podResourcesDir", "/var/lib/kubelet/device-plugins", "kubelet.devicePluginDir"),
            ("stateDir", "/var/lib/kubelet/pod-resources/", "kubelet.podResourcesDir"),
            ("cdi.dir", "/state", "stateDir"),
            ("driverRootCtrPath", "/var/run/cdi", "cdi.dir"),
            ("driverRootCtrPath", "/etc/kubernetes/node-feature-discovery/features.d", "cluster.featuresDir"),
            ("kubelet.devicePluginDir", "/mps", "the directory of MPS"),
            ("stateDir", "/available-configs", "the directory of configs"),
        )
    ),
)


def _leaves(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in schema["properties"].items():
        at = f"{path}.{key}" if path else key
        # The kubelet defines the fields of probes, so one entry is enough.
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
    assert set(LEAVES) - set(_keys(DEFAULTS)) == {"affinity", "enabled", "global", "legacyDaemonsetAPI", "namespace"}
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


@pytest.mark.parametrize(
    ("values", "plugin", "mps"),
    [
        ({}, (1, 0), (0, 1)),
        ({"devicePlugin": {"enableHostNetwork": True}}, (0, 1), (0, 1)),
        # Without a readiness probe a new pod is Ready before it serves, and the former pod would end too early.
        ({"http": {"enabled": False}}, (0, 1), (0, 1)),
        ({"probes": {"enabled": False}}, (0, 1), (0, 1)),
        ({"updateStrategy": {"rollingUpdate": {"maxSurge": "10%"}}}, ("10%", 0), (0, "10%")),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": 2}}}, (0, 2), (0, 2)),
        # Without maxUnavailable Kubernetes uses 1, and refuses that together with maxSurge.
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": None}}}, (1, 0), (0, 1)),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailable": 2, "maxSurge": None}}}, (0, 2), (0, 2)),
    ],
)
def test_pods_surge_only_where_two_can_run_beside_each_other(
    helm: Helm, values: Mapping[str, Any], plugin: tuple[object, object], mps: tuple[object, object]
) -> None:
    made = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["updateStrategy"]["rollingUpdate"]
        for each in helm.objects(overlaid(MPS, values))
        if each["kind"] == "DaemonSet"
    }
    found = [(each["maxSurge"], each["maxUnavailable"]) for each in (made["device-plugin"], made["mps-control-daemon"])]
    assert found == [plugin, mps]


@pytest.mark.parametrize(("values", "why"), REFUSED)
def test_values_that_contradict_each_other_are_refused(helm: Helm, values: Mapping[str, Any], why: str) -> None:
    with pytest.raises(RefusedError) as refused:
        helm.template(values)
    first, *more = str(refused.value).splitlines()
    assert f": {why}" in first
    assert "".join(more) in {"", "Use --debug flag to render out invalid YAML"}  # Helm's own


def test_the_bounds_of_durations_are_the_options(helm: Helm) -> None:
    # The chart and the plugin refuse the same durations.
    for values, why in REFUSED:
        if why.startswith("health."):
            ((name, given),) = values["health"].items()
            variable = TABLE[f"health.{name}"].fact.rpartition(".")[2].partition("=")[0]
            with pytest.raises(ConfigError):
                resolve({}, {variable: given})
    edges = {
        "pollInterval": ("50ms", "1h"),
        "nvmlTimeout": (".1s", "60m"),
        "temperatureRecovery": ("0s", "24h"),
        "flapGuard": ("0s", "23h60m"),
        "vanishedGPURetention": ("1000ms", "720h"),
    }
    for at in (0, 1):
        helm.template({"health": {name: each[at] for name, each in edges.items()}})


def test_values_of_nvidias_chart_give_what_ours_give(helm: Helm) -> None:
    values = overlaid(NVIDIA, {"image": {"repository": "gpu-plugin"}})
    # Its affinity names no architecture, and its null leaves the exit on a failed start to the config.
    assert facts(helm.objects(values)) == facts(helm.objects({"affinity": NVIDIA["affinity"], "failOnInitError": None}))


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
    (
        {"gfd": {"enabled": True}},
        [
            "gfd.enabled: the plugin writes its labels to /etc/kubernetes/node-feature-discovery",
            "Node Feature Discovery, which must run",
        ],
    ),
    (
        {"gfd": {"enabled": "true"}, "cluster": {"nodeLabels": "api"}},
        ["gfd.enabled: cluster.nodeLabels says otherwise, and wins"],
    ),
    ({"nfd": {"enabled": "true"}}, ["nfd.enabled does nothing here"]),
    ({"prometheusRule": {"enabled": "true"}}, ["in prometheusRule.job, or set podMonitor.enabled"]),
    ({"prometheusRule": {"enabled": True}, "podMonitor": {"enabled": "true"}}, ["rollout status"]),
    ({"prometheusRule": {"enabled": True, "job": "gpus"}}, ["rollout status"]),
    ({"cluster": {"nodeLabels": "file"}}, ["Node Feature Discovery, which must run"]),
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
        "prometheusRule.job",
        "Node Feature Discovery, which must run",
        "set nvidiaDriverRoot",
        "mps.capable",
        "device-plugin.config",
        "found only with",
    )
    assert [text for text in advice if text in notes] == [text for text in advice if text in " ".join(said)]
    assert ("nvidia.com/gpu.present" in notes) == ("affinity" not in values and "devicePlugin" not in values)


@pytest.mark.parametrize("name", [".", "..", "..data", "a" * 254])
def test_a_config_is_refused_whose_name_a_config_map_cannot_have(helm: Helm, name: str) -> None:
    with pytest.raises(RefusedError, match="/config/map"):
        helm.template({"config": {"map": {name: "version: v1"}}})


DIGEST = f"sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    ("tag", "image"),
    [
        (f"0.1.0@{DIGEST}", f"gpu-plugin:0.1.0@{DIGEST}"),
        (f"@{DIGEST}", f"gpu-plugin@{DIGEST}"),
        (20261122, "gpu-plugin:20261122"),
        (1.5, "gpu-plugin:1.5"),
        ("2.10", "gpu-plugin:2.10"),
        ("", f"gpu-plugin:{__version__}"),
    ],
)
def test_the_image_can_be_pinned_by_its_digest_everywhere(helm: Helm, tag: object, image: str) -> None:
    found = pods(helm.objects({**MPS, "image": {"tag": tag}}))
    containers = [each for pod in found.values() for each in (*pod.get("initContainers", ()), *pod["containers"])]
    assert {"device-plugin", "mps-control-daemon", "uninstall", "test"} <= set(found)
    assert {each["image"] for each in containers} == {image}


def test_values_of_nvidias_chart_0_14_are_taken(helm: Helm) -> None:
    older = {"legacyDaemonsetAPI": None, "affinity": {}, "gfd": {"enabled": True, "nfd": {"deploy": False}}}
    assert helm.objects(overlaid(NVIDIA, older))
    assert helm.template(overlaid(NVIDIA, {"legacyDaemonsetAPI": False})) == helm.template(NVIDIA)


@pytest.mark.parametrize("enabled", [True, False])
def test_another_chart_can_depend_on_it_with_a_condition(
    helm: Helm, helm3: Helm, tmp_path: Path, *, enabled: bool
) -> None:
    (tmp_path / "Chart.yaml").write_text(
        "apiVersion: v2\nname: site\nversion: 0.0.0\n"
        f"dependencies: [{{name: gpu-plugin, version: {__version__}, condition: gpu-plugin.enabled}}]\n"
    )
    (tmp_path / "templates").mkdir()
    shutil.copytree(CHART, tmp_path / "charts" / "gpu-plugin")
    values = {"gpu-plugin": {"enabled": enabled, "image": {"repository": "gpu-plugin"}}}
    for each in (helm, helm3):
        made = [kind for kind in yaml.safe_load_all(each.template(values, tmp_path)) if kind]
        assert ("DaemonSet" in {kind["kind"] for kind in made}) == enabled


def test_lint_finds_nothing(helm: Helm) -> None:
    said = helm.run("lint", str(CHART), "--strict")
    assert "0 chart(s) failed" in said
    assert "[WARNING]" not in said


@pytest.mark.parametrize("name", [" ", "a b", "Registry/X", "a/", "/a", "a\n", "registry.example.com:/a", "a//b"])
def test_a_repository_that_names_no_image_is_refused(helm: Helm, name: str) -> None:
    with pytest.raises(RefusedError, match="/image/repository"):
        helm.template({"image": {"repository": name}})


@pytest.mark.parametrize(
    "name", ["gpu-plugin", "localhost/a__b/c-d", "registry.example.com:5000/team/gpu.plugin", "[fd00::1]:5000/a"]
)
def test_a_repository_may_be_in_any_registry(helm: Helm, name: str) -> None:
    (container,) = pods(helm.objects({"image": {"repository": name}}))["device-plugin"]["containers"]
    assert container["image"] == f"{name}:{__version__}"
