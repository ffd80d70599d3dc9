"""Whatever stands in the state directory, the daemon starts, says what it set aside, and remembers from then on."""

import os
from pathlib import Path

import pytest

from gpu_plugin.control import request
from gpu_plugin.daemon import FILES
from gpu_plugin.memory import DEVICES_FILE, GPUS_FILE, HEALTH_FILE
from tests.node.daemon import healthy, ids


def foreign_byte(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[whole.index(b"GPU-")] = 0xFF  # within text, where JSON may hold any byte from 0x80 on
    file.write_bytes(whole)


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
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    said = daemon.log.read_text()
    for name in names:
        assert f"{daemon.state / name} cannot be read, what it remembered is lost" in said
        assert os.path.lexists(daemon.state / f"{name}.corrupt")
    request(daemon.state, "cordon", gpu=ids(kubelet)[1])
    await kubelet.wait_for(healthy(kubelet, 7))
    daemon.kill()
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 7))
