"""What every test here shares: no driver thread outlives its test, and none waits longer than it must."""

import threading
from collections.abc import Iterator

import pytest

from gpu_plugin.nvml import events, monitor, subscription


def driver_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("nvml-")]


@pytest.fixture(autouse=True)
def ended_threads(monkeypatch) -> Iterator[None]:
    for module in (events, subscription):
        monkeypatch.setattr(module, "WAIT_MS", 10)
    before = driver_threads()
    yield
    left = [thread for thread in driver_threads() if thread not in before]
    for thread in left:
        thread.join(20)
    assert not [thread for thread in left if thread.is_alive()]


@pytest.fixture(autouse=True)
def no_gap(monkeypatch):
    monkeypatch.setattr(monitor, "LOOK_GAP", 0.0)
    monkeypatch.setattr(monitor, "RETRY_PAUSES", (0.0, 0.0, 0.0))
