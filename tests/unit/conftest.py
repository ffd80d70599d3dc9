"""A simulated node."""

import pytest

from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.profile import load


@pytest.fixture
def node() -> SimulatedNode:
    """Eight H100 on an HGX board."""
    return SimulatedNode(load("hgx-h100"))
