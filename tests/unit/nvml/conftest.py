"""What every test here shares: no driver thread outlives its test, and none waits longer than it must."""

import threading
from collections.abc import Iterator

import pytest

from gpu_plugin.nvml import events, monitor, reopening, subscription

_OTHERS: set[threading.Thread] = set()
"""Threads that were there before the test, and are none of its business."""


def driver_threads():
    """The threads for the driver's calls and events that this test has begun."""
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
