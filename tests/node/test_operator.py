"""What an operator meets: two daemons on one node, a kubelet that does not answer, and what is told of it."""

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
