"""What an operator meets: two daemons on one node, a kubelet that does not answer, and what is told of it."""

import fcntl
import json
import os
import signal

import pytest

from tests.node.daemon import DaemonProcess, healthy


@pytest.fixture
def second(directory):
    """Another daemon on the same directories, not started yet."""
    made = DaemonProcess(directory)
    made.log = directory.parent / "second.log"
    yield made
    made.kill()


@pytest.mark.parametrize("state", ["state", "other"])
async def test_the_second_daemon_of_a_node_waits_and_serves_once_the_first_is_killed(
    kubelet, daemon, second, directory, state
):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    second.state = directory / state
    second.start()
    await second.said("waiting: another daemon")
    assert daemon.process is not None
    assert f"process {daemon.process.pid}" in second.log.read_text()
    assert kubelet.registrations["nvidia.com/gpu"].accepted == 1
    daemon.signal(signal.SIGKILL)
    await kubelet.wait_for(lambda: kubelet.registrations["nvidia.com/gpu"].accepted == 2)
    await kubelet.wait_for(healthy(kubelet, 8))
    assert await second.stop() < (0, 2)


async def test_a_daemon_that_waits_heeds_sigterm(kubelet, daemon, second):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    second.start()
    await second.said("waiting: another daemon")
    assert (await second.stop())[0] == 0
    assert healthy(kubelet, 8)()


async def test_a_log_that_nobody_reads_keeps_nothing_waiting(kubelet, daemon, directory):
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"x" * 4096)  # nothing more goes into it
    daemon.log = directory.parent / "no" / "pipe"
    daemon.log.parent.mkdir()
    daemon.log.symlink_to(f"/proc/{os.getpid()}/fd/{writing}")
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    for gpu in range(4):
        daemon.fault(gpu, lost=True)
    await kubelet.wait_for(healthy(kubelet, 4))
    status, seconds = await daemon.stop()
    os.close(reading)
    os.close(writing)
    assert status == 0
    assert seconds < 2


async def test_the_log_says_at_the_start_what_is_served(kubelet, daemon):
    daemon.start("--log-format", "json")
    await daemon.said("GPUs: 8 x NVIDIA H100 80GB HBM3")
    await kubelet.wait_for(healthy(kubelet, 8))
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    (line,) = (line for line in lines if "model" in line)
    assert line["model"] == "NVIDIA H100 80GB HBM3"
    assert line["library"] == "simulated"
    assert line["driver"] in line["message"]
    assert {line["resource"] for line in lines if "registered" in line["message"]} == {"nvidia.com/gpu"}
