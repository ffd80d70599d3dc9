"""The rendered objects, for all values of the matrix: each version of Kubernetes accepts them, and their rights are minimal."""

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_plugin.cli.uninstall.nodes import cleanup_name
from gpu_plugin.cluster.node_condition import TAINT
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.settings import Settings
from tests.chart import versions
from tests.chart.helm import CHART, Helm, Object, RefusedError, pods
from tests.chart.value_table import CDI, MATRIX, MPS, ONE_CONFIG

KUBELET = {"/var/lib/kubelet/device-plugins", "/var/lib/kubelet/pod-resources"}
ALWAYS = KUBELET | {"/var/lib/gpu-plugin"}
FEATURES = {"/etc/kubernetes/node-feature-discovery/features.d"}
EXTERNAL = {"config": {"name": "mine"}}
MIG_CONFIG = {"config": {"map": {"a": "flags: {migStrategy: mixed}"}}}

PLAIN = "version: v1\n"
SHARED = PLAIN + "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"

# Values, the host paths of the plugin's pod, and the capabilities of its container.
ACCESS: tuple[tuple[Mapping[str, Any], set[str], list[str]], ...] = (
    ({}, ALWAYS, []),
    ({"nvidiaDriverRoot": "/run/nvidia/driver"}, ALWAYS | {"/run/nvidia/driver"}, []),
    (CDI, ALWAYS | {"/var/run/cdi"}, []),
    ({"deviceListStrategy": ["envvar", "cdi-annotations"]}, ALWAYS | {"/var/run/cdi"}, []),
    ({"deviceListStrategy": "auto"}, ALWAYS | {"/var/run/cdi"}, []),
    ({"deviceListStrategy": "volume-mounts"}, ALWAYS, ["SYS_ADMIN"]),
    ({"migStrategy": "none"}, ALWAYS, []),
    ({"migStrategy": "single"}, ALWAYS, ["SYS_ADMIN"]),
    ({"migStrategy": "mixed"}, ALWAYS, ["SYS_ADMIN"]),
    (MIG_CONFIG, ALWAYS, ["SYS_ADMIN"]),
    (ONE_CONFIG, ALWAYS, []),
    (MPS, ALWAYS | {"/run/nvidia/mps"}, []),
    (EXTERNAL, ALWAYS | {"/var/run/cdi", "/run/nvidia/mps"}, ["SYS_ADMIN"]),
    ({"simulate": "hgx-h100"}, ALWAYS, []),
    ({"simulate": "a100-mig-mixed", "migStrategy": "mixed"}, ALWAYS, []),
    ({"cluster": {"nodeLabels": "file"}}, ALWAYS | FEATURES, []),
    ({"cluster": {"nodeLabels": "api", "nodeEvents": True}}, ALWAYS, []),
    ({"config": {"map": {"a": "flags: {nodeLabels: file}"}}}, ALWAYS | FEATURES, []),
    ({"gfd": {"enabled": True}}, ALWAYS | FEATURES, []),
    ({"gfd": {"enabled": True}, "cluster": {"nodeLabels": "none"}}, ALWAYS, []),
    ({"simulate": "hgx-h100"} | CDI, ALWAYS | {"/var/run/cdi"}, ["MKNOD"]),
)


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def _host_paths(pod: Mapping[str, Any]) -> set[str]:
    return {volume["hostPath"]["path"] for volume in pod.get("volumes", ()) if "hostPath" in volume}


@pytest.fixture(scope="session")
def rendered(helm: Helm) -> list[tuple[Mapping[str, Any], list[Object]]]:
    """All values of the matrix, and the objects of each."""
    return [(values, helm.objects(values)) for values in MATRIX]


def judged(kubeconform: Path, schemas: Path, objects: Iterable[Object], folder: Path) -> Mapping[str, Any]:
    """What kubeconform says of these objects, which are written into an empty folder."""
    for number, text in enumerate(sorted({json.dumps(each) for each in objects})):
        (folder / f"{number}.json").write_text(text)
    location = f"{schemas}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    command = [str(kubeconform), "-strict", "-summary", "-output", "json", "-schema-location", location, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout))


@pytest.mark.timeout(900)  # dozens of helm runs, and the processor time that a cluster leaves
def test_every_version_of_kubernetes_takes_what_is_rendered(
    rendered: list[tuple[Mapping[str, Any], list[Object]]], kubeconform: Path, schemas: Path, tmp_path: Path
) -> None:
    objects = (each for _, objects in rendered for each in objects)
    said = judged(kubeconform, schemas, objects, tmp_path)
    assert said["resources"] == []
    assert said["summary"] == {"valid": len(list(tmp_path.iterdir())), "invalid": 0, "errors": 0, "skipped": 0}
    assert said["summary"]["valid"] > 100


def test_the_schemas_find_what_is_wrong(helm: Helm, kubeconform: Path, schemas: Path, tmp_path: Path) -> None:
    (daemonset,) = (each for each in helm.objects({}) if each["kind"] == "DaemonSet")
    wrong = json.loads(json.dumps(daemonset))
    wrong["spec"]["template"]["spec"]["hostPid"] = True
    wrong["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = "http"
    said = judged(kubeconform, schemas, [wrong], tmp_path)
    (found,) = said["resources"]
    assert "hostPid" in found["msg"]
    assert "containerPort" in found["msg"]


def test_older_versions_of_kubernetes_are_refused(helm: Helm) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    oldest = versions.KUBERNETES_VERSIONS[0].removeprefix("v").rpartition(".")[0]
    assert chart["kubeVersion"] == f">={oldest}.0-0"
    with pytest.raises(RefusedError, match="kubeVersion"):
        helm.run("template", "x", str(CHART), "--kube-version", "1.28.15")


@pytest.mark.parametrize(("values", "paths", "capabilities"), ACCESS)
def test_the_plugin_has_the_rights_that_its_values_ask_for(
    helm: Helm, values: Mapping[str, Any], paths: set[str], capabilities: list[str]
) -> None:
    pod = pods(helm.objects(values))["device-plugin"]
    assert _host_paths(pod) == paths
    (container,) = _containers(pod)
    context = container["securityContext"]
    assert context.get("capabilities", {}).get("add", []) == capabilities
    monitors = "NVIDIA_MIG_MONITOR_DEVICES" in {each["name"] for each in container["env"]}
    assert monitors == (
        "simulate" not in values and capabilities == ["SYS_ADMIN"] and "deviceListStrategy" not in values
    )


def test_directories_that_the_plugin_only_reads_are_mounted_read_only(helm: Helm) -> None:
    (container,) = _containers(pods(helm.objects({"nvidiaDriverRoot": "/"} | MPS | CDI))["device-plugin"])
    read_only = {mount["name"] for mount in container["volumeMounts"] if mount.get("readOnly")}
    assert read_only == {"pod-resources", "driver-root", "configs", "mps-root"}


def test_no_container_is_privileged_unless_a_value_says_so(
    rendered: list[tuple[Mapping[str, Any], list[Object]]],
) -> None:
    for values, objects in rendered:
        asked = {str(values.get(name)).lower() for name in ("privileged", "compatWithCPUManager")} & {"true"}
        if "privileged" in (given := values.get("securityContext", {})):
            asked = {"true"} if given["privileged"] else set()
        for component, pod in pods(objects).items():
            for container in _containers(pod):
                privileged = container["securityContext"].get("privileged", False)
                if component == "mps-control-daemon":
                    assert privileged
                elif component == "device-plugin":
                    assert privileged == bool(asked), values
                else:
                    assert not privileged


def test_other_containers_have_no_right_that_they_were_not_given(
    rendered: list[tuple[Mapping[str, Any], list[Object]]],
) -> None:
    for _, objects in rendered:
        for component, pod in pods(objects).items():
            for container in _containers(pod):
                context = container["securityContext"]
                if context.get("privileged"):
                    continue
                assert context["capabilities"]["drop"] == ["ALL"]
                assert set(context["capabilities"].get("add", ())) <= {"SYS_ADMIN", "MKNOD"}
                assert context["allowPrivilegeEscalation"] is False
                assert context["readOnlyRootFilesystem"] is True
                assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            if component in {"uninstall", "test"}:
                assert all(container["securityContext"]["runAsNonRoot"] for container in _containers(pod))
                assert not _host_paths(pod)
            assert not pod.get("shareProcessNamespace")
            assert pod["enableServiceLinks"] is False
            assert component == "mps-control-daemon" or not pod.get("hostPID")


@pytest.mark.parametrize(
    ("values", "context"),
    [
        (
            {"securityContext": {"privileged": True}},
            {"privileged": True, "runAsUser": 0, "runAsGroup": 0, "readOnlyRootFilesystem": True},
        ),
        (
            {"securityContext": {"readOnlyRootFilesystem": False}, "privileged": True},
            {"privileged": True, "runAsUser": 0, "runAsGroup": 0, "readOnlyRootFilesystem": False},
        ),
        (
            {
                "securityContext": {"privileged": False, "capabilities": {"drop": ["NET_RAW"]}, "runAsGroup": 7},
                "privileged": True,
                "migStrategy": "single",
            },
            {
                "privileged": False,
                "runAsUser": 0,
                "runAsGroup": 7,
                "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False,
                "seccompProfile": {"type": "RuntimeDefault"},
                "capabilities": {"drop": ["NET_RAW"], "add": ["SYS_ADMIN"]},
            },
        ),
    ],
)
def test_a_given_security_context_is_merged_over_the_charts(
    helm: Helm, values: Mapping[str, Any], context: Mapping[str, Any]
) -> None:
    (container,) = _containers(pods(helm.objects(values))["device-plugin"])
    assert container["securityContext"] == context


def test_the_plugin_is_root_whatever_else_its_context_says(
    rendered: list[tuple[Mapping[str, Any], list[Object]]],
) -> None:
    for values, objects in rendered:
        if "runAsUser" not in values.get("securityContext", {}) and (pod := pods(objects).get("device-plugin")):
            assert _containers(pod)[0]["securityContext"]["runAsUser"] == 0


def test_mounts_that_come_after_the_pod_does_are_seen(helm: Helm) -> None:
    found = pods(helm.objects(MPS | {"nvidiaDriverRoot": "/run/nvidia/driver"}))
    spread = {
        (container["name"], mount["name"]): mount["mountPropagation"]
        for component in ("device-plugin", "mps-control-daemon")
        for container in _containers(found[component])
        for mount in container["volumeMounts"]
        if "mountPropagation" in mount
    }
    assert spread == {
        ("gpu-plugin", "driver-root"): "HostToContainer",
        ("mps", "driver-root"): "HostToContainer",
        ("mps", "mps-shm"): "HostToContainer",
        ("mount-shm", "mps-root"): "Bidirectional",
    }


def test_only_directories_of_the_plugins_own_are_made_on_the_node(helm: Helm) -> None:
    labelled = {"cluster": {"nodeLabels": "file"}}
    found = pods(helm.objects(MPS | CDI | labelled | {"nvidiaDriverRoot": "/", "simulate": "hgx-h100"}))
    types = {
        (volume["name"], volume["hostPath"]["type"])
        for component in ("device-plugin", "mps-control-daemon")
        for volume in found[component]["volumes"]
        if "hostPath" in volume
    }
    # A missing directory of the kubelet's, or a missing driver, is an error of the pod's, not an empty directory.
    assert types == {
        *((name, "Directory") for name in ("device-plugins", "pod-resources", "driver-root")),
        *((name, "DirectoryOrCreate") for name in ("state", "cdi", "features", "mps-root", "mps-shm")),
    }


def test_a_slow_driver_has_ten_minutes_before_the_container_is_restarted(helm: Helm) -> None:
    (container,) = _containers(pods(helm.objects({}))["device-plugin"])
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 600


def test_without_the_plugin_nothing_asks_for_it(helm: Helm) -> None:
    objects = helm.objects(MPS | {"devicePlugin": {"enabled": False}, "podMonitor": {"enabled": True}})
    assert {"Pod", "PodMonitor"} & {each["kind"] for each in objects} == set()
    assert "mps-control-daemon" in pods(objects)


def test_what_belongs_to_no_namespace_is_called_by_namespace_and_release(helm: Helm) -> None:
    names = set()
    for values in (
        {},
        {"namespaceOverride": "room"},
        {"namespaceOverride": "room-a", "fullnameOverride": "b"},
        {"namespaceOverride": "room", "fullnameOverride": "a-b"},
    ):
        objects = helm.objects(ONE_CONFIG | values)
        (name,) = {each["metadata"]["name"] for each in objects if each["kind"].startswith("ClusterRole")}
        (binding,) = (each for each in objects if each["kind"] == "ClusterRoleBinding")
        assert binding["roleRef"]["name"] == name
        names.add(name)
    assert len(names) == 4


def test_every_volume_is_mounted_and_every_mount_has_its_volume(
    rendered: list[tuple[Mapping[str, Any], list[Object]]],
) -> None:
    for values, objects in rendered:
        for pod in pods(objects).values():
            volumes = {volume["name"] for volume in pod.get("volumes", ())}
            mounts = {mount["name"] for container in _containers(pod) for mount in container.get("volumeMounts", ())}
            strange = {"more"} if "extraVolumes" in values or "extraVolumeMounts" in values else set()
            assert volumes - strange == mounts - strange, values


def _told(objects: list[Object]) -> list[Settings]:
    """Return the daemon's settings for each config that the node's label may name."""
    (container,) = _containers(pods(objects)["device-plugin"])
    values = {each["name"]: each.get("value", "10.0.0.1") for each in container["env"]}
    environment = {name: value.replace("$(POD_IP)", "10.0.0.1") for name, value in values.items()}
    files = [
        yaml.safe_load(content)
        for each in objects
        if each["kind"] == "ConfigMap" and each["metadata"]["name"].endswith("-configs")
        for content in each["data"].values()
    ]
    return [resolve({}, environment, file) for file in files or [None]]


def _rights(told: list[Settings]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Verbs by resource, in the whole cluster and in the namespace default, that these settings use."""
    everywhere, default = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for settings in told:
        if settings.config_file_srcdir or settings.cordon_annotation:
            everywhere["nodes"] |= {"get", "watch"}
        if settings.node_taint != "none" or settings.node_labels == "api":
            everywhere["nodes"] |= {"get", "patch"}
        if settings.node_condition:
            everywhere["nodes"] |= {"get"}
            everywhere["nodes/status"] |= {"patch"}
        if settings.pod_events:
            everywhere["events"] |= {"create", "patch"}
            everywhere["pods"] |= {"get"}
        if settings.node_events:
            default["events"] |= {"create", "patch"}
    return everywhere, default


def test_there_are_rights_in_the_cluster_only_where_the_daemon_uses_them(
    rendered: list[tuple[Mapping[str, Any], list[Object]]],
) -> None:
    many = set()
    for values, objects in rendered:
        given = {"ClusterRole": defaultdict[str, set[str]](set), "Role": defaultdict[str, set[str]](set)}
        for each in objects:
            if each["kind"] == "ServiceAccount":
                assert each["automountServiceAccountToken"] is False
            if each["kind"] == "ClusterRole" or (each["kind"] == "Role" and each["metadata"]["namespace"] == "default"):
                for rule in each["rules"]:
                    assert (rule["apiGroups"], set(rule)) == ([""], {"apiGroups", "resources", "verbs"})
                    for resource in rule["resources"]:
                        given[each["kind"]][resource] |= set(rule["verbs"])
            elif each["kind"] == "Role":
                names = {pod["metadata"]["name"] for pod in objects if pod["kind"] == "DaemonSet"}
                for rule in each["rules"]:
                    assert (rule["apiGroups"], rule["resources"]) == (["apps"], ["daemonsets"])
                    # A rule cannot name an object that does not exist yet.
                    assert rule["verbs"] == ["create"] or names <= set(rule["resourceNames"])
        if "device-plugin" not in pods(objects):
            configured = any(each["metadata"]["name"].endswith("-configs") for each in objects)
            assert (given["ClusterRole"], given["Role"]) == ({"nodes": {"get", "watch"}} if configured else {}, {}), (
                values
            )
            continue
        needed = _rights(_told(objects))
        assert (given["ClusterRole"], given["Role"]) == needed, values
        many.add(str([sorted((name, *sorted(verbs)) for name, verbs in each.items()) for each in needed]))
        assert pods(objects)["device-plugin"]["automountServiceAccountToken"] is any(map(bool, needed))
        if "mps-control-daemon" in pods(objects):
            configured = any(settings.config_file_srcdir for settings in _told(objects))
            assert pods(objects)["mps-control-daemon"]["automountServiceAccountToken"] is configured
    assert len(many) > 8


def test_what_is_switched_off_by_a_variable_keeps_its_rights_for_taking_things_back(helm: Helm) -> None:
    off = [{"name": name, "value": "none"} for name in ("NODE_TAINT", "NODE_LABELS")]
    objects = helm.objects({"cluster": {"nodeTaint": "NoExecute", "nodeLabels": "api"}, "extraEnv": off})
    (settings,) = _told(objects)
    assert (settings.node_taint, settings.node_labels, settings.node_name) == ("none", "none", "10.0.0.1")
    (role,) = (each for each in objects if each["kind"] == "ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}]


def test_whoever_may_taint_the_node_stays_on_it(rendered: list[tuple[Mapping[str, Any], list[Object]]]) -> None:
    tainted = 0
    for values, objects in rendered:
        if "device-plugin" in pods(objects):
            taints = any(settings.node_taint != "none" for settings in _told(objects))
            for component in {"device-plugin", "mps-control-daemon"} & set(pods(objects)):
                tolerations = pods(objects)[component].get("tolerations", ())
                assert ({"key": TAINT, "operator": "Exists"} in tolerations) == taints, values
            tainted += taints
    assert tainted > 3


def test_pods_are_selected_by_their_own_controller_alone(
    rendered: list[tuple[Mapping[str, Any], list[Object]]],
) -> None:
    for values, objects in rendered:
        labels = {}
        for each in objects:
            if each["kind"] in {"DaemonSet", "Job"}:
                labels[each["metadata"]["name"]] = each["spec"]["template"]["metadata"]["labels"]
            elif each["kind"] == "Pod":
                labels[each["metadata"]["name"]] = each["metadata"]["labels"]
        for each in objects:
            if each["kind"] == "DaemonSet":
                selector = each["spec"]["selector"]["matchLabels"].items()
                selected = [name for name, found in labels.items() if selector <= found.items()]
                assert selected == [each["metadata"]["name"]], values


def test_names_are_no_longer_than_a_label_may_be(helm: Helm) -> None:
    for values in ({"fullnameOverride": "a" * 60}, {"nameOverride": "b" * 70}, MPS | {"fullnameOverride": "c" * 80}):
        for each in helm.objects(values):
            assert len(each["metadata"]["name"]) <= 63
            assert all(len(value) <= 63 for value in each["metadata"]["labels"].values())


@pytest.mark.parametrize(
    ("values", "selector"),
    [
        (MPS, {}),
        (EXTERNAL, {"nvidia.com/mps.capable": "true"}),
        (EXTERNAL | {"mps": {"enabled": True}}, {}),
        ({"mps": {"enabled": True}}, {}),
        (MPS | {"mps": {"enabled": False}}, None),
        (EXTERNAL | {"mps": {"enabled": False}}, None),
        ({}, None),
    ],
)
def test_mps_daemons_run_where_a_config_needs_them(
    helm: Helm, values: Mapping[str, Any], selector: Mapping[str, str] | None
) -> None:
    found = pods(helm.objects(values)).get("mps-control-daemon")
    assert (found and found["nodeSelector"]) == (
        None if selector is None else {"kubernetes.io/os": "linux"} | dict(selector)
    )


@pytest.mark.parametrize(
    ("config", "nodes"),
    [
        ({"map": {"a": PLAIN, "b": SHARED, "c": SHARED}, "default": "a"}, ["b", "c"]),
        ({"map": {"a": PLAIN, "b": SHARED}, "default": "b"}, None),
        ({"map": {"default": PLAIN, "b": SHARED}}, ["b"]),
        ({"map": {"default": SHARED, "b": PLAIN}}, None),
        ({"map": {"b": SHARED}}, None),
        ({"map": {"b": SHARED}, "fallbackStrategies": ["empty"]}, ["b"]),
        ({"map": {"none": SHARED, "b": PLAIN}, "fallbackStrategies": ["empty"]}, ["none"]),
    ],
)
@pytest.mark.parametrize("more", [{}, {"affinity": None}])
def test_mps_daemons_run_on_nodes_that_take_a_config_with_mps(
    helm: Helm, config: Mapping[str, Any], nodes: list[str] | None, more: Mapping[str, Any]
) -> None:
    def configs(pod: Mapping[str, Any]) -> list[list[str]]:
        terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        return [
            [
                value
                for each in term["matchExpressions"]
                if each["key"] == "example.com/config"
                for value in each["values"]
            ]
            for term in terms
        ]

    found = pods(helm.objects({"config": dict(config) | {"nodeLabel": "example.com/config"}} | dict(more)))
    assert all(names == (nodes or []) for names in configs(found["mps-control-daemon"]))
    assert not any(configs(found["device-plugin"]))


def test_the_plugin_reaches_mps_daemons_of_another_chart(helm: Helm) -> None:
    (container,) = _containers(pods(helm.objects(MPS | {"mps": {"enabled": False}}))["device-plugin"])
    assert {"name": "mps-root", "mountPath": "/mps", "readOnly": True} in container["volumeMounts"]
    assert {"name": "MPS_ROOT", "value": "/run/nvidia/mps"} in container["env"]


def test_hooks_go_before_the_daemonset_does(helm: Helm) -> None:
    hooks = [
        each for each in helm.objects({}) if each["metadata"].get("annotations", {}).get("helm.sh/hook") == "pre-delete"
    ]
    assert sorted(each["kind"] for each in hooks) == ["Job", "Role", "RoleBinding", "ServiceAccount"]
    weights = {each["kind"]: int(each["metadata"]["annotations"]["helm.sh/hook-weight"]) for each in hooks}
    assert all(weights[kind] < weights["Job"] for kind in ("Role", "RoleBinding", "ServiceAccount"))
    for each in hooks:
        policies = each["metadata"]["annotations"]["helm.sh/hook-delete-policy"].split(",")
        assert set(policies) == {"before-hook-creation", "hook-succeeded", "hook-failed"}


@pytest.mark.parametrize("length", range(30, 44))
def test_the_hook_may_touch_what_the_command_makes_whatever_the_names_length(helm: Helm, length: int) -> None:
    values = {"fullnameOverride": "g" * length, "mps": {"enabled": True}}
    [role] = [each for each in helm.objects(values) if each["kind"] == "Role"]
    daemonsets = [f"{'g' * length}{suffix}" for suffix in ("", "-mps-control-daemon")]
    assert role["rules"][0]["resourceNames"] == [name for each in daemonsets for name in (each, cleanup_name(each))]
