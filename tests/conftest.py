"""Shared by every tier: async tests run on asyncio, the one backend grpclib knows."""

import pytest


@pytest.fixture
def anyio_backend():
    return "asyncio"
