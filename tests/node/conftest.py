"""The daemon as a process."""

import socket
from collections.abc import Iterator

import pytest

from tests.node import forked
from tests.node.daemon import DaemonProcess


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
def port() -> int:
    """A free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
