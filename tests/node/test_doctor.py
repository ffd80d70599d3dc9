"""`gpu-plugin doctor` with a daemon: its questions to daemon and kubelet, and its findings."""

import json
import signal

import pytest

from tests.node.daemon import DaemonProcess, healthy
from tests.node.forked import ran

GPU = "nvidia.com/gpu"


@pytest.fixture
def doctor(directory, daemon):
    """Run the verb with the daemon's directories. Return its exit status, and its findings by check."""

    async def examine(*more, state=None):
        command = ["doctor", "-o", "json", "--simulate", daemon.profile]
        command += ["--device-plugin-dir", directory, "--state-dir", state or daemon.state, *more]
        done = await ran(*command)
        found: dict[str, list[tuple[str, str]]] = {}
        for each in json.loads(done.stdout)["findings"]:
            found.setdefault(each["check"], []).append((each["status"], each["found"]))
        return done.returncode, found

    return examine


async def test_a_daemon_that_is_well_and_then_is_not(kubelet, daemon, doctor, directory):
    (directory / "kubelet_internal_checkpoint").write_text("{}")
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    status, found = await doctor()
    assert (status, found["registration"]) == (0, [("ok", f"the kubelet has {GPU}")]), found
    assert found["daemon"][0][0] == found["kubelet-directory"][0][0] == found["pod-resources"][0][0] == "ok"
    registrations = kubelet.registrations[GPU].accepted

    daemon.fault(3, xid=79)
    await kubelet.wait_for(healthy(kubelet, 7))
    status, found = await doctor()
    [(stands, said)] = found["daemon"]
    assert (status, stands) == (1, "failed")
    assert "GPU 3" in said
    assert "Xid 79" in said
    assert kubelet.registrations[GPU].accepted == registrations  # nothing was registered to find that out
    assert daemon.process.poll() is None


async def test_a_daemon_that_waits_for_another(kubelet, daemon, doctor, directory):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    second = DaemonProcess(directory, state="other")
    second.log = directory.parent / "second.log"
    try:
        second.start()
        await second.said("waiting: another daemon")
        status, found = await doctor(state=second.state)
    finally:
        second.kill()
    [(stands, said)] = found["daemon"]
    assert (status, stands) == (1, "failed")
    assert "another daemon serves" in said


async def test_a_daemon_that_hangs_was_killed_and_ended(kubelet, daemon, doctor):
    """Its released GPU is left alone, for as long as it is released."""
    left_alone = ("skipped", "GPU 3 is released for maintenance, so the driver is left alone")

    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    (await ran("release", "3", "--state-dir", daemon.state)).check_returncode()
    daemon.signal(signal.SIGSTOP)
    try:
        status, found = await doctor("--timeout", "1s")
    finally:
        daemon.signal(signal.SIGKILL)
        daemon.process.wait()
    [(stands, said)] = found["daemon"]
    assert (status, stands) == (1, "failed")
    assert "no answer within 1 s" in said
    [(stands, said)] = found["registration"]
    assert stands == "skipped"
    assert "hangs" in said
    assert found["driver-library"] == [left_alone]

    status, found = await doctor()
    [(stands, said)] = found["daemon"]
    assert (status, stands) == (1, "failed")
    assert "no daemon answers" in said
    assert "killed" in said
    assert found["driver-library"] == [left_alone]

    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 7))
    (await ran("resume", "--all", "--state-dir", daemon.state)).check_returncode()
    await kubelet.wait_for(healthy(kubelet, 8))
    assert (await daemon.stop())[0] == 0
    _, found = await doctor()
    [(stands, said)] = found["daemon"]
    assert stands == "note"
    assert "no daemon answers" in said
    assert found["gpus"][0][0] == "ok"
