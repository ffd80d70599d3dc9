"""Shared by every tier: async tests run on asyncio, the one backend grpclib knows; a node's directories, a kubelet over them."""

import inspect
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from demo.stand_in_kubelet import StandInKubelet
from tests.short_paths import short_directory

# Machines are slow at times, so no example is timed. What a change is judged by is the same every time; a developer's
# own runs look further.
settings.register_profile(
    "ours", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("ours")

# Trees that tests make are a node's: only their owner may write to them, whatever the umask of a developer is.
os.umask(0o022)

NODE = "tests/node/"  # the tests of whole daemons

with suppress(ModuleNotFoundError):  # it comes with the driver of the browser, and anyio asks it before it asks asyncio
    import sniffio

    @pytest.fixture(autouse=True)
    def of_asyncio(request, monkeypatch):
        """An async test is of asyncio, callbacks of the loop included, where sniffio by itself knows tasks alone."""
        if inspect.iscoroutinefunction(getattr(request, "function", None)):
            monkeypatch.setattr(sniffio.thread_local, "name", "asyncio")


def pytest_xdist_auto_num_workers() -> int:
    """Five workers for two cores: tests of whole daemons mostly wait."""
    return len(os.sched_getaffinity(0)) * 5 // 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spreads the tests of whole daemons, which mostly wait, evenly among the files of the others, which mostly compute.

    Each worker of pytest-xdist begins with one stretch of the list. In the order of their names, the daemons would all be
    in the last one, and the cores would idle at the end.
    """
    daemons = [item for item in items if item.nodeid.startswith(NODE)]
    others = [item for item in items if not item.nodeid.startswith(NODE)]
    files = [list(group) for _, group in groupby(others, lambda item: item.path)]
    if not daemons or not files:
        return
    items[:] = [
        item
        for at, file in enumerate(files)
        for item in (*daemons[at * len(daemons) // len(files) : (at + 1) * len(daemons) // len(files)], *file)
    ]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory of the test's own whose path leaves room for sockets."""
    with short_directory() as path:
        yield path


@pytest.fixture
def directory(short_path: Path) -> Path:
    """A device plugin directory."""
    path = short_path / "device-plugins"  # as under the kubelet's own directory: PodResources is beside it
    path.mkdir()
    return path


@pytest.fixture
async def kubelet(directory: Path) -> AsyncIterator[StandInKubelet]:
    """A running kubelet whose contract must be whole at the end."""
    async with StandInKubelet(directory) as running:
        yield running
    running.check()
