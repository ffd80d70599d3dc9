"""docs/security.md, "What each feature adds", names the host paths and the rights that the chart renders."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.chart.helm import Helm, pods
from tests.chart.test_manifests import ACCESS

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
ADDED = PAGE.read_text().partition("## What each feature adds")[2].partition("\n## ")[0]
CLUSTER = ({"nodeEvents": True}, {"podEvents": True}, {"nodeCondition": True}, {"nodeTaint": "NoExecute"})


@pytest.mark.parametrize(("values", "paths", "capabilities"), ACCESS)
def test_the_page_names_the_host_paths_and_capabilities(
    values: Mapping[str, Any], paths: set[str], capabilities: list[str]
) -> None:
    given = set(map(str, values.values()))
    assert [path for path in paths - given if f"`{path}`" not in ADDED] == []
    assert [each for each in capabilities if f"`{each}`" not in ADDED] == []


@pytest.mark.parametrize(
    "values", [*({"cluster": each} for each in CLUSTER), {"config": {"map": {"default": "version: v1\n"}}}]
)
def test_the_page_names_the_rights_in_the_cluster(helm: Helm, values: Mapping[str, Any]) -> None:
    objects = helm.objects(values)
    roles = [
        each for each in objects if each["kind"] == "ClusterRole" or each["metadata"].get("namespace") == "default"
    ]
    rules = [rule for each in roles for rule in each.get("rules", ())]
    assert rules
    for rule in rules:
        verbs = ", ".join(f"`{verb}`" for verb in rule["verbs"])
        assert all(f"{verbs} on {resource}" in ADDED for resource in rule["resources"])


def test_the_page_has_the_port_and_the_rights_of_the_hook(helm: Helm) -> None:
    objects = helm.objects({})
    [port] = pods(objects)["device-plugin"]["containers"][0]["ports"]
    assert f"TCP {port['containerPort']}" in ADDED
    [role] = [each for each in objects if each["kind"] == "Role"]
    [row] = [line for line in ADDED.splitlines() if line.startswith("| uninstalling")]
    assert [verb for rule in role["rules"] for verb in rule["verbs"]] == re.findall(r"`(\w+)`", row.split("|")[4])
