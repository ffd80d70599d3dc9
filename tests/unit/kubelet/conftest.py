"""A device plugin directory and a kubelet over it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.kubelet.connection import TrackedProtocol

from .serving import Plugin, serving


@pytest.fixture
def directory(short_path: Path) -> Path:
    """A device plugin directory."""
    return short_path


@pytest.fixture(params=["1.36", "1.37"])
async def kubelet(request, directory) -> AsyncIterator[StandInKubelet]:
    """A running kubelet of either generation; its contract must be whole at the end."""
    async with StandInKubelet(directory, generation=request.param) as running:
        yield running
    running.check()


@pytest.fixture
async def plugin(directory) -> AsyncIterator[Plugin]:
    """A resource of one GPU, served without a kubelet."""
    async with serving(directory, 1, register=False) as made:
        while not made.sockets:
            await made.look.wait(1)
        yield made


@pytest.fixture
def connections(monkeypatch) -> list[TrackedProtocol]:
    """Every connection that a server of ours has had from now on, in order."""
    made, original = [], TrackedProtocol.connection_made

    def noted(self, transport):
        original(self, transport)
        made.append(self)

    monkeypatch.setattr(TrackedProtocol, "connection_made", noted)
    return made
