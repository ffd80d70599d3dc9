import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_plugin.runtime.regular_file import leftovers, replace_file

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
