import errno
import fcntl
import os
import threading

import pytest

from gpu_plugin.mps.errors import MpsError
from gpu_plugin.mps.pipe import drain_log, lock_holder, prepare


@pytest.fixture
def writer(tmp_path):
    """Make a FIFO in place of the lock file. Return an event that is set when a process opens the FIFO to read."""
    opened = threading.Event()
    fifo = tmp_path / "control_lock"

    def write():
        os.close(os.open(fifo, os.O_WRONLY))
        opened.set()

    os.mkfifo(fifo)
    thread = threading.Thread(target=write)
    thread.start()
    yield opened
    os.close(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))
    thread.join()


def test_another_kind_of_file_in_place_of_the_lock_is_not_opened(tmp_path, writer):
    assert lock_holder(tmp_path) == 0
    assert not writer.wait(0.2)


@pytest.mark.parametrize("kind", ["missing", "directory", "link"])
def test_a_directory_without_a_lock_file_has_no_daemon(tmp_path, kind):
    if kind == "directory":
        (tmp_path / "control_lock").mkdir()
    elif kind == "link":
        (tmp_path / "control_lock").symlink_to(tmp_path)
    assert lock_holder(tmp_path) == 0


def test_what_a_client_has_written_to_the_log_is_read_and_other_files_keep_it(tmp_path):
    os.mkfifo(tmp_path / "log")
    descriptor = os.open(tmp_path / "log", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, 4096)
        os.write(descriptor, b"\xff" * 4096)
        with pytest.raises(BlockingIOError):
            os.write(descriptor, b"\xff")
        drain_log(tmp_path)
        assert os.write(descriptor, b"\xff" * 4096) == 4096
    finally:
        os.close(descriptor)
    (tmp_path / "log").unlink()
    drain_log(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_the_lock_file_is_named_without_wrong_advice(tmp_path, monkeypatch):
    real = os.open

    def full(path, flags, *arguments, **options):
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, flags, *arguments, **options)

    (tmp_path / "log").touch()
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(MpsError, match=r"control_lock: No space left on device$"):
        prepare(tmp_path)


def test_a_file_that_another_process_removes_first_is_no_fault(tmp_path, monkeypatch):
    (tmp_path / "log").touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", lambda _: [".gone", "log"])
        prepare(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["control_lock"]
