import errno
import fcntl
import os
import subprocess
import sys
import time

import pytest

from gpu_plugin.mps.errors import MpsError
from gpu_plugin.mps.readiness import STALE, Mark, ReadyMark, lock, ready

NAME = "nvidia.com/gpu"

HOLDER = """
import sys, pathlib
from gpu_plugin.mps.readiness import Mark, ReadyMark, lock
root = pathlib.Path(sys.argv[1])
held = lock(root / ".supervisor")
ReadyMark(root / "nvidia.com/gpu").up(Mark(pid=1, since=0.0, replicas=2, gpus=("GPU-a",), confirmed=float(sys.argv[2])))
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / NAME).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def supervisor(root):
    """The lock that a running supervisor holds."""
    descriptor = lock(root / ".supervisor")
    assert descriptor is not None
    yield
    os.close(descriptor)


def mark(confirmed=None, replicas=2, gpus=("GPU-a", "GPU-b")):
    return Mark(
        pid=7, since=1.0, replicas=replicas, gpus=gpus, confirmed=time.monotonic() if confirmed is None else confirmed
    )


@pytest.fixture
def made(root):
    made = ReadyMark(root / NAME)
    yield made
    made.down()


def test_a_daemon_is_ready_from_up_to_down(root, supervisor, made):
    assert "runs no daemon for it" in ready(root, NAME)
    assert "the same configuration" in ready(root, NAME).split("; to do: ")[1]
    made.down("it is being started")
    assert ready(root, NAME) == "its MPS daemon is down: it is being started"
    made.up(mark())
    assert ready(root, NAME) == ""
    made.up(mark())
    assert ready(root, NAME) == ""
    made.down("it fell over")
    assert ready(root, NAME) == "its MPS daemon is down: it fell over"
    made.up(mark())
    assert ready(root, NAME) == ""
    made.down()
    assert not list((root / NAME).iterdir())


def test_without_a_supervisor_nothing_else_is_believed(root, made):
    made.down("it fell over")
    assert "has not run on this node" in ready(root, NAME)
    assert str(root) in ready(root, NAME)
    assert "the same --mps-root" in ready(root, NAME).split("; to do: ")[1]
    (root / ".supervisor").touch()
    found, remedy = ready(root, NAME).split("; to do: ")
    assert found == "its MPS daemon is down: gpu-plugin mps does not run on this node"
    assert "mps.enabled" in remedy
    assert "systemctl start gpu-plugin-mps" in remedy


def test_a_killed_supervisor_leaves_nothing_ready(root):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root), str(time.monotonic())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert ready(root, NAME) == ""
    finally:
        process.kill()
        process.communicate()
    assert (root / NAME / ".ready").exists()
    assert "gpu-plugin mps does not run" in ready(root, NAME)


def test_a_mark_that_cannot_be_written_leaves_the_reason(root, supervisor, made, monkeypatch):
    made.down("it is being started")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(MpsError, match="No space left on device"):
            made.up(mark())
    assert ready(root, NAME).endswith("down: it is being started")
    made.up(mark())
    assert ready(root, NAME) == ""


def test_a_mark_that_nobody_confirms_counts_for_nothing(root, supervisor, made):
    made.up(mark(confirmed=time.monotonic() - STALE + 30))
    assert ready(root, NAME) == ""
    said = set()
    for age in (1, 2, 3600):
        made.up(mark(confirmed=time.monotonic() - STALE - age))
        said.add(ready(root, NAME))
    (only,) = said  # another would be news, and a log line, each second
    found, remedy = only.split("; to do: ")
    assert found == "its MPS daemon is down: gpu-plugin mps has not seen it answer for over 60 s"
    assert "disk" in remedy
    assert "restart" in remedy


def test_other_gpus_or_replicas_than_expected_are_told(root, supervisor, made):
    made.up(mark())
    assert ready(root, NAME, gpus=("GPU-b",), replicas=2) == ""
    assert ready(root, NAME, gpus=("GPU-a", "GPU-c")).startswith("its MPS daemon does not serve GPU GPU-c (yet)")
    assert "among 2 clients, not 4" in ready(root, NAME, replicas=4)


def test_a_shorter_mark_replaces_a_longer_one_whole(root, supervisor, made):
    made.up(mark(gpus=tuple(f"GPU-{n}" for n in range(16))))
    made.up(mark(gpus=("GPU-a",)))
    assert ready(root, NAME, gpus=("GPU-a",)) == ""
    assert "GPU-15" in ready(root, NAME, gpus=("GPU-15",))


def test_a_reader_in_the_way_does_not_keep_a_daemon_from_being_ready(root, supervisor, made, monkeypatch):
    (root / NAME / ".ready").touch()
    descriptor = os.open(root / NAME / ".ready", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with pytest.raises(MpsError, match="another process holds"):
            made.up(mark())
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(descriptor, fcntl.LOCK_UN))
        made.up(mark())
    finally:
        os.close(descriptor)
    assert ready(root, NAME) == ""


@pytest.mark.parametrize("content", [b"", b"{", b'{"pid": "x"}', b'{"pid": 1, "gpus": ["GPU-\xff"]}', b"[" * 9000])
def test_a_mark_that_says_nothing_is_not_ready(root, supervisor, made, content):
    made.up(mark())
    (root / NAME / ".ready").write_bytes(content)
    assert ready(root, NAME).startswith("its MPS daemon is down")


def test_a_pipe_or_a_link_in_the_place_of_a_mark_holds_nobody_up(root, supervisor):
    os.mkfifo(root / NAME / ".ready")
    os.mkfifo(root / NAME / ".down")
    assert "runs no daemon for it" in ready(root, NAME)
    (root / NAME / ".ready").unlink()
    (root / NAME / ".ready").symlink_to("/etc/hostname")
    assert "runs no daemon for it" in ready(root, NAME)
    other = "nvidia.com/gpu.shared"
    (root / other).mkdir()
    (root / NAME / ".ready").unlink()
    (root / NAME / ".ready").symlink_to(root / other / ".ready")
    held = ReadyMark(root / other)
    held.up(mark())
    assert ready(root, other) == ""
    assert "runs no daemon for it" in ready(root, NAME)
    held.down()


def test_one_lock_at_a_time(tmp_path):
    first = lock(tmp_path / "lock")
    assert first is not None
    assert lock(tmp_path / "lock") is None
    os.close(first)
    second = lock(tmp_path / "lock")
    assert second is not None
    os.close(second)


def test_a_lock_that_cannot_be_made_is_told(tmp_path):
    with pytest.raises(MpsError, match=os.strerror(errno.ENOENT)):
        lock(tmp_path / "nowhere" / "lock")
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(MpsError, match=os.strerror(errno.ELOOP)):
        lock(tmp_path / "link")
    with pytest.raises(MpsError, match="writable"):
        ReadyMark(tmp_path / "nowhere").up(mark())
