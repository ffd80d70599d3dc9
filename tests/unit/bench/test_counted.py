"""The driver whose calls another process can count."""

import contextlib

import pytest

from bench.counted import Count, counted
from bench.imported import count
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.hardware import SimulatedNode


def test_every_call_is_seen_in_the_file(tmp_path):
    file = tmp_path / "calls"
    file.touch()
    with contextlib.closing(Count(file)) as writes, contextlib.closing(Count(file)) as reads:
        driver = counted(writes)(SimulatedNode(profile.load("t4-4")))
        assert reads.read() == 0
        driver.open()
        driver.uuid(driver.handle_by_index(0))
        assert reads.read() == 3
        with pytest.raises(NvmlError):
            driver.handle_by_index(4)
        assert reads.read() == 4, "a refused call is a call"
        with pytest.raises(NvmlError):
            driver.wait(driver.event_set(), 1)
        assert reads.read() == 5, "waiting for events is not counted"
        with contextlib.closing(Count(file)) as late:
            assert late.read() == 5, "a second look at the file begins with what is there"
        driver.close()


def test_modules_are_counted_with_those_within_the_packages_named():
    modules = ["lightkube", "lightkube.core", "lightkubernetes", "h11", "os"]
    assert count(["lightkube", "httpx2"], modules) == 2
