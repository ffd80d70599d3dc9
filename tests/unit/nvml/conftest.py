"""Fixtures of all tests of nvml: no driver thread outlives its test, and no wait is long."""

import threading
from collections.abc import Iterator

import pytest

from gpu_plugin.nvml import events, monitor, reopening, subscription

_OTHERS: set[threading.Thread] = set()  # threads from before the test


def driver_threads():
    """Return the threads for calls and events of the driver that this test started."""
    named = [thread for thread in threading.enumerate() if thread.name.startswith("nvml-")]
    return [thread for thread in named if thread not in _OTHERS]


@pytest.fixture(autouse=True)
def ended_threads(monkeypatch) -> Iterator[None]:
    for module in (events, subscription):
        monkeypatch.setattr(module, "WAIT_MS", 10)
    _OTHERS.clear()
    _OTHERS.update(driver_threads())
    yield
    left = driver_threads()
    for thread in left:
        thread.join(20)
    assert not [thread for thread in left if thread.is_alive()]


@pytest.fixture(autouse=True)
def no_gap(monkeypatch):
    monkeypatch.setattr(monitor, "LOOK_GAP", 0.0)
    monkeypatch.setattr(reopening, "RETRY_PAUSES", (0.0, 0.0, 0.0))
