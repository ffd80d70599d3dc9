"""Shared by every tier: async tests run on asyncio, the one backend grpclib knows."""

import inspect
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import rmtree  # by name: tests replace the module's own

import pytest
from hypothesis import HealthCheck, settings

# Machines are slow at times, so no example is timed. What a change is judged by is the same every time; a developer's
# own runs look further.
settings.register_profile(
    "ours", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("ours")

with suppress(ModuleNotFoundError):  # it comes with the driver of the browser, and anyio asks it before it asks asyncio
    import sniffio

    @pytest.fixture(autouse=True)
    def of_asyncio(request, monkeypatch):
        """An async test is of asyncio, callbacks of the loop included, where sniffio by itself knows tasks alone."""
        if inspect.iscoroutinefunction(getattr(request, "function", None)):
            monkeypatch.setattr(sniffio.thread_local, "name", "asyncio")


def pytest_xdist_auto_num_workers() -> int:
    """Half as many workers again as cores: tests of whole daemons mostly wait."""
    cores = len(os.sched_getaffinity(0))
    return cores + cores // 2


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory of the test's own whose path leaves room for sockets: their addresses have 107 bytes (unix(7))."""
    path = Path(tempfile.mkdtemp(prefix="gp", dir="/tmp"))
    yield path
    rmtree(path, ignore_errors=True)
