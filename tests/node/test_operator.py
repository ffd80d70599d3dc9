"""Commands and logs for an operator: two daemons on one node, a kubelet that does not answer, events after a restart."""

import fcntl
import json
import os
import re
import shutil
import signal

import anyio
import pytest

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.state.log import EVENT
from gpu_plugin.state.node_lock import NodeLock
from tests.node.daemon import DaemonProcess, healthy
from tests.node.forked import ran


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
    if state == "other":  # the first one does not answer for it
        its = ("--state-dir", second.state)
        done = await ran("status", *its)
        assert (done.returncode, done.stderr) == (1, "")
        assert "another daemon serves " in done.stdout
        done = await ran("status", *its, "-o", "json")
        told = json.loads(done.stdout)
        assert done.returncode == 1
        assert told["daemon"]["pid"] == second.process.pid
        assert [(each["kind"], each["cause"]) for each in told["problems"]] == [("waiting", told["waiting"])]
        done = await ran("status", *its, "--metrics")
        assert done.returncode == 1
        assert "gpu_plugin_config_refused 0" in done.stdout
        done = await ran("events", *its)
        assert done.returncode == 1
        assert done.stderr.startswith("gpu-plugin: this daemon waits: another daemon serves ")
    daemon.signal(signal.SIGKILL)
    await kubelet.wait_for(lambda: kubelet.registrations["nvidia.com/gpu"].accepted == 2)
    await kubelet.wait_for(healthy(kubelet, 8))
    assert await second.stop() < (0, 2)


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
    await daemon.said("registered with the kubelet")
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
    (line,) = (line for line in lines if "model" in line)
    assert line["model"] == "NVIDIA H100 80GB HBM3"
    assert line["library"] == "simulated"
    assert line["driver"] in line["message"]
    assert {line["resource"] for line in lines if "registered" in line["message"]} == {"nvidia.com/gpu"}


async def ask(daemon, *arguments):
    """Return the exit status and the JSON that `gpu-plugin` prints about a daemon."""
    done = await ran(*arguments, "--state-dir", daemon.state, "-o", "json")
    return done.returncode, json.loads(done.stdout or "null")


async def test_the_status_says_whether_the_kubelet_has_it_and_who_holds_what(directory, daemon):
    daemon.start()
    await daemon.said("waiting for the kubelet")
    status, told = await ask(daemon, "status")
    assert status == 1
    (problem,) = (each for each in told["problems"] if each["kind"] == "not-registered")
    assert (problem["object"], f"{directory}/kubelet.sock" in problem["cause"]) == ("nvidia.com/gpu", True)
    async with StandInKubelet(directory) as kubelet:
        await kubelet.wait_for(healthy(kubelet, 8))
        held = (await kubelet.admit("train", {"nvidia.com/gpu": 1})).allocations[0].ids[0]
        with anyio.fail_after(10):
            while (answer := await ask(daemon, "status"))[0]:
                await anyio.sleep(0.05)
        _, told = answer
        stands = told["resources"]["nvidia.com/gpu"]["registration"]
        assert (told["problems"], stands["registered"]) == ([], True)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]{12}Z", stands["since"])
        holders = {gpu["uuid"]: gpu["holders"] for gpu in told["gpus"]}
        assert {uuid for uuid, pods in holders.items() if pods} == {held}
        assert holders[held] == ["default/train"]
        daemon.fault(3, xid=79)
        await kubelet.wait_for(healthy(kubelet, 7))
        status, told = await ask(daemon, "status")
        (sick,) = (gpu for gpu in told["gpus"] if not gpu["healthy"])
        assert (status, sick["index"], sick["model"]) == (1, 3, "NVIDIA H100 80GB HBM3")
        assert sick["since"] is not None


async def test_a_directory_that_does_not_exist_is_said_not_to(daemon, directory):
    daemon.start("--device-plugin-dir", f"{directory}/mistyped", in_directory=False)
    await daemon.said(f"there is no directory {directory}/mistyped: is --device-plugin-dir right?")


async def test_what_happened_is_told_after_a_kill_and_a_restart(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    bus_id = (await ask(daemon, "status"))[1]["gpus"][5]["bus_id"]
    done = await ran("cordon", "--state-dir", daemon.state, bus_id, "--reason", "fan is loud")
    assert "GPU 5" in done.stdout
    daemon.fault(3, xid=79)
    await kubelet.wait_for(healthy(kubelet, 6))
    await daemon.stored(EVENT, "Xid 79")
    daemon.signal(signal.SIGKILL)
    await daemon.exit()
    status, offline = await ask(daemon, "events")
    assert status == 3
    assert {"daemon", "registration", "order", "health"} == {event["kind"] for event in offline}
    daemon.start()
    await kubelet.wait_for(lambda: kubelet.registrations["nvidia.com/gpu"].accepted == 2)
    status, told = await ask(daemon, "events")
    assert status == 0
    assert told[: len(offline)] == offline
    (order,) = (event for event in told if event["kind"] == "order" and event.get("reason"))
    assert (order["reason"], order["index"], order["bus_id"]) == ("fan is loud", 5, bus_id)
    assert order["by"].startswith(f"uid {os.getuid()}, process ")
    assert [event["text"] for event in told if "started" in event["text"]][1:]
    status, told = await ask(daemon, "events", "--gpu", "3")
    assert {event["index"] for event in told} == {3}
    await daemon.stop()
    assert (await ask(daemon, "events", "--last", "1"))[1][0]["text"] == "stopped: SIGTERM"


async def test_a_directory_made_anew_that_another_daemon_has_by_now_ends_this_one(kubelet, daemon, directory):
    daemon.state, daemon.log = directory.parent / "state", directory.parent / "daemon.log"
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    anew = directory.parent / "anew"
    anew.mkdir()
    other = NodeLock(directory.parent / "other", anew, "1")
    assert other.take() == ""
    directory.rename(directory.parent / "old")
    anew.rename(directory)
    assert await daemon.exit(15) == 1
    assert f"another daemon serves {directory}: " in daemon.log.read_text()
    assert "ending, so that a restart waits for it" in daemon.log.read_text()
    other.release()
    shutil.rmtree(directory)
    (directory.parent / "old").rename(directory)  # as the kubelet knows it


async def test_a_default_config_without_a_directory_is_in_the_status_and_the_log(kubelet, daemon):
    daemon.start(environ={"DEFAULT_CONFIG": "shared", "NODE_LABEL": "example.com/config"})
    await kubelet.wait_for(healthy(kubelet, 8))
    done = await ran("status", "--state-dir", daemon.state, "-o", "json")
    causes = [each["cause"] for each in json.loads(done.stdout)["problems"] if each["kind"] == "without-effect"]
    assert len(causes) == 2
    assert "DEFAULT_CONFIG" in causes[0]
    assert "--config-file-srcdir" in causes[0]
    assert "NODE_LABEL" in causes[1]
    warned = [line for line in daemon.log.read_text().splitlines() if " WARNING " in line]
    assert sum("--config-file-srcdir" in line for line in warned) == 2
