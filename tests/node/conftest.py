"""The daemon as a process."""

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
