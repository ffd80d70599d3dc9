"""Whatever stands in the state directory, the daemon starts, says what it set aside, and remembers from then on."""

import contextlib
import json
import operator
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from gpu_plugin.daemon.state_files import FILES
from gpu_plugin.runtime.control import LOCK, request
from gpu_plugin.state.event_store import FILE as EVENTS_FILE
from gpu_plugin.state.records import DEVICES_FILE, GPUS_FILE, HEALTH_FILE, JOURNAL_FILE
from tests.node.daemon import GPU, DaemonProcess, healthy, ids


def foreign_byte(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[whole.index(b"GPU-")] = 0xFF  # within text, where JSON may hold any byte from 0x80 on
    file.write_bytes(whole)


def every_line(file: Path) -> None:
    """Puts a foreign byte into each line: none of them is what it was."""
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


WHOLE = (HEALTH_FILE, GPUS_FILE, DEVICES_FILE)
"""Files that are read whole or not at all; of those with a line a thing, the lines that can be read count."""


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


async def test_odd_entries_of_the_device_memory_keep_no_resource_from_being_served(kubelet, daemon):
    daemon.profile = "t4-4"
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 4))
    file = daemon.state / DEVICES_FILE
    await daemon.wrote(DEVICES_FILE, ids(kubelet)[3])
    daemon.kill()
    await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams)
    memory = json.loads(file.read_text())
    first = memory["resources"][GPU][0]
    odd = [{"id": f"{first['id']}::{'0' * 300}"}, {"id": ""}, {"id": 5}, {"kind": "x"}, {"numa": [2**100]}]
    memory["resources"][GPU] += [first, *(first | each for each in odd), None, []]
    memory["resources"]["no name"] = [first]
    memory["resources"]["nvidia.com/none"] = 5
    memory["foreign"][GPU] = [first, first, {}]
    file.write_text(json.dumps(memory))
    daemon.start()
    await daemon.said(f"{file} is damaged: ")
    await kubelet.wait_for(healthy(kubelet, 4))
    assert len(ids(kubelet)) == 4
    assert daemon.log.read_text().count("is damaged: ") == 1


async def test_odd_entries_of_remembered_gpus_and_health_keep_no_gpu_from_being_served(kubelet, daemon):
    daemon.profile = "t4-4"
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 4))
    await daemon.wrote(GPUS_FILE, ids(kubelet)[3])
    await daemon.wrote(HEALTH_FILE, "sequence")
    daemon.kill()
    await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams)
    files = daemon.state / GPUS_FILE, daemon.state / HEALTH_FILE
    gpus, health = (json.loads(file.read_text()) for file in files)
    first = gpus["gpus"][0]
    odd: tuple[dict[str, Any], ...] = (
        {"index": -1},
        {"uuid": ""},
        {"uuid": "\n"},
        {"uuid": "x" * 300},
        {"uuid": 5},
        {"mig_devices": [{}]},
    )
    gpus["gpus"] += [first, *(first | each for each in odd), None, []]
    health["evidence"] += [5, None, [], {}, {"uuid": first["uuid"], "signal": "xid"}]
    health["sequence"] += 1  # newer than the journal
    for file, memory in zip(files, (gpus, health), strict=True):
        file.write_text(json.dumps(memory))
    daemon.start()
    await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2)
    await kubelet.wait_for(healthy(kubelet, 4))
    assert len(ids(kubelet)) == 4
    assert [daemon.log.read_text().count(f"{file.name}: entry ") for file in files] == [1, 1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
async def test_a_full_disk_takes_a_fault_and_a_cordon_all_the_same_and_status_says_so(kubelet, daemon):
    if not mount("-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(daemon.state)):
        pytest.skip("nothing can be mounted here")
    daemon.profile = "t4-4"
    try:
        daemon.start()
        await kubelet.wait_for(healthy(kubelet, 4))
        await daemon.wrote("devices.json", "GPU-")
        fill(daemon.state / "filler")
        assert "is cordoned" in str(request(daemon.state, "cordon", gpu=0)["done"])
        daemon.fault(1, xid=79)
        await kubelet.wait_for(healthy(kubelet, 2))
        assert "a file cannot be written" in await trouble_once(daemon, bool)
        daemon.kill()
        await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams)
        daemon.start()
        await kubelet.wait_for(healthy(kubelet, 2))
        assert mount("-o", "remount,size=1m", str(daemon.state))
        await trouble_once(daemon, operator.not_)
    finally:
        daemon.kill()
        unmount(daemon.state)


def mount(*arguments: str) -> bool:
    Path(arguments[-1]).mkdir(exist_ok=True, parents=True)
    return not subprocess.run(["mount", *arguments], check=False, capture_output=True).returncode


def unmount(directory: Path) -> None:
    subprocess.run(["umount", str(directory)], check=True)


def fill(file: Path) -> None:
    """Takes all the room that there is."""
    with file.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(bytes(4096))


async def trouble_once(daemon: DaemonProcess, as_wanted: Callable[[str], bool]) -> str:
    """What the status says of the state directory, as soon as it is as wanted."""
    with anyio.fail_after(20):
        while not as_wanted(told := state_of(daemon)):
            await anyio.sleep(0.05)
    return told


def state_of(daemon: DaemonProcess) -> str:
    state: Any = request(daemon.state, "status")["state"]
    return str(state["trouble"])


@pytest.mark.parametrize("spoil", [foreign_byte, cut, link, pipe, directory_there])
async def test_spoilt_files_are_set_aside_and_said_and_the_node_is_served(kubelet, daemon, spoil):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    request(daemon.state, "cordon", gpu=ids(kubelet)[0])
    await daemon.wrote("health.json", "cordon")
    await daemon.wrote("devices.json", "GPU-")
    assert (await daemon.stop())[0] == 0
    names = WHOLE if spoil in (foreign_byte, cut) else FILES
    for name in names:
        (daemon.state / name).touch()
        spoil(daemon.state / name)
    if spoil in (foreign_byte, cut):
        every_line(daemon.state / JOURNAL_FILE)
        spoil(daemon.state / EVENTS_FILE)
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    said = daemon.log.read_text()
    if spoil in (foreign_byte, cut):
        assert f"{JOURNAL_FILE}: " in said
        assert "bytes cannot be read and are left out" in said
        assert f"{EVENTS_FILE}: 1 line of it cannot be read and is left out" in said
        assert os.path.lexists(daemon.state / f"{EVENTS_FILE}.corrupt")
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
        shutil.rmtree(daemon.state, ignore_errors=True)  # the daemon may be faster in writing anew
    await daemon.said("control socket was removed, renamed or replaced: it is made again")
    await daemon.wrote(JOURNAL_FILE, '"cordon"')
    await daemon.wrote("simulated-node.json", "boot_id")
    daemon.kill()
    daemon.start()
    await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2)
    await kubelet.wait_for(healthy(kubelet, 6))
