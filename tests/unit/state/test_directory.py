import json
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_plugin.state.directory import MAX_BYTES, StateDirectory

NAME = "labels.json"


@dataclass(frozen=True)
class Entry:
    uuid: str
    since: float
    detail: str | None = None


@dataclass(frozen=True)
class Memory:
    boot_id: str
    entries: tuple[Entry, ...] = ()


CONTENT = Memory("boot", (Entry("GPU-1", 1.5, "Xid 79"), Entry("GPU-2", 0.0)))


@pytest.fixture
def state(tmp_path):
    return StateDirectory(tmp_path / "state")


@pytest.fixture
def refusing(tmp_path):
    """A directory that cannot be made for as long as a file is in its way, which modes do not do to root."""
    (tmp_path / "file").write_text("in the way")
    return StateDirectory(tmp_path / "file" / "state")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def levels(caplog):
    return [record.levelno for record in caplog.records]


def test_it_is_json_that_people_can_read(state):
    state.write(NAME, CONTENT)
    text = (state.path / NAME).read_text()
    assert json.loads(text)["entries"][0] == {"uuid": "GPU-1", "since": 1.5, "detail": "Xid 79"}
    assert text.endswith("\n")
    assert len(text.splitlines()) > 5


text = st.text(st.characters(exclude_categories=["Cs"]))
entries = st.builds(Entry, text, st.floats(allow_nan=False, allow_infinity=False), st.none() | text)


@given(st.builds(Memory, text, st.lists(entries, max_size=4).map(tuple)))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_content_makes_the_round_trip(state, content):
    assert state.write(NAME, content)
    assert state.read(NAME, Memory) == content


def test_the_file_is_its_owners_alone_whatever_the_umask_is(state):
    before = os.umask(0)
    try:
        state.write(NAME, CONTENT)
        assert mode(state.path / NAME) == 0o600
        assert mode(state.path) == 0o700
        os.umask(0o777)
        (state.path / NAME).chmod(0o644)
        state.write(NAME, CONTENT)
        assert mode(state.path / NAME) == 0o600
    finally:
        os.umask(before)


def test_a_file_is_replaced_whole(state):
    state.write(NAME, Memory("long" * 1000))
    with (state.path / NAME).open("rb") as reader:  # before the write
        state.write(NAME, Memory("short"))
        assert reader.read().startswith(b'{\n "boot_id": "longlong')
    assert state.read(NAME, Memory) == Memory("short")
    assert [path.name for path in state.path.iterdir()] == [NAME]


@pytest.mark.parametrize("step", ["fsync", "fchmod"])
def test_a_write_that_fails_midway_leaves_the_old_file_and_no_other(state, monkeypatch, caplog, step):
    state.write(NAME, Memory("old"))

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    assert state.write(NAME, Memory("new")) is False
    monkeypatch.undo()
    assert state.read(NAME, Memory) == Memory("old")
    assert [path.name for path in state.path.iterdir()] == [NAME]
    assert "No space left on device" in caplog.text


def test_a_leftover_that_cannot_be_removed_is_no_failure_of_its_own(state, monkeypatch, caplog):
    def refuse(*arguments, **more):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert state.write(NAME, CONTENT) is False
    assert levels(caplog) == [logging.ERROR]


def test_where_there_is_nothing_there_is_nothing_to_say(state, caplog):
    assert state.read(NAME, Memory) is None
    assert caplog.records == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b'{"boot_id": "cut off',
        b"[]",
        b"null",
        b'{"boot_id": 7}',
        b'{"entries": []}',
        b'{"boot_id": "b", "entries": [{"uuid": "GPU-1"}]}',
        b'{"boot_id": "b", "later\xff": 1}',
        b'{"boot_id": "b", "later": ' + b"[" * 100_000,
    ],
)
def test_a_file_that_cannot_be_read_is_forgotten_and_said_once(state, caplog, content):
    state.path.mkdir()
    (state.path / NAME).write_bytes(content)
    assert state.read(NAME, Memory) is None
    assert state.read(NAME, Memory) is None
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    aside = state.path / f"{NAME}.corrupt"
    assert f"{state.path / NAME} cannot be read, so its content is lost (kept as {aside})" in record.getMessage()
    assert aside.read_bytes() == content


def directory(path):
    (path / "inside").mkdir(parents=True)


def link(path):
    elsewhere = path.parent / "elsewhere"
    elsewhere.write_bytes(b'{"boot_id": "of another program"}')
    path.symlink_to(elsewhere)


def large(path):
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)


@pytest.mark.parametrize("make", [directory, link, os.mkfifo, large])
@pytest.mark.parametrize("tidy", [False, True])
def test_what_is_no_file_of_ours_is_set_aside_and_said_once(state, caplog, make, tidy):
    state.path.mkdir(mode=0o700)
    make(state.path / NAME)
    if tidy:
        state.tidy([NAME])
    assert state.read(NAME, Memory) is None
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert f"(kept as {state.path / NAME}.corrupt)" in record.getMessage()
    assert state.write(NAME, CONTENT) is True
    assert state.read(NAME, Memory) == CONTENT
    assert stat.S_IFMT((state.path / f"{NAME}.corrupt").lstat().st_mode) != 0
    if make is link:
        assert (state.path / "elsewhere").read_bytes() == b'{"boot_id": "of another program"}'


def test_where_there_is_no_directory_or_nothing_amiss_there_is_nothing_to_tidy(state, caplog):
    state.tidy([NAME])
    assert not state.path.exists()
    state.write(NAME, CONTENT)
    state.tidy([NAME])
    assert state.read(NAME, Memory) == CONTENT
    assert caplog.records == []


def test_a_file_with_further_hard_links_becomes_one_of_its_own(state, tmp_path, caplog):
    state.write(NAME, CONTENT)
    (tmp_path / "linked").hardlink_to(state.path / NAME)
    state.tidy([NAME])
    os.truncate(state.path / NAME, 0)
    assert json.loads((tmp_path / "linked").read_text())["boot_id"] == "boot"
    assert mode(state.path / NAME) == 0o600
    assert levels(caplog) == [logging.WARNING]


def test_what_killed_processes_had_not_finished_is_removed_and_nothing_else(state):
    state.write(NAME, CONTENT)
    for name in (f".{NAME}.abcdefgh", f".{NAME}.a1b2c3d_", ".another.json.abcdefgh", "notes"):
        (state.path / name).write_text("{")
    state.tidy([NAME])
    assert sorted(path.name for path in state.path.iterdir()) == [".another.json.abcdefgh", NAME, "notes"]


@pytest.mark.parametrize(("permitted", "said"), [(0o777, 1), (0o1777, 1), (0o770, 1), (0o755, 0), (0o700, 0)])
def test_that_others_may_write_in_the_directory_is_said(state, caplog, permitted, said):
    state.path.mkdir()
    state.path.chmod(permitted)
    state.tidy([NAME])
    assert len(caplog.records) == said
    assert all(f"has the mode {permitted:04o}" in record.getMessage() for record in caplog.records)


def test_a_file_that_is_whole_again_is_read_again_and_a_new_fault_said(state, caplog):
    state.path.mkdir()
    (state.path / NAME).write_bytes(b"{")
    assert state.read(NAME, Memory) is None
    state.write(NAME, CONTENT)
    assert state.read(NAME, Memory) == CONTENT
    (state.path / NAME).write_bytes(b"{")
    assert state.read(NAME, Memory) is None
    assert levels(caplog) == [logging.ERROR, logging.ERROR]


def test_a_later_versions_fields_are_passed_over(state):
    state.path.mkdir()
    (state.path / NAME).write_text('{"boot_id": "b", "entries": [], "later": {"a": [1, 2]}}')
    assert state.read(NAME, Memory) == Memory("b")


def test_a_directory_that_cannot_be_written_is_logged_once_for_each_file_until_it_can(refusing, caplog):
    caplog.set_level(logging.INFO)
    assert [refusing.write(NAME, CONTENT) for _ in range(3)] == [False] * 3
    assert str(refusing.path / NAME) in caplog.text
    assert refusing.write("other.json", CONTENT) is False
    refusing.path.parent.unlink()
    assert [refusing.write(NAME, CONTENT) for _ in range(2)] == [True] * 2
    assert "can be written again" in caplog.records[2].getMessage()
    assert refusing.read(NAME, Memory) == CONTENT
    (refusing.path / NAME).unlink()
    refusing.path.rmdir()
    refusing.path.write_text("in the way")
    assert refusing.write(NAME, CONTENT) is False
    assert levels(caplog) == [logging.ERROR, logging.ERROR, logging.INFO, logging.ERROR]


def test_text_that_cannot_be_encoded_is_not_written_and_said_once(tmp_path, caplog):
    state = StateDirectory(tmp_path)
    assert [state.write("a.json", ["a\udcff"]) for _ in range(2)] == [False, False]
    assert caplog.text.count("a.json cannot be written") == 1
    assert list(tmp_path.iterdir()) == []
