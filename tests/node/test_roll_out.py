"""Nodes without a GPU, or with a dead driver: what their daemons report, and that a roll-out of a DaemonSet passes them."""

import json
import socket

import anyio.to_thread
import pytest

from gpu_plugin.cli import main
from gpu_plugin.runtime import control
from tests.node.daemon import DaemonProcess
from tests.node.test_listener import flags, told

WAIT = "--fail-on-init-error=false"
NO_LIBRARY, NOT_LOADED = 12, 9  # nvmlReturn_t


@pytest.fixture
def node(directory):
    """Starts a daemon on a simulated node with this number of GPUs and a dead driver. Returns the daemon and its port."""
    begun = []

    def start(gpus: int, error: int) -> tuple[DaemonProcess, int]:
        name = f"{gpus}-gpus"
        profile = directory / f"{name}.json"
        profile.write_text(json.dumps({"count": gpus, "gpu": {"name": "NVIDIA X"}, "init_error": error}))
        with socket.create_server(("127.0.0.1", 0)) as free:
            at = free.getsockname()[1]
        own = directory / name
        own.mkdir()
        daemon = DaemonProcess(own, profile=str(profile))
        begun.append(daemon)
        daemon.start(*flags(at, WAIT))
        return daemon, at

    yield start
    for daemon in begun:
        daemon.kill()


async def test_a_node_without_a_gpu_is_ready_and_nothing_is_wrong_with_it(node, capsys):
    daemon, at = node(0, NO_LIBRARY)
    assert "this node has no NVIDIA GPU" in await told(at, "readyz", 200)
    await told(at, "startupz", 200)
    await told(at, "livez", 200)
    status = await anyio.to_thread.run_sync(control.request, daemon.state, "status")
    assert status["driver"]["no_gpu"]
    assert status["driver"]["trouble"] == ""
    assert main(["status", "--state-dir", str(daemon.state)]) == 0
    assert "this node has no NVIDIA GPU" in capsys.readouterr().out
    (line,) = (line for line in daemon.log.read_text().splitlines() if " INFO " in line and "nothing is served" in line)
    assert "cannot be used" not in line
    # Without this series the alert on a dead driver cannot fire
    assert "\ngpu_plugin_driver_up" not in await told(at, "metrics", 200)


async def test_a_node_with_a_dead_driver_is_ready_and_its_driver_is_reported_down(node):
    daemon, at = node(2, NOT_LOADED)
    body = await told(at, "readyz", 200, "the NVIDIA driver cannot be used")
    assert "[+]driver ok: the NVIDIA driver cannot be used" in body
    assert "\ngpu_plugin_driver_up 0\n" in await told(at, "metrics", 200)
    status = await anyio.to_thread.run_sync(control.request, daemon.state, "status")
    assert status["driver"]["trouble"]
    assert main(["status", "--state-dir", str(daemon.state)]) == 1
