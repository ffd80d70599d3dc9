"""The daemon as a process."""

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from tests.node import forked
from tests.node.daemon import DaemonProcess
from tests.node.mps_process import MpsProcess


@pytest.fixture(scope="session", autouse=True)
def _no_fork_server_is_left() -> Iterator[None]:
    yield
    forked.end()


@pytest.fixture
def daemon(directory) -> Iterator[DaemonProcess]:
    """A daemon, not started yet, on the simulated 8-GPU node."""
    made = DaemonProcess(directory)
    yield made
    made.kill()


@pytest.fixture
def mps(directory) -> Iterator[MpsProcess]:
    """A `gpu-plugin mps`, not started yet. Its MPS daemons are killed at the end."""
    made = MpsProcess(directory)
    yield made
    made.kill()
    for pid in made.children() if made.root.exists() else []:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def port() -> int:
    """A free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
