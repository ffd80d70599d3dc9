"""Files of other programs, read with a bound and without waiting, and our files, replaced as a whole."""

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_plugin.runtime.regular_file import UnfitFileError, leftovers, open_file, read_file, replace_file, require_file


def listening(path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


UNFIT = {
    "a directory": os.mkdir,
    "a named pipe": os.mkfifo,
    "a socket": listening,
    "not a regular file": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_is_no_regular_file_is_told_as_what_it_is(short_path, what):
    path = short_path / "file"
    UNFIT[what](path)
    for read in (open_file, lambda path: read_file(path, 10), lambda path: require_file(path, 10)):
        with pytest.raises(UnfitFileError) as refused:
            read(path)
        assert refused.value.strerror == f"is {what}"


def test_a_link_is_followed_unless_it_must_be_none(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "link", 10) == b"content"
    with pytest.raises(UnfitFileError) as refused:
        read_file(tmp_path / "link", 10, links=False)
    assert refused.value.strerror == "is a symbolic link"


def test_a_device_without_a_driver_is_no_socket(monkeypatch):
    def refused(path, _):
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(UnfitFileError) as told:
        open_file("/dev/zero")
    assert told.value.strerror == "is not a regular file"


@pytest.mark.parametrize("links", [True, False])
def test_below_links_that_go_in_circles_there_is_no_link_to_complain_of(tmp_path, links):
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    with pytest.raises(OSError, match="Too many levels of symbolic links") as refused:
        open_file(tmp_path / "one" / "file", links=links)
    assert not isinstance(refused.value, UnfitFileError)


def test_dev_null_is_an_empty_file_where_it_will_do():
    with open_file("/dev/null", null=True) as stream:
        assert stream.read() == b""
    with pytest.raises(UnfitFileError):
        open_file("/dev/null")
    with pytest.raises(UnfitFileError):
        open_file("/dev/zero", null=True)


def test_the_bound_is_exact(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10)
    assert read_file(file, 10) == b"x" * 10
    require_file(file, 10)
    for read in (read_file, require_file):
        with pytest.raises(UnfitFileError, match="is larger than 9 bytes"):
            read(file, 9)


def test_what_a_file_holds_counts_and_not_the_size_that_the_kernel_tells():
    """Those of /proc are of no size, those of /sys of a page."""
    assert Path("/proc/self/status").stat().st_size == 0
    with pytest.raises(UnfitFileError, match="is larger than 64 bytes"):
        read_file("/proc/self/status", 64)
    assert Path("/sys/devices/system/cpu/online").stat().st_size > 64
    assert read_file("/sys/devices/system/cpu/online", 64)


def test_what_is_not_there_is_said_by_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", 10)
    with pytest.raises(FileNotFoundError):
        require_file(tmp_path / "none", 10)


def test_what_is_refused_leaves_no_descriptor_open(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"x" * 10)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "file"):
        with pytest.raises(UnfitFileError):
            read_file(path, 1)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


NAME = "vendor.example.com-gpu.json"


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_the_mode_is_the_one_asked_for_whatever_the_umask_is(tmp_path, umask):
    before = os.umask(umask)
    try:
        replace_file(tmp_path / NAME, b"one", 0o644)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o644


def test_whoever_has_the_old_file_open_reads_all_of_it_and_nothing_lies_beside(tmp_path):
    replace_file(tmp_path / NAME, b"one" * 1000, 0o644)
    with (tmp_path / NAME).open("rb") as reader:
        replace_file(tmp_path / NAME, b"two", 0o644)
        assert reader.read() == b"one" * 1000
    assert (tmp_path / NAME).read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("call", ["fchmod", "fsync"])
def test_a_failure_midway_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, call):
    replace_file(tmp_path / NAME, b"one", 0o644)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / NAME, b"two", 0o644, durable=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {NAME: b"one"}


def test_what_a_killed_process_leaves_is_no_specification_to_runtimes_and_is_found(tmp_path):
    program = (
        "import os, pathlib, signal, sys; from gpu_plugin.runtime import regular_file\n"
        "regular_file.os.fchmod = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "regular_file.replace_file(pathlib.Path(sys.argv[1]), b'{', 0o644)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / NAME)], check=False, cwd=Path.cwd())
    assert done.returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    assert left.suffix not in {".json", ".yaml"}
    assert list(leftovers(tmp_path, ["other.json", NAME])) == [left]
    assert list(leftovers(tmp_path, ["other.json"])) == []


@pytest.mark.parametrize(
    "name", [NAME, f".{NAME}", f".{NAME}.abcdefg", f".{NAME}.abcdefghi", f".{NAME}.abcdefg!", f".x{NAME}.abcdefgh", "x"]
)
def test_nothing_else_is_taken_for_a_leftover(tmp_path, name):
    (tmp_path / name).write_text("")
    (tmp_path / f".{NAME}.abcdefgh").mkdir()
    (tmp_path / f".{NAME}.abcdefg0").symlink_to("x")
    assert list(leftovers(tmp_path, [NAME])) == []
