"""The table of docs/security.md, "What each feature adds", against what the chart renders for each feature."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.chart.helm import Helm

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
ALWAYS = {
    "/var/lib/kubelet/device-plugins": False,
    "/var/lib/kubelet/pod-resources": True,
    "/var/lib/gpu-plugin": False,
}
"""Host path to whether it is mounted read-only."""


def _rule(resource: str, *verbs: str) -> Mapping[str, Any]:
    return {"apiGroups": [""], "resources": [resource], "verbs": list(verbs)}


NODES = (_rule("nodes", "get", "watch"),)
READS = ("`get`", "`watch` on nodes")
EVENTS = _rule("events", "create", "patch")
FEATURES_DIR = "/etc/kubernetes/node-feature-discovery/features.d"
MPS_CONFIG = {
    "default": "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n",
}


@dataclass(frozen=True)
class Adds:
    """What a feature adds to the plugin's pod; how its row on the page begins, and what that must name."""

    row: str
    values: Mapping[str, Any]
    words: Sequence[str] = ()
    paths: Mapping[str, bool] = field(default_factory=dict)
    capabilities: Sequence[str] = ()
    privileged: bool = False
    rules: Sequence[Mapping[str, Any]] = ()
    in_default: Sequence[Mapping[str, Any]] = ()
    """Rules in the namespace default alone."""


FEATURES = (
    Adds("always", {}, ["uid 0", *ALWAYS]),
    Adds("driver root", {"nvidiaDriverRoot": "/run/nvidia/driver"}, ["read-only"], {"/run/nvidia/driver": True}),
    Adds("CDI", {"deviceListStrategy": "cdi-cri"}, ["/var/run/cdi`, writable"], {"/var/run/cdi": False}),
    Adds("CDI", {"deviceListStrategy": "cdi-annotations"}, ["/var/run/cdi`, writable"], {"/var/run/cdi": False}),
    Adds("CDI", {"deviceListStrategy": "auto"}, ["/var/run/cdi`, writable"], {"/var/run/cdi": False}),
    Adds("MIG", {"migStrategy": "single"}, ["SYS_ADMIN"], capabilities=["SYS_ADMIN"]),
    Adds("MIG", {"migStrategy": "mixed"}, ["SYS_ADMIN"], capabilities=["SYS_ADMIN"]),
    Adds(
        "`deviceListStrategy: volume-mounts`",
        {"deviceListStrategy": "volume-mounts"},
        ["SYS_ADMIN"],
        capabilities=["SYS_ADMIN"],
    ),
    Adds("static CPU manager", {"compatWithCPUManager": True}, ["privileged"], privileged=True),
    Adds("node without NVIDIA's runtime", {"privileged": True}, ["privileged"], privileged=True),
    Adds("configuration by node label", {"config": {"map": {"default": "version: v1\n"}}}, READS, rules=NODES),
    Adds(
        "configuration by node label",
        {"config": {"name": "theirs"}},
        [*READS, "MIG", "CDI", "MPS", "volume-mounts"],
        {"/var/run/cdi": False, "/run/nvidia/mps": True},
        capabilities=["SYS_ADMIN"],
        rules=NODES,
    ),
    Adds(
        "Events on the Node",
        {"cluster": {"nodeEvents": True}},
        ["namespace `default`", "`create`, `patch` on events"],
        in_default=[EVENTS],
    ),
    Adds(
        "Events on pods",
        {"cluster": {"podEvents": True}},
        ["in all namespaces", "`create`, `patch` on events", "`get` on pods"],
        rules=[EVENTS, _rule("pods", "get")],
    ),
    Adds(
        "the condition GPUHealthy",
        {"cluster": {"nodeCondition": True}},
        ["`get` on nodes", "`patch` on nodes/status"],
        rules=[_rule("nodes", "get"), _rule("nodes/status", "patch")],
    ),
    Adds(
        "the taint",
        {"cluster": {"nodeTaint": "NoExecute"}},
        ["`get`, `patch` on nodes"],
        rules=[_rule("nodes", "get", "patch")],
    ),
    Adds(
        "cordon by annotation",
        {"cluster": {"cordonAnnotation": True}},
        ["`get`, `watch` on nodes"],
        rules=[_rule("nodes", "get", "watch")],
    ),
    Adds(
        "labels of the Node by the API",
        {"cluster": {"nodeLabels": "api"}},
        ["`get`, `patch` on nodes"],
        rules=[_rule("nodes", "get", "patch")],
    ),
    Adds(
        "labels of the Node by a file",
        {"cluster": {"nodeLabels": "file"}},
        [f"`{FEATURES_DIR}`, writable"],
        {FEATURES_DIR: False},
    ),
    Adds(
        "MPS", {"config": {"map": MPS_CONFIG}}, ["/run/nvidia/mps`, read-only"], {"/run/nvidia/mps": True}, rules=NODES
    ),
    Adds("MPS", {"mps": {"enabled": True}}, ["privileged"], {"/run/nvidia/mps": True}),
    Adds(
        "simulated node with CDI",
        {"simulate": "t4-4", "deviceListStrategy": "cdi-cri"},
        ["MKNOD"],
        {"/var/run/cdi": False},
        capabilities=["MKNOD"],
    ),
)


def _rows() -> list[list[str]]:
    text = PAGE.read_text()
    section = text.partition("## What each feature adds")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]


def _plugin(objects: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    [pod] = [
        each["spec"]["template"]["spec"]
        for each in objects
        if each["kind"] == "DaemonSet" and not each["metadata"]["name"].endswith("-mps-control-daemon")
    ]
    found: Mapping[str, Any] = pod
    return found


@pytest.mark.parametrize("adds", FEATURES, ids=[f"{each.row}-{index}" for index, each in enumerate(FEATURES)])
def test_a_feature_adds_what_its_row_says(helm: Helm, adds: Adds) -> None:
    objects = helm.objects(adds.values)
    pod = _plugin(objects)
    [container] = pod["containers"]
    hosts = {each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each}
    mounted = {
        hosts[each["name"]]: each.get("readOnly", False) for each in container["volumeMounts"] if each["name"] in hosts
    }
    assert mounted == {**ALWAYS, **adds.paths}
    security = container["securityContext"]
    assert security.get("privileged", False) == adds.privileged
    if not adds.privileged:
        assert security["capabilities"] == {
            "drop": ["ALL"],
            **({"add": adds.capabilities} if adds.capabilities else {}),
        }
        assert (security["allowPrivilegeEscalation"], security["seccompProfile"]) == (False, {"type": "RuntimeDefault"})
    assert (security["runAsUser"], security["readOnlyRootFilesystem"]) == (0, True)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    rules = [rule for each in objects if each["kind"] == "ClusterRole" for rule in each["rules"]]
    assert rules == list(adds.rules)
    spaced = [
        rule for each in objects if each["metadata"].get("namespace") == "default" for rule in each.get("rules", ())
    ]
    assert spaced == list(adds.in_default)
    assert pod["automountServiceAccountToken"] is bool(adds.rules or adds.in_default)
    tolerated = [each["key"] for each in pod["tolerations"]]
    assert ("nvidia.com/gpu-unhealthy" in tolerated) == ("nodeTaint" in adds.values.get("cluster", {}))

    said = " ".join(" | ".join(row[1:]) for row in _rows() if row[0].startswith(adds.row))
    assert [word for word in adds.words if word not in said] == []


def test_every_row_is_of_a_feature_that_is_tried_here() -> None:
    others = ("feature (values)", "---", "probes, metrics", "uninstalling")
    tried = tuple(each.row for each in FEATURES)
    assert [row[0] for row in _rows() if not row[0].startswith((*tried, *others))] == []


def test_the_port_and_the_hooks_rights_are_those_of_the_page(helm: Helm) -> None:
    rows = {row[0].split(" (")[0].split(",")[0]: row for row in _rows()}
    objects = helm.objects({})
    [port] = _plugin(objects)["containers"][0]["ports"]
    assert f"TCP {port['containerPort']}" in rows["probes"][4]
    [role] = [each for each in objects if each["kind"] == "Role"]
    named, unnamed = role["rules"]
    assert (named["resources"], unnamed["resources"]) == (["daemonsets"], ["daemonsets"])
    assert [*named["verbs"], *unnamed["verbs"]] == re.findall(r"`(\w+)`", rows["uninstalling"][3])
    assert named["resourceNames"] == ["try-gpu-plugin", "try-gpu-plugin-cleanup"]
    assert "ports" not in _plugin(helm.objects({"http": {"enabled": False}}))["containers"][0]


def test_only_the_pods_of_mps_are_privileged_of_themselves(helm: Helm) -> None:
    [pod] = [
        each["spec"]["template"]["spec"]
        for each in helm.objects({"mps": {"enabled": True}})
        if each["metadata"]["name"].endswith("-mps-control-daemon")
    ]
    assert pod["hostPID"] is True
    assert all(each["securityContext"]["privileged"] for each in (*pod["initContainers"], *pod["containers"]))
