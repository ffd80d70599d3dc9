"""The API server accepts all objects of the chart: it has rules that no schema contains."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from tests.chart.helm import NAMESPACE, Helm, Object
from tests.chart.value_table import MATRIX
from tests.needed import found

from .harness import binaries
from .harness.api import ApiError
from .harness.cluster import Cluster

PATHS: Mapping[str, str] = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Pod": "/api/v1/namespaces/{}/pods",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}
STRANGE = {"PodMonitor", "PrometheusRule"}
"""Kinds that the cluster's API server does not have."""

DRY = "?dryRun=All&fieldValidation=Strict"


@pytest.fixture
def rendered() -> list[Object]:
    """Return the objects of all combinations of values, without duplicates."""
    helm = Helm(found(partial(binaries.find_tool, "helm")))
    return [json.loads(text) for text in {json.dumps(each) for values in MATRIX for each in helm.objects(values)}]


def test_the_api_server_takes_what_the_chart_renders(cluster: Cluster, rendered: list[Object]) -> None:
    api = cluster.api
    namespaces = {NAMESPACE, "elsewhere"}
    for name in namespaces:
        api.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    refused = []
    try:
        for each in rendered:
            kind, namespace = each["kind"], each["metadata"].get("namespace", "")
            if kind in STRANGE:
                continue
            try:
                api.create(PATHS[kind].format(namespace) + DRY, _admissible(each))
            except ApiError as error:
                refused.append(f"{kind} {each['metadata']['name']}: {error.message}")
    finally:
        for name in namespaces:
            api.delete(f"/api/v1/namespaces/{name}", grace=0)
    assert not refused
    assert len(rendered) > 100


def _admissible(each: Object) -> dict[str, Any]:
    """Return the object without its RuntimeClass, which the cluster does not have."""
    spec = {key: value for key, value in each.get("spec", {}).items() if key != "runtimeClassName"}
    return dict(each) | ({"spec": spec} if each["kind"] == "Pod" else {})
