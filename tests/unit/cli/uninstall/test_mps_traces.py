"""Cleanup removes the files of MPS daemons from a node, unless a daemon still runs."""

import errno
import os
import shutil
import socket
from pathlib import Path

import pytest

from gpu_plugin.cli.uninstall.mps_traces import remove_mps_traces
from gpu_plugin.mps import readiness


@pytest.fixture
def tmp_path(short_path):
    """Sockets lie below it."""
    return short_path


@pytest.fixture
def root(tmp_path):
    """An MPS root after the stop of its supervisor."""
    made = tmp_path / "mps"
    for name in ("pipe", "log"):
        (made / "nvidia.com" / "gpu" / name).mkdir(parents=True)
    (made / "nvidia.com" / "gpu" / "log" / "control.log").write_text("")
    (made / "shm").mkdir()
    for name in (readiness.FILE, ".compute-modes.json"):
        (made / name).write_text("{}")
    return made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["", "nvidia.com", ".."])
def test_a_user_who_may_not_read_a_directory_gets_a_sentence(root, closed):
    root.parent.chmod(0o755)
    (root / closed).chmod(0o700)
    me = os.geteuid()
    os.seteuid(65534)
    try:
        done = remove_mps_traces(root)
    finally:
        os.seteuid(me)
    [sentence] = done.left
    assert str(root) in sentence
    assert "Permission denied" in sentence
    assert str(root) in remove_mps_traces(root).removed


def test_everything_goes(root):
    done = remove_mps_traces(root)
    assert done.left == []
    assert not root.exists()
    assert {str(root / "nvidia.com" / "gpu"), str(root / "nvidia.com"), str(root)} < set(done.removed)
    assert remove_mps_traces(root) == type(done)()


def test_a_running_supervisor_is_left_alone(root):
    held = readiness.StateFile(root)
    assert held.lock()
    done = remove_mps_traces(root)
    held.unlock()
    assert done.removed == []
    assert "gpu-plugin mps is running" in done.left[0]


def test_a_daemon_that_another_program_runs_keeps_its_directory(root):
    foreign = root / "nvidia.com" / "gpu.shared"
    (foreign / "pipe").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(foreign / "pipe" / "control"))
        daemon.listen()
        done = remove_mps_traces(root)
    assert done.left == [
        f"{foreign}: an MPS control daemon is running there: stop it first",
        f"{root}: contains files that are not this plugin's: nvidia.com",
    ]
    assert not (root / "nvidia.com" / "gpu").exists()
    assert foreign.is_dir()


def test_below_a_path_that_is_too_long_for_a_socket_nobody_listens(root, tmp_path):
    deep = tmp_path / ("x" * 100)
    root.rename(deep)
    assert remove_mps_traces(deep).left == []
    assert not deep.exists()


def test_what_is_no_resources_stays(root, tmp_path):
    (root / "notes").mkdir()
    for path in ("home/user/pipe", "nvidia.com/gpu/../other/pipe", "nvidia.com/other/thesis"):
        (root / path).mkdir(parents=True)
    outside = tmp_path / "outside"
    (outside / "pipe").mkdir(parents=True)
    (root / "nvidia.com" / "link").symlink_to(outside)
    (root / "shm" / "of-a-client").write_text("")
    done = remove_mps_traces(root)
    assert done.left == [
        f"{root / 'shm'}: contains files that are not this plugin's: of-a-client",
        f"{root}: contains files that are not this plugin's: home, notes, nvidia.com, shm",
    ]
    assert not (root / "nvidia.com" / "gpu").exists()
    assert (outside / "pipe").is_dir()


@pytest.mark.parametrize(("call", "stays", "why"), [
    ("rmdir", "nvidia.com", OSError(errno.EBUSY, "Device or resource busy")),
    ("rmtree", "nvidia.com/gpu", OSError(errno.EROFS, "Read-only file system", "log")),
])  # fmt: skip
def test_what_cannot_be_removed_is_said_and_the_rest_goes(root, monkeypatch, call, stays, why):
    owner = Path if call == "rmdir" else shutil
    real = getattr(owner, call)

    def refusing(path):
        if path == root / stays:
            raise why
        real(path)

    monkeypatch.setattr(owner, call, refusing)
    done = remove_mps_traces(root)
    assert done.left[0] == f"{root / stays}: {why.strerror}{' (log)' if why.filename else ''}"
    assert done.left[-1] == f"{root}: contains files that are not this plugin's: nvidia.com"
    assert (str(root / "nvidia.com" / "gpu") in done.removed) is (stays == "nvidia.com")
    assert not (root / readiness.FILE).exists()
