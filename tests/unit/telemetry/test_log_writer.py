"""Writes to the log never wait for its reader."""

import contextlib
import errno
import os
import threading

import pytest

from gpu_plugin.telemetry.log_writer import LogWriter, to_descriptor


class Reader:
    """Accepts lines while `open` is set. `full` makes each write fail like on a full disk."""

    def __init__(self):
        self.lines: list[bytes] = []
        self.open = threading.Event()
        self.began = threading.Event()
        self.full = False

    def write(self, content):
        self.began.set()
        assert self.open.wait(5)
        if self.full:
            raise OSError(28, "No space left on device")
        self.lines.append(content)


@pytest.fixture
def reader():
    made = Reader()
    yield made
    made.open.set()


def test_lines_come_in_order_and_all_of_them(reader):
    reader.open.set()
    writer = LogWriter(reader.write, str)
    for number in range(100):
        writer.put(f"{number}")
    assert writer.flush(5)
    assert reader.lines == [f"{number}\n".encode() for number in range(100)]
    assert writer.dropped == 0


def test_what_nobody_takes_is_dropped_beyond_the_bound_counted_and_said_once_it_is_taken_again(reader):
    writer = LogWriter(reader.write, "{} dropped".format, limit=100)
    writer.put("x" * 9)
    assert reader.began.wait(5)  # the reader has this line, and the queue is empty
    for _ in range(30):
        writer.put("y" * 9)  # ten of them fit
    assert writer.dropped == 20
    assert not writer.flush(0.01)
    reader.open.set()
    assert writer.flush(5)
    assert reader.lines == [b"x" * 9 + b"\n", b"20 dropped\n", *[b"y" * 9 + b"\n"] * 10]
    writer.put("z")
    assert writer.flush(5)
    assert reader.lines[-1] == b"z\n"


def test_a_full_disk_costs_the_lines_and_nothing_else(reader):
    reader.full = True
    reader.open.set()
    writer = LogWriter(reader.write, "{} dropped".format)
    writer.put("a")
    writer.put("b")
    assert writer.flush(5)
    assert (reader.lines, writer.dropped) == ([], 2)
    reader.full = False
    writer.put("c")
    assert writer.flush(5)
    assert reader.lines == [b"c\n", b"2 dropped\n"]


def test_a_line_that_no_encoding_has_is_written_all_the_same(reader):
    reader.open.set()
    writer = LogWriter(reader.write, str)
    writer.put("\ud800")
    assert writer.flush(5)
    assert reader.lines == [b"\\ud800\n"]


def test_a_descriptor_is_written_to_until_all_is_there_also_where_it_does_not_block():
    source, target = os.pipe()
    os.set_blocking(target, False)
    content = bytes(range(256)) * 2000  # 500 KiB, where a pipe holds 64
    thread = threading.Thread(target=to_descriptor(target), args=(content,))
    thread.start()
    got = b""
    while len(got) < len(content):
        got += os.read(source, 65536)
    thread.join(5)
    os.close(source)
    assert got == content
    with pytest.raises(BrokenPipeError):
        to_descriptor(target)(b"x")
    os.close(target)


@pytest.mark.parametrize("room", range(8))
def test_what_follows_a_line_that_a_full_disk_cut_is_a_line_of_its_own(tmp_path, monkeypatch, room):
    real, left = os.write, [room]

    def write(descriptor, content):
        taken = min(left[0], len(content))
        left[0] -= taken
        if content and not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content[:taken])

    file = tmp_path / "log"
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    monkeypatch.setattr(os, "write", write)
    put = to_descriptor(descriptor)
    for more in (0, 1, 100):
        left[0] += more
        with contextlib.suppress(OSError):
            put(b"whole\n" if more == 100 else b"lost!\n")
    put(b"next\n")
    os.close(descriptor)
    assert file.read_bytes().splitlines()[-2:] == [b"whole", b"next"]
