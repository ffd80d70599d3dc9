import pytest

from tests.unit.cluster.api_server import FakeApiServer


@pytest.fixture
async def api():
    async with FakeApiServer() as running:
        yield running
