import errno
import fcntl
import os
import subprocess
import sys
import time

import pytest

from gpu_plugin.mps.errors import MpsError
from gpu_plugin.mps.readiness import FILE, STALE, StateFile, read

from .conftest import ready

NAME, OTHER = "nvidia.com/gpu", "nvidia.com/gpu.shared"

HOLDER = """
import sys, pathlib
from gpu_plugin.mps.readiness import StateFile
states = StateFile(pathlib.Path(sys.argv[1]))
assert states.lock()
states.up("nvidia.com/gpu", 1, ("GPU-a",), 2)
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def states(tmp_path):
    """The file of a running supervisor."""
    made = StateFile(tmp_path)
    assert made.lock()
    yield made
    made.unlock()


def up(states, resource=NAME, replicas=2, gpus=("GPU-a", "GPU-b")):
    states.up(resource, 7, gpus, replicas)


def test_a_daemon_is_ready_from_up_to_down(tmp_path, states):
    assert "runs no daemon for it" in ready(tmp_path, NAME)
    assert "the same configuration" in ready(tmp_path, NAME).split("; to do: ")[1]
    up(states, OTHER)
    for why in ("it is being started", "it fell over " + "x" * 5000, "short"):
        states.down(NAME, why)
        assert ready(tmp_path, NAME) == f"its MPS daemon is down: {why}"
        up(states)
        assert ready(tmp_path, NAME) == ""
    states.down(NAME)
    assert "runs no daemon for it" in ready(tmp_path, NAME)
    assert ready(tmp_path, OTHER) == ""


def test_counts_outlive_the_daemon(tmp_path, states):
    states.count(NAME, limits_restored=1)
    up(states)
    states.count(NAME, probes_failed=2)
    states.count(NAME, probes_failed=1)
    assert ready(tmp_path, NAME) == ""
    states.down(NAME)
    written = read(tmp_path)
    assert written is not None
    counts = written[NAME].counts
    assert (counts.limits_restored, counts.probes_failed) == (1, 3)


def test_without_a_supervisor_nothing_else_is_believed(tmp_path):
    assert "has not run on this node" in ready(tmp_path, NAME)
    assert str(tmp_path) in ready(tmp_path, NAME)
    assert "the same --mps-root" in ready(tmp_path, NAME).split("; to do: ")[1]
    ended = StateFile(tmp_path)
    assert ended.lock()
    up(ended)
    ended.unlock()
    found, remedy = ready(tmp_path, NAME).split("; to do: ")
    assert found == "its MPS daemon is down: gpu-plugin mps does not run on this node"
    assert "mps.enabled" in remedy
    assert "systemctl start gpu-plugin-mps" in remedy
    assert ended.lock()
    assert "runs no daemon for it" in ready(tmp_path, NAME)  # the state of the former process does not count
    ended.unlock()


def test_a_killed_supervisor_leaves_nothing_ready(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert ready(tmp_path, NAME) == ""
    finally:
        process.kill()
        process.communicate()
    assert "gpu-plugin mps does not run" in ready(tmp_path, NAME)


def test_a_disk_that_refuses_a_write_leaves_no_daemon_wrongly_ready(tmp_path, states, monkeypatch):
    states.down(NAME, "it is being started")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(MpsError, match="No space left on device"):
            up(states)
    assert ready(tmp_path, NAME).endswith("down: it is being started")
    up(states)
    assert ready(tmp_path, NAME) == ""
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", lambda *_: 3)
        with pytest.raises(MpsError, match="No space left on device"):
            up(states)
        states.down(NAME, "it fell over")
    assert "is down" in ready(tmp_path, NAME)
    states.down(NAME, "it fell over again")
    assert ready(tmp_path, NAME) == "its MPS daemon is down: it fell over again"


def test_states_need_no_new_space_on_the_disk(tmp_path, states):
    assert (tmp_path / FILE).stat().st_blocks * 512 >= 64 * 1024


def test_a_part_of_a_longer_state_does_not_stay_after_a_shorter_one(tmp_path, states, monkeypatch):
    up(states)
    os.ftruncate(states._descriptor, 0)  # as on a disk that was full at the start
    write = os.pwrite

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", lambda descriptor, content, offset: write(descriptor, content[:4096], offset))
        with pytest.raises(MpsError):
            up(states, gpus=[f"GPU-{number}" for number in range(1000)])
        assert ready(tmp_path, NAME)
    up(states)
    assert ready(tmp_path, NAME) == ""


def test_a_daemon_that_was_not_seen_to_answer_for_long_is_down(tmp_path, states, monkeypatch):
    up(states)
    clock, said = time.monotonic, set()
    for age in (STALE - 30, STALE + 1, STALE + 3600):
        monkeypatch.setattr(time, "monotonic", lambda age=age: clock() + age)
        said.add(ready(tmp_path, NAME))
    said.remove("")
    (only,) = said  # a text with the age would be logged each second
    found, remedy = only.split("; to do: ")
    assert found == "its MPS daemon is down: gpu-plugin mps has not seen it answer for over 60 s"
    assert "disk" in remedy
    assert "restart" in remedy


def test_other_gpus_or_replicas_than_expected_are_told(tmp_path, states):
    up(states)
    assert ready(tmp_path, NAME, gpus=("GPU-b",), replicas=2) == ""
    assert ready(tmp_path, NAME, gpus=("GPU-a", "GPU-c")).startswith("its MPS daemon does not serve GPU GPU-c (yet)")
    assert "among 2 clients, not 4" in ready(tmp_path, NAME, replicas=4)


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": {"pid": "x"}}', b'{"a\xff": {}}', b"[" * 9000])
def test_content_that_cannot_be_decoded_makes_no_daemon_ready(tmp_path, states, content):
    up(states)
    (tmp_path / FILE).write_bytes(content)
    assert ready(tmp_path, NAME).startswith("its MPS daemon is down")


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_another_kind_of_file_does_not_block_or_count(tmp_path, kind):
    root = tmp_path / "root"
    root.mkdir()
    if kind == "pipe":
        os.mkfifo(root / FILE)
    else:
        (root / FILE).symlink_to(tmp_path / FILE)
        held = StateFile(tmp_path)
        assert held.lock()
        up(held)
        with pytest.raises(MpsError, match=os.strerror(errno.ELOOP)):
            StateFile(root).lock()
        held.unlock()
    assert "its MPS daemon is down" in ready(root, NAME)


def test_one_supervisor_at_a_time_and_a_reader_is_not_one(tmp_path, states, monkeypatch):
    second = StateFile(tmp_path)
    assert not second.lock()
    states.unlock()
    reader = os.open(tmp_path / FILE, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(reader, fcntl.LOCK_UN))
    assert second.lock()
    os.close(reader)
    second.unlock()
    assert states.lock()


def test_a_lock_that_cannot_be_made_is_told(tmp_path):
    with pytest.raises(MpsError, match=f"{os.strerror(errno.ENOENT)}; is --mps-root writable"):
        StateFile(tmp_path / "nowhere").lock()
