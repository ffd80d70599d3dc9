"""The programs that the chart is judged with, skipped with one sentence where they are not."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chart import openapi
from tests.chart.helm import Helm
from tests.cluster.harness import binaries

INSTALL = os.environ.get("E2E_INSTALL") == "1"
Find = Callable[[str], Path]
Install = Callable[[str, Callable[[str], None]], Path]

REQUIRED = os.environ.get("E2E") == "required"


def _had(find: Find, install: Install, name: str, request: pytest.FixtureRequest) -> Path:
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(step: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\nchart: {step}", flush=True)

    try:
        return install(name, say) if INSTALL else find(name)
    except binaries.MissingError as missing:
        if REQUIRED or INSTALL:
            pytest.fail(f"no test of the chart: {missing}")
        pytest.skip(f"no test of the chart: {missing}; E2E_INSTALL=1 builds it")


def _tool(name: str, request: pytest.FixtureRequest) -> Path:
    return _had(binaries.find_tool, binaries.install_tool, name, request)


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
    return _had(openapi.find, openapi.install, request.param, request)
