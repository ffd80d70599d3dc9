"""The programs that check the chart. A test is skipped if its program is missing."""

from functools import partial
from pathlib import Path

import pytest

from tests.chart import grafana, openapi, prometheus, versions
from tests.chart.helm import Helm
from tests.chart.prometheus import Prometheus
from tests.cluster.harness import binaries
from tests.needed import found


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Helm 4."""
    return Helm(found(partial(binaries.find_tool, "helm")))


@pytest.fixture(scope="session")
def helm3() -> Helm:
    """The last of Helm 3."""
    return Helm(found(partial(binaries.find_tool, "helm3")))


@pytest.fixture(scope="session")
def kubeconform() -> Path:
    """The program that checks manifests with JSON schemas."""
    return found(partial(binaries.find_tool, "kubeconform"))


@pytest.fixture(scope="session", params=versions.KUBERNETES_VERSIONS)
def schemas(request: pytest.FixtureRequest) -> Path:
    """The schemas of a version of Kubernetes."""
    return found(partial(openapi.find, request.param))


@pytest.fixture(scope="session")
def programs() -> Prometheus:
    """Prometheus and promtool."""
    return found(prometheus.find)


@pytest.fixture(scope="session")
def grafana_types() -> grafana.Types:
    """Grafana's types and a compiler."""
    return found(grafana.find)
