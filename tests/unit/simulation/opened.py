"""Simulated nodes whose driver is open."""

import pytest

from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode


def make_node(name="hgx-h100", state=None, **more):
    return SimulatedNode(profile.load(name), state, **more)


def described(**content):
    """A node from the content of a file."""
    return SimulatedNode(profile.parse({"count": 1, "gpu": {"name": "x"}} | content))


def opened(node, **more):
    driver = SimulatedDriver(node, **more)
    driver.open()
    return driver


def handles(driver):
    return [driver.handle_by_index(index) for index in range(driver.device_count())]


def code(call, *arguments):
    """The nvmlReturn_t with which a call is refused."""
    with pytest.raises(NvmlError) as caught:
        call(*arguments)
    return caught.value.code
