"""The lock of a node: who has it, who is said to have it, and what it is worth where it cannot be had."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from gpu_plugin.node_lock import FILE, NodeLock, Owner

HOLDER = """
import sys, pathlib
from gpu_plugin.node_lock import NodeLock
held = NodeLock(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), "9.9")
print(held.take() or "ours", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path):
    made = tmp_path / "device-plugins"
    made.mkdir()
    return made


@pytest.fixture
def other(tmp_path, directory):
    """Another process that has both locks."""
    arguments = [sys.executable, "-c", HOLDER, str(tmp_path / "state"), str(directory)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ours\n"
        yield process
        process.kill()


def test_the_second_is_told_who_has_the_state_directory_and_what_to_do(tmp_path, directory, other):
    why = NodeLock(tmp_path / "state", directory, "1").take()
    assert (
        f"the state directory {tmp_path / 'state'}: process {other.pid} on {socket.gethostname()}, version 9.9" in why
    )
    assert "--state-dir" in why


def test_a_daemon_with_another_state_directory_waits_for_the_device_plugin_directory(
    tmp_path, directory, other, monkeypatch
):
    lock = NodeLock(tmp_path / "own", directory, "1")
    assert lock.take().startswith(f"another daemon serves {directory}: it has no socket there yet. ")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(directory)  # a path short enough for a socket's address
        server.bind("gpu-plugin-gpu-1.sock")
        server.listen()
        assert f": process {os.getpid()}. " in lock.take()
    lock.release()


def test_a_process_that_is_killed_leaves_nothing_locked(tmp_path, directory, other):
    lock = NodeLock(tmp_path / "state", directory, "1")
    assert lock.take()
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert lock.take() == ""
    assert json.loads((tmp_path / "state" / FILE).read_bytes())["pid"] == os.getpid()
    lock.release()


def test_it_is_let_go_of_and_taken_again(tmp_path, directory):
    first, second = (NodeLock(tmp_path, directory, "1") for _ in range(2))
    assert first.take() == ""
    assert first.take() == ""  # ours already
    assert second.take()
    first.release()
    assert second.take() == ""
    second.release()


def test_a_file_that_was_removed_locks_nobody_out_and_nobody_in(tmp_path, directory):
    first, second, third = (NodeLock(tmp_path, directory, "1") for _ in range(3))
    assert first.take() == ""
    (tmp_path / FILE).unlink()
    assert "serves" in second.take()  # the directory of sockets is locked still
    first.release()
    assert second.take() == ""
    assert "state directory" in third.take()
    second.release()


def test_a_directory_made_anew_is_locked_anew_unless_another_has_it(tmp_path, directory):
    ours, theirs = NodeLock(tmp_path / "a", directory, "1"), NodeLock(tmp_path / "b", directory, "1")
    assert ours.take() == ""
    assert ours.follow() == ""
    shutil.rmtree(directory)
    assert ours.follow() == ""  # gone: nobody can serve there
    directory.mkdir()
    assert ours.follow() == ""
    assert "serves" in theirs.take()
    shutil.rmtree(directory)
    directory.mkdir()
    assert theirs.take() == ""
    assert "serves" in ours.follow()
    ours.release()
    theirs.release()


def test_a_directory_that_comes_later_is_locked_then(tmp_path):
    later = tmp_path / "later"
    lock = NodeLock(tmp_path / "a", later, "1")
    assert lock.take() == ""
    later.mkdir()
    assert lock.follow() == ""
    assert "serves" in NodeLock(tmp_path / "b", later, "1").take()
    lock.release()


@pytest.mark.parametrize("kind", ["directory", "fifo", "link", "state directory is a file"])
def test_what_cannot_be_locked_is_said_once_and_served_all_the_same(tmp_path, directory, caplog, kind):
    state = tmp_path / "state"
    if kind == "state directory is a file":
        state.write_text("")
    else:
        state.mkdir()
        path = state / FILE
        {"directory": path.mkdir, "fifo": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("/etc/passwd")}[
            kind
        ]()
    lock = NodeLock(state, directory, "1")
    assert lock.take() == lock.take() == ""
    assert caplog.text.count("cannot be locked, so a second daemon would not be noticed") == 1
    lock.release()


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"pid": "x"}'])
def test_an_owner_that_cannot_be_read_is_still_an_owner(tmp_path, directory, other, content):
    (tmp_path / "state" / FILE).write_bytes(content)
    assert ": it has not said who it is. " in NodeLock(tmp_path / "state", directory, "1").take()


def test_an_owner_is_one_sentence():
    assert str(Owner(7)) == "process 7, version unknown, running since a time unknown"
    assert (
        str(Owner(7, "node-1", "1.0", 1.0)) == "process 7 on node-1, version 1.0, running since 1970-01-01 00:00:01 UTC"
    )
