"""A simulated node: a directory, a stand-in kubelet over it, and the daemon as a process."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gpu_plugin.simulation.stand_in_kubelet import StandInKubelet
from tests.node import forked
from tests.node.daemon import DaemonProcess


@pytest.fixture(scope="session", autouse=True)
def _no_fork_server_is_left() -> Iterator[None]:
    yield
    forked.end()


@pytest.fixture
def directory(short_path: Path) -> Path:
    """A device plugin directory."""
    path: Path = short_path / "device-plugins"  # as under the kubelet's own directory: PodResources is beside it
    path.mkdir()
    return path


@pytest.fixture
async def kubelet(directory) -> AsyncIterator[StandInKubelet]:
    """A running kubelet whose contract must be whole at the end."""
    async with StandInKubelet(directory) as running:
        yield running
    running.check()


@pytest.fixture
def daemon(directory) -> Iterator[DaemonProcess]:
    """A daemon, not started yet, on the simulated 8-GPU node."""
    made = DaemonProcess(directory)
    yield made
    made.kill()
