"""The locks of a node, the messages about their owner, and takeovers."""

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpu_plugin.runtime.control import LOCK
from gpu_plugin.state import node_lock
from gpu_plugin.state.directory import CORRUPT
from gpu_plugin.state.node_lock import NodeLock, Outcome, Owner

HOLDER = """
import sys, pathlib
from gpu_plugin.state.node_lock import NodeLock
held = NodeLock(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), "9.9")
print(held.take() or "ours", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tmp_path(short_path):
    """Sockets lie below it."""
    return short_path


@pytest.fixture
def directory(tmp_path):
    made = tmp_path / "device-plugins"
    made.mkdir()
    return made


@pytest.fixture
def other(tmp_path, directory):
    """Another process with both locks."""
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


def test_the_sockets_of_another_are_asked_once_each(tmp_path, directory, other, monkeypatch):
    lock = NodeLock(tmp_path / "own", directory, "1")
    monkeypatch.chdir(directory)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind("gpu-plugin-gpu-1.sock")
        assert "it has no socket there yet" in lock.take()  # it does not listen yet
        stopped.listen(8)
        for _ in range(20):  # 9 would be the end of its backlog
            assert f": process {os.getpid()}. " in lock.take()
        with socket.socket(socket.AF_UNIX) as kubelet:
            kubelet.setblocking(False)
            kubelet.connect("gpu-plugin-gpu-1.sock")
    lock.release()


def test_a_socket_that_takes_no_connection_now_is_there(tmp_path, directory, other, monkeypatch):
    monkeypatch.chdir(directory)
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as kubelet:
        busy.bind("gpu-plugin-gpu-1.sock")
        busy.listen(0)
        kubelet.connect("gpu-plugin-gpu-1.sock")
        lock = NodeLock(tmp_path / "own", directory, "1")
        assert f"another daemon serves {directory}: a process that accepts no connection now. " in lock.take()
        connection, _ = busy.accept()
        connection.close()
        assert f": process {os.getpid()}. " in lock.take()
        lock.release()


def test_a_process_that_is_killed_leaves_nothing_locked(tmp_path, directory, other):
    lock = NodeLock(tmp_path / "state", directory, "1")
    assert lock.take()
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert lock.take() == ""
    assert json.loads((tmp_path / "state" / LOCK).read_bytes())["pid"] == os.getpid()
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
    (tmp_path / LOCK).unlink()
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
    assert ours.follow() == ""  # without the directory, no daemon can serve there
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


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_what_stands_in_the_lock_s_place_is_set_aside_and_said(tmp_path, directory, caplog, kind, taken):
    path = tmp_path / LOCK
    for end in CORRUPT[:taken]:
        (tmp_path / f"{LOCK}{end}" / "full").mkdir(parents=True)
    {"directory": path.mkdir, "fifo": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("/etc/passwd")}[kind]()
    first, second = (NodeLock(tmp_path, directory, "1") for _ in range(2))
    assert first.take() == ""
    assert "uses the state directory" in second.take()
    assert os.path.lexists(f"{path}{CORRUPT[taken]}")
    assert caplog.text.count(f"not a file of this plugin (kept as {path}{CORRUPT[taken]})") == 1
    first.release()


def test_a_file_that_is_replaced_while_it_is_being_locked_is_no_lock(tmp_path, directory, monkeypatch):
    lock, real = NodeLock(tmp_path, directory, "1"), fcntl.flock

    def replaced(descriptor, how):
        (tmp_path / LOCK).unlink(missing_ok=True)  # as a cleanup may
        (tmp_path / LOCK).touch()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", replaced)
    assert "uses the state directory" in lock.take()
    monkeypatch.undo()
    assert lock.take() == ""
    lock.release()


def test_a_state_directory_renamed_under_us_is_locked_anew_unless_another_has_it(tmp_path, directory, caplog):
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    state = tmp_path / "state"
    ours, theirs = NodeLock(state, directory, "1"), NodeLock(state, elsewhere, "2")
    assert ours.take() == ours.follow() == ""
    state.rename(tmp_path / "away")
    assert ours.follow() == ""
    assert caplog.text.count("was renamed, removed or replaced") == 1
    assert "uses the state directory" in theirs.take()
    state.rename(tmp_path / "away again")
    assert theirs.take() == ""
    assert "version 2" in ours.follow()
    ours.release()
    theirs.release()


def test_locks_can_be_taken_without_a_trace(tmp_path, directory):
    lock = NodeLock(tmp_path / "none", directory, "1")
    assert lock.take(make=False) == ""
    assert not (tmp_path / "none").exists()
    other = NodeLock(tmp_path / "none", directory, "2")
    assert other.take()
    lock.release()
    assert other.take() == ""
    before = (tmp_path / "none" / LOCK).read_bytes()
    assert "version 2" in lock.take(make=False)
    assert (tmp_path / "none" / LOCK).read_bytes() == before
    other.release()


def test_what_cannot_be_locked_is_said_once_and_served_all_the_same(tmp_path, directory, caplog):
    state = tmp_path / "state"
    state.write_text("")
    lock = NodeLock(state, directory, "1")
    assert lock.take() == lock.take() == ""
    assert caplog.text.count("cannot be locked, so a second daemon would not be detected") == 1
    lock.release()


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b'{"pid": "x"}', b'{"pid": 1, "later\xff": 1}', b'{"a":' * 800]
)
def test_an_owner_that_cannot_be_read_is_still_an_owner(tmp_path, directory, other, content):
    (tmp_path / "state" / LOCK).write_bytes(content)
    assert ": an unknown process. " in NodeLock(tmp_path / "state", directory, "1").take()


def test_what_is_let_go_of_while_the_directory_moves_is_free(tmp_path, directory):
    elsewhere, state = tmp_path / "elsewhere", tmp_path / "state"
    elsewhere.mkdir()
    ours = NodeLock(state, directory, "1")
    assert ours.take() == ""
    state.rename(tmp_path / "away")
    assert ours.follow() == ""
    theirs = NodeLock(tmp_path / "away", elsewhere, "2")
    assert theirs.take() == ""
    theirs.release()
    ours.release()


def test_a_file_that_is_gone_is_made_anew_whatever_becomes_of_the_other_directory(tmp_path, directory, caplog):
    state = tmp_path / "state"
    ours = NodeLock(state, directory, "1")
    assert ours.take() == ""
    (state / LOCK).unlink()
    shutil.rmtree(directory)
    assert ours.follow() == ""
    assert ours.has_state
    assert "was renamed" not in caplog.text  # the directory is the same
    assert "uses the state directory" in NodeLock(state, tmp_path / "none", "2").take()
    ours.release()


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_without_a_trace_what_is_no_lock_locks_nobody_out_and_stays(tmp_path, directory, kind):
    path, target = tmp_path / LOCK, tmp_path / "target"
    target.touch()
    {"directory": path.mkdir, "fifo": lambda: os.mkfifo(path), "link": lambda: path.symlink_to(target)}[kind]()
    lock = NodeLock(tmp_path, directory, "1")
    assert lock.take(make=False) == ""
    assert not lock.has_state
    lock.release()
    assert os.path.lexists(path)
    assert not os.path.lexists(f"{path}.corrupt")


def test_without_a_trace_a_free_lock_keeps_its_content(tmp_path, directory):
    (tmp_path / LOCK).write_text("of before")
    lock = NodeLock(tmp_path, directory, "1")
    assert lock.take(make=False) == ""
    assert lock.has_state
    assert (tmp_path / LOCK).read_text() == "of before"
    lock.release()


def test_on_a_full_disk_the_lock_holds_all_the_same(tmp_path, directory, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lock = NodeLock(tmp_path / "state", directory, "1")
    assert lock.take() == ""
    assert lock.has_state
    assert not caplog.records
    assert ": an unknown process. " in NodeLock(tmp_path / "state", directory, "2").take()
    lock.release()


def test_nobody_else_can_read_or_hold_it(tmp_path, directory):
    state, before = tmp_path / "state", os.umask(0)
    try:
        lock = NodeLock(state, directory, "1")
        assert lock.take() == ""
    finally:
        os.umask(before)
    assert state.stat().st_mode & 0o777 == 0o700
    assert (state / LOCK).stat().st_mode & 0o777 == 0o600
    lock.release()


@pytest.mark.parametrize(("pid", "said"), [(None, "process {mine}"), (0, "a process of another container")])
def test_who_serves_is_told_by_sockets_that_answer(tmp_path, directory, other, monkeypatch, pid, said):
    monkeypatch.chdir(directory)
    if pid is not None:  # as the kernel names a process of another container
        monkeypatch.setattr(node_lock, "peer_of", lambda _: (pid, 0))
    lock = NodeLock(tmp_path / "own", directory, "1")
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as server:
        dead.bind("gpu-plugin-dead.sock")
        server.bind("gpu-plugin-gpu-1.sock")
        server.listen()
        assert f"serves {directory}: {said.format(mine=os.getpid())}. " in lock.take()
    lock.release()


def test_an_owner_is_one_sentence():
    assert str(Owner(7, "\x1b[2J")) == r"process 7 on \x1b[2J, version unknown, running since an unknown time"
    assert str(Owner(7)) == "process 7, version unknown, running since an unknown time"
    assert (
        str(Owner(7, "node-1", "1.0", 1.0)) == "process 7 on node-1, version 1.0, running since 1970-01-01 00:00:01 UTC"
    )


@pytest.fixture
def running(tmp_path, directory):
    """The lock of a daemon that serves."""
    lock = NodeLock(tmp_path / "state", directory, "1")
    assert lock.take() == ""
    yield lock
    lock.release()


@pytest.fixture
def new(tmp_path, directory, running):
    """The lock of a daemon that asks for the node of the first."""
    lock = NodeLock(tmp_path / "state", directory, "2")
    assert lock.take()
    assert not running.claimed()
    lock.claim()
    assert running.claimed()
    yield lock
    lock.release()


@pytest.fixture
def handed(running, new):
    """The state directory went from the first daemon to the second."""
    assert running.write_leaving(leaving=True)
    running.hand_over()
    new.wait()


def leaving(tmp_path):
    return json.loads((tmp_path / "state" / LOCK).read_bytes())["leaving"]


def test_a_node_is_handed_over_while_the_former_daemon_serves(tmp_path, running, new, handed):
    assert new.take() == ""
    assert new.former_serves
    assert new.follow() == ""  # the directory is the former daemon's still
    assert not new.claimed()
    assert leaving(tmp_path)  # commands wait for the new daemon
    new.serves()
    assert not leaving(tmp_path)
    assert running.handed_over() is Outcome.NEW_SERVES
    running.release()
    new.wait_directory()
    assert not new.former_serves
    new.unclaim()
    assert "state directory" in running.take()


def test_the_former_daemon_has_the_node_again_if_the_new_one_ends_before_it_serves(running, new, handed):
    new.release()
    assert running.handed_over() is Outcome.NEVER_REGISTERED
    assert running.take() == ""
    assert not running.former_serves


def test_the_former_daemon_learns_that_the_new_one_may_have_registered(running, new, handed):
    new.registers()
    new.release()
    assert running.handed_over() is Outcome.REGISTERED
    assert running.write_leaving(leaving=True)
    running.hand_over()
    assert running.handed_over() is Outcome.NEVER_REGISTERED  # a takeover later


def test_the_former_daemon_learns_that_the_new_one_registered_if_that_ends_as_it_unlocks_the_handover(
    running, new, handed, monkeypatch
):
    new.registers()
    real = os.close

    def killed(descriptor):
        monkeypatch.setattr(os, "close", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", killed)
    with pytest.raises(KeyboardInterrupt):
        new.serves()
    new.release()
    assert running.handed_over() is Outcome.REGISTERED


def test_the_former_daemon_learns_that_the_new_one_before_the_last_new_one_may_have_registered(
    tmp_path, directory, running, new, handed
):
    new.registers()
    new.release()
    third = NodeLock(tmp_path / "state", directory, "3")
    third.claim()
    third.wait()
    third.release()
    assert running.handed_over() is Outcome.REGISTERED


def test_a_lock_that_names_nobody_may_have_been_a_registered_daemon_s(tmp_path, running, new, handed):
    (tmp_path / "state" / LOCK).write_bytes(b"{")
    new.release()
    assert running.handed_over() is Outcome.REGISTERED


def test_a_daemon_that_was_killed_hands_nothing_over(running, new):
    running.release()
    new.wait()
    assert new.take() == ""
    assert not new.former_serves


def test_a_daemon_in_standby_leaves_the_lock_to_the_daemon_that_claims_it(tmp_path, directory, running, new):
    standby = NodeLock(tmp_path / "state", directory, "0")
    assert running.write_leaving(leaving=True)
    running.hand_over()
    standby.wait()
    assert not standby.has_state
    new.wait()
    assert new.has_state


def test_a_third_daemon_takes_over_from_the_former_one_if_the_second_ends_before_it_serves(
    tmp_path, directory, running, new, handed
):
    assert new.take() == ""
    new.release()
    third = NodeLock(tmp_path / "state", directory, "3")
    third.claim()
    third.wait()
    assert third.take() == ""
    assert third.former_serves
    third.serves()
    assert running.handed_over() is Outcome.NEW_SERVES
    running.release()
    third.wait_directory()
    third.release()
    after = NodeLock(tmp_path / "state", directory, "4")
    assert after.take() == ""
    assert not after.former_serves
    after.release()


def test_a_third_daemon_waits_until_the_takeover_before_it_is_over(tmp_path, directory, running, new):
    third = NodeLock(tmp_path / "state", directory, "3")
    claims = threading.Thread(target=third.claim)
    claims.start()
    try:
        assert running.write_leaving(leaving=True)
        running.hand_over()
        new.wait()
        assert new.take() == ""
        new.serves()
        assert running.handed_over() is Outcome.NEW_SERVES
        running.release()
        new.wait_directory()
        assert claims.is_alive()
    finally:
        new.unclaim()
        claims.join(10)
    assert new.claimed()
    third.release()


def test_no_new_daemon_gets_the_handover_while_the_former_one_locks_the_state_directory_again(
    tmp_path, directory, running, new, handed, monkeypatch
):
    new.release()
    real = fcntl.flock
    free = []

    def watched(descriptor, how):
        if Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path / "state" / LOCK:
            with (tmp_path / "state" / node_lock.HANDOVER).open("rb") as handover:
                try:
                    real(handover, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    free.append(False)
                else:
                    free.append(True)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", watched)
    assert running.handed_over() is Outcome.NEVER_REGISTERED
    assert free == [False]


def test_a_daemon_in_standby_leaves_the_lock_to_the_former_daemon_if_the_new_one_ends(
    tmp_path, directory, running, new
):
    standby = NodeLock(tmp_path / "state", directory, "0")
    waits = threading.Thread(target=standby.wait)
    assert running.write_leaving(leaving=True)
    running.hand_over()
    new.wait()
    assert new.take() == ""
    waits.start()
    new.release()
    waits.join(10)
    assert not standby.has_state
    assert running.handed_over() is Outcome.NEVER_REGISTERED
    running.release()
    standby.wait()
    assert standby.take() == ""
    assert not standby.former_serves
    standby.release()


@pytest.mark.parametrize("name", [node_lock.CLAIM, node_lock.HANDOVER])
def test_a_directory_in_the_place_of_a_lock_of_the_takeover_is_set_aside(tmp_path, directory, running, name):
    (tmp_path / "state" / name).mkdir()
    lock = NodeLock(tmp_path / "state", directory, "2")
    lock.claim()
    assert running.claimed()
    assert (tmp_path / "state" / f"{name}{CORRUPT[0]}").is_dir()
    lock.release()


def test_a_daemon_without_locks_in_the_state_directory_waits_for_the_kubelet_s_directory(
    tmp_path, directory, other, monkeypatch
):
    real, state = fcntl.flock, tmp_path / "state"

    def refused(descriptor, how):
        if state in Path(f"/proc/self/fd/{descriptor}").readlink().parents:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", refused)
    lock = NodeLock(state, directory, "1")
    assert "another daemon serves" in lock.take()
    waits = threading.Thread(target=lock.wait, kwargs={"claims": True})
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    other.kill()
    waits.join(10)
    assert not waits.is_alive()
    assert lock.take() == ""
    lock.release()


def test_a_state_directory_renamed_during_a_takeover_leaves_the_former_daemon_serving(
    tmp_path, directory, running, new, handed
):
    (tmp_path / "state").rename(tmp_path / "away")
    assert new.follow() == ""
    assert new.former_serves


def test_a_former_daemon_with_another_kubelet_directory_does_not_serve_the_one_of_the_new_daemon(
    tmp_path, directory, running
):
    other = tmp_path / "other"
    other.mkdir()
    assert running.write_leaving(leaving=True)
    running.hand_over()
    with NodeDirectory(other):
        new = NodeLock(tmp_path / "state", other, "2")
        assert "another daemon serves" in new.take()
        assert not new.former_serves
        new.release()


class NodeDirectory:
    """A kubelet's directory that a daemon with another state directory has locked."""

    def __init__(self, path):
        self._lock = NodeLock(path / "state", path, "3")

    def __enter__(self):
        assert self._lock.take() == ""

    def __exit__(self, *_):
        self._lock.release()


def test_every_claim_changes_the_state_directory_which_the_running_daemon_watches(tmp_path, directory, running):
    for _ in range(2):
        os.utime(tmp_path / "state", (0, 0))
        lock = NodeLock(tmp_path / "state", directory, "2")
        lock.claim()
        lock.release()
        assert (tmp_path / "state").stat().st_mtime > 0
