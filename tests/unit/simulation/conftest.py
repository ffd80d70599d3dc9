"""The node of eight H100 with its driver open."""

import pytest

from .opened import handles, opened


@pytest.fixture
def driver(node):
    return opened(node)


@pytest.fixture
def gpus(driver):
    return handles(driver)


@pytest.fixture
def gpu(gpus):
    return gpus[0]
