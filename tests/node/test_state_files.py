"""The daemon starts with any content of the state directory, logs the files that it moves away, and stores its state again."""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

from gpu_plugin.daemon.state_files import FILES
from gpu_plugin.runtime.control import LOCK, request
from gpu_plugin.state.log import DEVICES, EVENT, GPUS, HEALTH
from gpu_plugin.state.log import FILES as LOG_FILES
from tests.node.daemon import GPU, DaemonProcess, healthy, ids
from tests.state_log import store, stored


def every_line(file: Path) -> None:
    """Replace a byte in each line, so that no line is valid."""
    file.write_bytes(file.read_bytes().replace(b"GPU-", b"GPU\xff"))


def every_byte(file: Path) -> None:
    file.write_bytes(b"\xff" * file.stat().st_size)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def link(file: Path) -> None:
    elsewhere = file.with_name(f"elsewhere-{file.name}")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def directory_there(file: Path) -> None:
    file.unlink()
    (file / "inside").mkdir(parents=True)


async def test_odd_entries_of_the_checkpoint_keep_no_resource_from_being_served(kubelet, daemon):
    daemon.profile = "t4-4"
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 4))
    uuid = ids(kubelet)[0]
    daemon.kill()
    await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams)
    odd = [f"{uuid}::{'0' * (300 - len(uuid) - 2)}", f"{uuid}::\n", "", "x" * 300, "\x00"]
    entries = [
        {"PodUID": "1", "ContainerName": "one", "ResourceName": GPU, "DeviceIDs": {"-1": odd, "99": odd[:1], "": None}},
        {"PodUID": "", "ContainerName": "", "ResourceName": "", "DeviceIDs": None},
        {"PodUID": "2", "ContainerName": "two", "ResourceName": "n" * 300, "DeviceIDs": {"0": odd}},
    ]
    checkpoint = kubelet.directory / "kubelet_internal_checkpoint"
    checkpoint.write_text(json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 0}))
    daemon.start()
    await daemon.said(f"{checkpoint} says that a pod holds '{uuid}::")
    await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 1)
    await kubelet.wait_for(healthy(kubelet, 4), timeout=20)  # the kubelet has written its checkpoint with its list
    assert len(ids(kubelet)) == 4
    assert daemon.log.read_text().count("says that a pod holds") == 1


async def test_odd_records_keep_no_gpu_from_being_served(kubelet, daemon):
    daemon.profile = "t4-4"
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 4))
    await daemon.stored(DEVICES, ids(kubelet)[3])
    await daemon.stored(HEALTH, "evidence")
    daemon.kill()
    await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams)
    health = stored(daemon.state, HEALTH)
    health["evidence"] += [5, None, [], {}, {"uuid": ids(kubelet)[0], "signal": "xid"}]
    for kind, content in ((HEALTH, health), (GPUS, {"gpus": 5}), (DEVICES, [])):
        store(daemon.state, kind, content)
    daemon.start()
    await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2)
    await kubelet.wait_for(healthy(kubelet, 4))
    assert len(ids(kubelet)) == 4
    log = daemon.log.read_text()
    assert log.count(f"{HEALTH} in {daemon.state}: entry ") == 1
    assert all(f"the record of {kind} in {daemon.state} is invalid" in log for kind in (GPUS, DEVICES))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
async def test_a_full_disk_takes_a_fault_a_cordon_and_their_events_all_the_same(kubelet, daemon):
    if not mount("-t", "tmpfs", "-o", "size=192k,mode=700", "none", str(daemon.state)):
        pytest.skip("nothing can be mounted here")
    daemon.profile = "t4-4"
    try:
        daemon.start()
        await kubelet.wait_for(healthy(kubelet, 4))
        await daemon.stored(DEVICES, "GPU-")
        fill(daemon.state / "filler")
        assert "is cordoned" in str(request(daemon.state, "cordon", gpu=0)["done"])
        daemon.fault(1, xid=79)
        await kubelet.wait_for(healthy(kubelet, 2))
        await daemon.stored(EVENT, "Xid 79")
        assert state_of(daemon) == ""
        daemon.kill()
        await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams)
        daemon.start()
        await kubelet.wait_for(healthy(kubelet, 2))
        assert {"order", "health"} <= {event["kind"] for event in stored(daemon.state, EVENT)}
    finally:
        daemon.kill()
        unmount(daemon.state)


def mount(*arguments: str) -> bool:
    Path(arguments[-1]).mkdir(exist_ok=True, parents=True)
    return not subprocess.run(["mount", *arguments], check=False, capture_output=True).returncode


def unmount(directory: Path) -> None:
    subprocess.run(["umount", str(directory)], check=True)


def fill(file: Path) -> None:
    """Fill the disk with this file."""
    with file.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(bytes(4096))


def state_of(daemon: DaemonProcess) -> str:
    state: Any = request(daemon.state, "status")["state"]
    return str(state["trouble"])


@pytest.mark.parametrize("spoil", [every_line, link, pipe, directory_there])
async def test_spoilt_files_are_set_aside_and_said_and_the_node_is_served(kubelet, daemon, spoil):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    request(daemon.state, "cordon", gpu=ids(kubelet)[0])
    await daemon.stored(HEALTH, "cordon")
    await daemon.stored(DEVICES, "GPU-")
    assert (await daemon.stop())[0] == 0
    names = () if spoil is every_line else FILES
    for name in names or LOG_FILES:
        (daemon.state / name).touch()
        spoil(daemon.state / name)
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    said = daemon.log.read_text()
    if spoil is every_line:
        assert "of the state log cannot be read and are left out" in said
    for name in names:
        assert f"{daemon.state / name} cannot be read, so its content is lost" in said
        assert os.path.lexists(daemon.state / f"{name}.corrupt")
    request(daemon.state, "cordon", gpu=ids(kubelet)[1])
    await kubelet.wait_for(healthy(kubelet, 7))
    daemon.kill()
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 7))


@pytest.mark.parametrize("spoil", [every_byte, cut, link, pipe, directory_there])
async def test_a_spoilt_lock_keeps_nobody_out_and_lets_no_second_one_in(kubelet, daemon, directory, spoil):
    daemon.state.mkdir()
    lock = daemon.state / LOCK
    lock.write_text('{"pid": 1, "host": "another"}')
    spoil(lock)
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    assert (spoil in (link, pipe, directory_there)) == os.path.lexists(f"{lock}.corrupt")
    second = DaemonProcess(directory)
    second.log = directory.parent / "second.log"
    try:
        second.start()
        assert daemon.process is not None
        await second.said(f"another daemon uses the state directory {daemon.state}: process {daemon.process.pid} ")
    finally:
        second.kill()


@pytest.mark.parametrize("how", ["renamed", "removed"])
async def test_a_state_directory_that_went_under_the_daemon_costs_nothing_after_a_kill(kubelet, daemon, how):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.fault(2, xid=79)
    await anyio.to_thread.run_sync(lambda: request(daemon.state, "cordon", gpu=1))
    await kubelet.wait_for(healthy(kubelet, 6))
    if how == "renamed":
        daemon.state.rename(daemon.state.with_name("away"))
    else:
        shutil.rmtree(daemon.state, ignore_errors=True)  # the daemon may write a file again meanwhile
    await daemon.said("control socket was removed, renamed or replaced: it is made again")
    await daemon.stored(HEALTH, "cordon")
    await daemon.wrote("simulated-node.json", "boot_id")
    daemon.kill()
    daemon.start()
    await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2)
    await kubelet.wait_for(healthy(kubelet, 6))
