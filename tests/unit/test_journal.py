"""The newest word, where a kill cannot unsay it."""

import os
from dataclasses import dataclass

import pytest

from gpu_plugin.journal import MAX_BYTES, Journal


@dataclass(frozen=True)
class Word:
    number: int
    text: str = ""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state" / "health.journal"


@pytest.fixture
def journal(file):
    made: Journal[Word, Word] = Journal(file, Word)
    yield made
    made.close()


def read(file):
    return Journal(file, Word).read()


def test_where_nothing_was_written_there_is_nothing(journal):
    assert journal.read() is None


def test_the_last_word_counts_and_its_owner_alone_may_read_it(journal, file):
    assert journal.append(Word(1))
    assert journal.append(Word(2))
    assert read(file) == Word(2)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_word_cut_short_leaves_the_one_before(journal, file, cut):
    journal.append(Word(1))
    journal.append(Word(2, "long"))
    file.write_bytes(file.read_bytes()[:-cut])
    assert read(file) == (Word(2, "long") if cut == 1 else Word(1))


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"\x00" * 100, b"[" * 100_000, b'{"number": "x"}\n', b'{"number": 1, "text": "\xff"}\n']
)
def test_what_makes_no_sense_is_no_word(file, content):
    file.parent.mkdir()
    file.write_bytes(content)
    assert read(file) is None


def test_a_word_that_is_written_elsewhere_is_taken_out_and_a_newer_one_is_not(journal, file):
    journal.append(Word(1))
    journal.settle(Word(1))
    assert file.read_bytes() == b""
    journal.append(Word(2))
    journal.settle(Word(1))
    assert read(file) == Word(2)
    journal.append(Word(3))
    journal.settle(Word(3))
    assert (read(file), file.stat().st_size) == (None, 0)


@pytest.mark.parametrize("left", ["taken back", "left there"])
def test_a_word_that_the_disk_had_no_room_for_is_no_success_and_swallows_no_other(journal, file, monkeypatch, left):
    written, truncate = os.write, os.ftruncate

    def refuse(descriptor: int, length: int) -> None:
        raise OSError("no such luck")

    journal.append(Word(1))
    for room in (1, 5, 20):
        monkeypatch.setattr(os, "write", lambda to, line, room=room: written(to, line[:room]))
        monkeypatch.setattr(os, "ftruncate", truncate if left == "taken back" else refuse)
        assert not journal.append(Word(2, "which is long"))
        monkeypatch.undo()
        assert read(file) == Word(1)
    assert journal.append(Word(3))
    assert read(file) == Word(3)


def test_what_another_process_left_of_a_word_swallows_no_other(journal, file):
    file.parent.mkdir()
    file.write_bytes(b'{"number": 1}\n{"number": 2, "te')
    assert journal.append(Word(3))
    assert read(file) == Word(3)


def test_it_grows_no_further_than_its_bound(journal, file):
    assert journal.append(Word(1, "x" * (MAX_BYTES - 100)))
    assert not journal.append(Word(2, "x" * 200))
    assert read(file) == Word(1, "x" * (MAX_BYTES - 100))


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
    assert not journal.append(Word(1))
