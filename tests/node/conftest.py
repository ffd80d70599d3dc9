"""The daemon as a process."""

from collections.abc import Iterator

import pytest

from tests.node.daemon import DaemonProcess


@pytest.fixture
def daemon(directory) -> Iterator[DaemonProcess]:
    """A daemon, not started yet, on the simulated 8-GPU node."""
    made = DaemonProcess(directory)
    yield made
    made.kill()
