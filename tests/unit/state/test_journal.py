"""The newest word, where a kill cannot unsay it and a full disk does not refuse it."""

import errno
import logging
import os
from dataclasses import dataclass

import pytest

from gpu_plugin.state.journal import MAX_BYTES, MIN_ALLOCATION, Journal


@dataclass(frozen=True)
class Word:
    number: int
    text: str = ""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state" / "health.journal"


@pytest.fixture
def journal(file):
    made: Journal[Word] = Journal(file, Word)
    yield made
    made._close()


def read(file):
    return Journal(file, Word).read()


def full(monkeypatch):
    """From now on the disk gives no file more room than it has."""
    write = os.pwrite

    def allocate(descriptor, offset, length):
        if offset + length > os.fstat(descriptor).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")

    def within(descriptor, content, offset):
        room = os.fstat(descriptor).st_size - offset
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content[:room], offset)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(os, "pwrite", within)


def test_where_nothing_was_written_there_is_nothing(journal):
    assert journal.read() is None
    assert journal.reserve()
    assert journal.read() is None


def test_the_last_word_counts_and_its_owner_alone_may_read_it(journal, file):
    assert journal.append(Word(1))
    assert journal.append(Word(2))
    assert read(file) == Word(2)
    assert file.stat().st_mode & 0o777 == 0o600


def test_its_room_is_there_before_anything_is_and_is_not_given_back(journal, file):
    assert journal.reserve()
    for number in range(200):
        assert journal.append(Word(number, "x" * (number % 7) * 50))
        journal.settle(Word(number) if number % 3 else Word(number, "x" * (number % 7) * 50))
        assert read(file) == Word(number, "x" * (number % 7) * 50)
        assert (file.stat().st_size, file.stat().st_blocks * 512 >= MIN_ALLOCATION) == (MIN_ALLOCATION, True)


def test_a_full_disk_takes_as_many_words_as_there_are(journal, file, monkeypatch):
    journal.reserve()
    full(monkeypatch)
    for number in range(200):
        assert journal.append(Word(number, "x" * (MIN_ALLOCATION // 2 - 100 - number % 3)))
        assert read(file) == Word(number, "x" * (MIN_ALLOCATION // 2 - 100 - number % 3))
    again: Journal[Word] = Journal(file, Word)  # the next process
    assert again.append(Word(200))
    assert read(file) == Word(200)
    again._close()


def test_a_word_that_a_full_disk_has_no_room_for_is_no_success_and_costs_no_other(journal, file, monkeypatch):
    journal.reserve()
    for room in range(3):
        assert journal.append(Word(1, "x" * 100 * room))
        with monkeypatch.context() as disk:
            full(disk)
            assert not journal.append(Word(2, "x" * MIN_ALLOCATION))
        assert read(file) == Word(1, "x" * 100 * room)
    assert journal.append(Word(3, "x" * MIN_ALLOCATION))
    assert read(file) == Word(3, "x" * MIN_ALLOCATION)
    assert file.stat().st_size >= 4 * MIN_ALLOCATION, "the next may be longer"


def test_where_no_room_can_be_allocated_it_is_said_and_words_are_taken_as_long_as_they_can_be(
    journal, file, monkeypatch, caplog
):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert not journal.reserve()
    assert "no space could be allocated: Operation not supported" in caplog.text
    for number in range(5):
        assert journal.append(Word(number))
        assert read(file) == Word(number)


def test_a_write_that_ends_anywhere_leaves_this_word_or_the_one_before(journal, file, monkeypatch):
    write = os.pwrite
    for end in range(60):
        assert journal.append(Word(1, "before"))
        monkeypatch.setattr(os, "pwrite", lambda to, line, at, end=end: write(to, line[:end], at))
        journal.append(Word(2))
        monkeypatch.undo()
        assert read(file) in (Word(1, "before"), Word(2))
        again: Journal[Word] = Journal(file, Word)
        assert again.append(Word(3))
        assert read(file) == Word(3)
        again._close()
        journal._close()


def told(whole):
    """Where there is anything, and a little room beside it: what lies between two lines is thousands of zeros."""
    return [at for at in range(len(whole)) if whole[max(0, at - 2) : at + 3].strip(b"\0")]


@pytest.mark.parametrize("spoilt", [1, 2])
def test_every_byte_that_is_not_what_was_written_costs_one_word_at_most_and_is_said(journal, file, caplog, spoilt):
    words = {None, Word(1), Word(2)} if spoilt == 2 else {Word(1), Word(2)}
    journal.append(Word(1))
    journal.append(Word(2))
    whole = file.read_bytes()
    for at in told(whole):
        caplog.clear()
        damaged = bytearray(whole)
        damaged[at : at + spoilt] = b"\xff" * spoilt
        file.write_bytes(damaged)
        assert read(file) in words
        assert "bytes cannot be read and are left out" in caplog.text
        again: Journal[Word] = Journal(file, Word)
        assert again.append(Word(3))
        assert read(file) == Word(3)
        again._close()


def test_cut_at_every_length_it_has_this_word_or_the_one_before_and_takes_the_next(journal, file):
    journal.append(Word(1))
    journal.append(Word(2))
    whole = file.read_bytes()
    ends = [place for place in range(1, len(whole)) if whole[place - 1 : place] == b"}"]
    for length in (0, *(at + 1 for at in told(whole))):
        file.write_bytes(whole[:length])
        assert read(file) == (Word(2) if length >= ends[1] else Word(1) if length >= ends[0] else None)
        again: Journal[Word] = Journal(file, Word)
        assert again.append(Word(3))
        assert read(file) == Word(3)
        again._close()


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"\x00" * 100, b"[" * 100_000, b'{"numbers": 1}\n', b'1 00000000 {"number": 1}\n']
)
def test_what_makes_no_sense_is_no_word_and_is_said(file, content, caplog):
    caplog.set_level(logging.WARNING)
    file.parent.mkdir()
    file.write_bytes(content)
    assert read(file) is None
    assert bool(caplog.records) is bool(content.strip(b"\n\0"))


def test_a_word_that_is_written_elsewhere_may_be_written_over_and_a_newer_one_may_not(journal, file):
    assert journal.append(Word(1, "x" * (MAX_BYTES - 100)))
    journal.settle(Word(7))
    assert not journal.append(Word(2, "x" * 200)), "it grows no further than its bound"
    assert read(file) == Word(1, "x" * (MAX_BYTES - 100))
    journal.settle(Word(1, "x" * (MAX_BYTES - 100)))
    assert journal.append(Word(2, "x" * 200))
    assert read(file) == Word(2, "x" * 200)
    assert file.stat().st_size <= MAX_BYTES


def test_a_directory_that_was_swept_away_is_made_again(journal, file):
    journal.append(Word(1))
    file.unlink()
    file.parent.rmdir()
    assert journal.append(Word(2))
    assert read(file) == Word(2)


@pytest.mark.parametrize("made", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_what_is_no_regular_file_is_neither_read_nor_written(journal, file, made):
    file.parent.mkdir()
    made(file)
    assert journal.read() is None
    assert not journal.reserve()
    assert not journal.append(Word(1))


def test_a_link_to_what_a_journal_may_hold_is_not_followed(journal, file):
    assert journal.append(Word(1))
    file.rename(file.with_name("away"))
    file.symlink_to("away")
    assert journal.read() is None


@pytest.mark.parametrize("how", ["renamed", "directory renamed", "removed", "replaced", "cut"])
def test_a_file_that_went_is_noticed_and_the_next_word_is_where_a_restart_looks(journal, file, tmp_path, how):
    assert not journal.in_place  # nothing was written
    assert journal.append(Word(1))
    assert journal.in_place
    if how == "directory renamed":
        file.parent.rename(tmp_path / "away")
    elif how == "replaced":
        file.rename(file.with_name("away"))
        file.write_text("")
    elif how == "cut":
        os.truncate(file, 3)
    else:
        file.unlink() if how == "removed" else file.rename(file.with_name("away"))
    assert not journal.in_place
    assert journal.append(Word(2))
    assert journal.in_place
    assert read(file) == Word(2)


def test_a_content_that_grows_leaves_nothing_that_looks_damaged(journal, file, caplog):
    for number, length in enumerate((1700, 5000, 8300, 11_600, 13_300)):
        assert journal.append(Word(number, "x" * length))
        assert read(file).number == number
    assert not caplog.records
