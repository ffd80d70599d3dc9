"""The programs that the chart is judged with, skipped with one sentence where they are not."""

import os
from pathlib import Path

import pytest

from tests.chart.helm import Helm
from tests.cluster.harness import binaries

INSTALL = os.environ.get("E2E_INSTALL") == "1"
REQUIRED = os.environ.get("E2E") == "required"


def _tool(name: str, request: pytest.FixtureRequest) -> Path:
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(step: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\nchart: {step}", flush=True)

    try:
        return binaries.install_tool(name, say) if INSTALL else binaries.find_tool(name)
    except binaries.MissingError as missing:
        if REQUIRED or INSTALL:
            pytest.fail(f"no test of the chart: {missing}")
        pytest.skip(f"no test of the chart: {missing}; E2E_INSTALL=1 builds it")


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
