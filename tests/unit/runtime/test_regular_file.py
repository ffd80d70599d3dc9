"""Files that others wrote: read with a bound, and never waited for, whatever stands under their names."""

import os
import socket
from pathlib import Path

import pytest

from gpu_plugin.runtime.regular_file import UnfitFileError, open_file, read_file, require_file


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


def test_a_file_that_does_not_tell_its_size_is_read_no_further_than_the_bound():
    """As those of /proc do."""
    assert Path("/proc/self/status").stat().st_size == 0
    with pytest.raises(UnfitFileError, match="is larger than 64 bytes"):
        read_file("/proc/self/status", 64)


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
