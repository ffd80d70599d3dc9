"""A daemon whose state directory does not answer when it starts: registration and signals do not wait for it."""

import signal
from math import inf
from pathlib import Path

import anyio
import pytest

from demo.stand_in_kubelet import AdmissionError
from gpu_plugin.daemon.config_source import CHOICE_FILE
from gpu_plugin.runtime.control import request
from gpu_plugin.state.log import DEVICES, EVENT, FILES
from tests.node.daemon import GPU, DaemonProcess, healthy, ids
from tests.state_log import stored
from tests.unit.cluster.api_server import NODE, FakeApiServer

HOOKS = Path(__file__).parent / "hooks"


class HangingDisk:
    """Starts daemons whose state directory does not answer until `answer` is called."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self._until = daemon.directory.parent / "disk-answers"

    def start(self, call: str, *flags: str, seconds: float = inf) -> None:
        """Start a daemon for which each such call takes `seconds`."""
        self._daemon.log.unlink(missing_ok=True)
        environ = {"PYTHONPATH": f"{HOOKS}:{Path.cwd()}", "HANG": call, "HANG_IN": str(self._daemon.state)}
        environ["HANG_SECONDS"] = str(seconds)
        self._daemon.start(*flags, environ={**environ, "HANG_UNTIL": str(self._until)}, cold=True)

    def answer(self) -> None:
        self._until.touch()


@pytest.fixture
def disk(daemon):
    daemon.profile = "t4-4"
    return HangingDisk(daemon)


async def served_with_a_fault(kubelet, daemon) -> list[str]:
    """Write a fatal Xid of GPU 1 and a cordon of GPU 2 into the state directory, kill the daemon, and return the device ids."""
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 4))
    daemon.fault(1, xid=95)
    await kubelet.wait_for(healthy(kubelet, 3))
    await anyio.to_thread.run_sync(lambda: request(daemon.state, "cordon", gpu=2))
    await kubelet.wait_for(healthy(kubelet, 2))
    await daemon.stored(DEVICES, "GPU-")
    before = ids(kubelet)
    daemon.kill()
    await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams)
    return before


def written(daemon: DaemonProcess) -> list[bytes]:
    return [(daemon.state / name).read_bytes() for name in FILES]


@pytest.mark.parametrize("call", ["stat", "open", "read", "write", "flock"])
async def test_the_kubelet_is_served_meanwhile_and_the_memory_is_taken_up_later(kubelet, daemon, disk, call):
    before = await served_with_a_fault(kubelet, daemon)
    events, files = stored(daemon.state, EVENT), written(daemon)
    disk.start(call)
    await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 1, timeout=20)
    assert ids(kubelet) == before
    assert kubelet.resources[GPU].allocatable == 0
    await daemon.said("does not answer (no answer for 3 s)")
    await anyio.sleep(0.5)  # several looks at GPUs that are well
    assert kubelet.resources[GPU].allocatable == 0
    with pytest.raises(AdmissionError):
        await kubelet.admit("pod", {GPU: 1})
    assert written(daemon) == files, "nothing may replace what was not read"
    registrations = kubelet.registrations[GPU].accepted
    disk.answer()
    await kubelet.wait_for(healthy(kubelet, 2), timeout=20)
    assert kubelet.registrations[GPU].accepted == registrations + 1
    assert [each for each, device in kubelet.resources[GPU].devices.items() if device.health != "Healthy"] == before[
        1:3
    ]
    gpus = (await anyio.to_thread.run_sync(lambda: request(daemon.state, "status")))["gpus"]
    assert [signal["xid"] for signal in gpus[1]["signals"]] == [95]
    assert [signal["name"] for signal in gpus[2]["signals"]] == ["cordon"]
    await anyio.to_thread.run_sync(lambda: request(daemon.state, "release", gpu=0))  # the driver was closed in between
    assert daemon.log.read_text().count("does not answer (no answer for") == 1
    assert (await daemon.stop())[0] == 0
    assert stored(daemon.state, EVENT)[: len(events)] == events


@pytest.mark.parametrize("call", ["stat", "open", "read", "write", "flock"])
async def test_sigterm_ends_a_daemon_whose_disk_hangs_and_nothing_is_lost(kubelet, daemon, disk, call):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 4))
    await daemon.stop()
    files = written(daemon)
    for served in (False, True):
        disk.start(call)
        await daemon.said("gpu-plugin 0.1.0 starting")
        if served:
            await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 1, timeout=20)
        status, seconds = await daemon.stop()
        assert (status, seconds < 5) == (0, True)
        assert written(daemon) == files


@pytest.mark.parametrize(("call", "seconds"), [("flock", 3.2), ("read", 1.2), ("open", 1.2)])
async def test_a_disk_that_is_always_slow_is_waited_for_once(kubelet, daemon, disk, call, seconds):
    await served_with_a_fault(kubelet, daemon)
    disk.start(call, seconds=seconds)
    await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 1, timeout=20)
    await kubelet.wait_for(healthy(kubelet, 2), timeout=25)
    assert daemon.log.read_text().count("answers again") == 1
    disk.answer()
    assert (await daemon.stop())[0] == 0


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_driver_call_that_hangs_when_the_disk_answers_ends_the_process(kubelet, daemon, disk, stopped):
    """NVML cannot be closed for the next daemon: a new process begins with the memory. A SIGTERM ends it with status 0."""
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 4))
    daemon.fault(1, hang=1000)
    daemon.kill()
    await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams)
    disk.start("read", "--nvml-timeout", "2s")
    await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 1, timeout=20)
    disk.answer()
    await daemon.said("answers again")
    if stopped:
        daemon.signal(signal.SIGTERM)
    assert await daemon.exit(20) == (0 if stopped else 1)
    log = daemon.log.read_text()
    assert ("a call to the driver does not return" in log) is not stopped
    assert "Traceback" not in log


@pytest.mark.parametrize("call", ["stat", "open"])
async def test_a_node_whose_label_chooses_a_file_that_is_there_is_served_meanwhile(
    kubelet, daemon, disk, tmp_path, call
):
    (tmp_path / "default").write_text("version: v1\n")
    async with FakeApiServer() as api:
        flags = f"--config-file-srcdir={tmp_path}", f"--node-name={NODE}", f"--kubeconfig={api.kubeconfig(tmp_path)}"
        disk.start(call, *flags, "--fallback-strategies=named")
        await kubelet.wait_for(lambda: GPU in kubelet.resources and kubelet.resources[GPU].streams == 1, timeout=30)
        disk.answer()
        await kubelet.wait_for(healthy(kubelet, 4), timeout=30)
        await daemon.wrote(CHOICE_FILE, "default")
    assert (await daemon.stop())[0] == 0


async def test_a_node_whose_label_is_unknown_waits_and_holds_one_thread(daemon, disk, tmp_path):
    (tmp_path / "default").write_text("version: v1\n")
    async with FakeApiServer() as api:
        kubeconfig = api.kubeconfig(tmp_path)
    flags = f"--config-file-srcdir={tmp_path}", f"--node-name={NODE}", f"--kubeconfig={kubeconfig}"
    disk.start("open", *flags, "--fallback-strategies=named")
    await daemon.said("the last choice is not known: the state directory", 30)
    tasks = Path(f"/proc/{daemon.process.pid}/task")
    before = len([*tasks.iterdir()])
    for name in "abcdefgh":
        (tmp_path / name).write_text("version: v1\n")  # has the files looked at again
        await anyio.sleep(0.5)
    assert len([*tasks.iterdir()]) <= before + 1
    assert (await daemon.stop())[0] == 0


async def test_a_daemon_whose_disk_hangs_waits_for_the_daemon_that_serves(kubelet, daemon, disk):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 4))
    registrations = kubelet.registrations[GPU].accepted
    former = daemon.process
    assert former is not None
    daemon.log = daemon.directory / "second.log"
    disk.start("open")
    try:
        await daemon.said("does not answer (no answer for 3 s)")
        await daemon.said("waiting: another daemon serves")
        disk.answer()
        await daemon.said("waiting: another daemon uses the state directory")
        assert kubelet.registrations[GPU].accepted == registrations
        assert kubelet.resources[GPU].allocatable == 4
    finally:
        former.kill()
        former.wait()
    await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == registrations + 1, timeout=20)
    await kubelet.wait_for(healthy(kubelet, 4), timeout=20)
    assert (await daemon.stop())[0] == 0
