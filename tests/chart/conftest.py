"""The programs that the chart is judged with, skipped with one sentence where they are not."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from tests.chart import grafana, openapi, prometheus
from tests.chart.helm import Helm
from tests.chart.prometheus import Prometheus
from tests.cluster.harness import binaries

INSTALL = os.environ.get("E2E_INSTALL") == "1"
Say = Callable[[str], None]
Had = TypeVar("Had")

REQUIRED = os.environ.get("E2E") == "required"


def _had(find: Callable[[], Had], install: Callable[[Say], Had], request: pytest.FixtureRequest) -> Had:
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(step: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\nchart: {step}", flush=True)

    try:
        return install(say) if INSTALL else find()
    except binaries.MissingError as missing:
        if REQUIRED or INSTALL:
            pytest.fail(f"no test of the chart: {missing}")
        pytest.skip(f"no test of the chart: {missing}; E2E_INSTALL=1 builds it")


def _tool(name: str, request: pytest.FixtureRequest) -> Path:
    return _had(partial(binaries.find_tool, name), partial(binaries.install_tool, name), request)


@pytest.fixture(scope="session")
def helm(request: pytest.FixtureRequest) -> Helm:
    """Helm 4."""
    return Helm(_tool("helm", request))


@pytest.fixture(scope="session")
def helm3(request: pytest.FixtureRequest) -> Helm:
    """The last of Helm 3."""
    return Helm(_tool("helm3", request))


@pytest.fixture(scope="session")
def kubeconform(request: pytest.FixtureRequest) -> Path:
    """What holds manifests against JSON schemas."""
    return _tool("kubeconform", request)


@pytest.fixture(scope="session", params=openapi.VERSIONS)
def schemas(request: pytest.FixtureRequest) -> Path:
    """The schemas of a version of Kubernetes."""
    version = request.param
    return _had(partial(openapi.find, version), partial(openapi.install, version), request)


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Prometheus:
    """Prometheus and promtool."""
    return _had(prometheus.find, prometheus.install, request)


@pytest.fixture(scope="session")
def grafana_types(request: pytest.FixtureRequest) -> grafana.Types:
    """Grafana's types and a compiler."""
    return _had(grafana.find, grafana.install, request)
