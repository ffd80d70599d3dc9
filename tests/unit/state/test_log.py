"""The state log: records in force outlive the process, also if its files are damaged or the disk is full."""

import errno
import json
import os
import shutil
import threading
import tracemalloc
from pathlib import Path

import pytest

from gpu_plugin.state.directory import MAX_BYTES
from gpu_plugin.state.log import (
    DEVICES,
    EVENT_BYTES,
    FILES,
    GPUS,
    HEALTH,
    KEPT,
    MAX_GROWTH,
    RESERVED,
    StateLog,
    read_log,
)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def opened(state: Path) -> StateLog:
    log = StateLog(state)
    log.load()
    return log


@pytest.fixture
def log(state):
    return opened(state)


def latest(state: Path, kind: str = HEALTH) -> object:
    """Return the content that a restart reads."""
    record = read_log(state).latest.get(kind)
    return None if record is None else json.loads(record.content)


def events(state: Path) -> list[object]:
    return [json.loads(record.content) for record in read_log(state).events]


def full(monkeypatch) -> None:
    """Have the disk give no file more space than it has."""
    write, allocate = os.pwrite, os.posix_fallocate

    def allocated(descriptor, offset, length):
        if offset + length > os.fstat(descriptor).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, offset, length)

    def written(descriptor, content, offset):
        room = os.fstat(descriptor).st_size - offset
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content[:room], offset)

    monkeypatch.setattr(os, "posix_fallocate", allocated)
    monkeypatch.setattr(os, "pwrite", written)


def write_all(log: StateLog) -> None:
    assert log.write(HEALTH, "cordon")
    assert log.write(GPUS, ["GPU-1"])
    assert log.write(DEVICES, ["device"])
    assert all(log.add_event(number) for number in range(5))


def require_all(state: Path) -> None:
    assert [latest(state, kind) for kind in (HEALTH, GPUS, DEVICES)] == ["cordon", ["GPU-1"], ["device"]]
    assert events(state) == [*range(5)]


def test_the_newest_record_of_each_kind_and_all_events_outlive_the_process(state, log, caplog):
    assert latest(state) is None
    assert log.write(HEALTH, "fault")
    write_all(log)
    require_all(state)
    again = opened(state)
    assert json.loads(again.latest(GPUS) or b"") == ["GPU-1"]
    assert again.write(HEALTH, "fault")
    assert again.add_event(5)
    assert (latest(state), events(state)) == ("fault", [*range(6)])
    assert not caplog.records


def test_only_the_owner_may_read_the_files_and_their_space_is_allocated_at_the_start(state, log):
    for name in FILES:
        there = (state / name).stat()
        assert there.st_mode & 0o777 == 0o600
        assert there.st_size == RESERVED
        assert there.st_blocks * 512 >= RESERVED


def test_unchanged_content_is_not_written_again(state, log):
    log.write(HEALTH, "cordon")
    before = (state / FILES[0]).read_bytes()
    assert log.write(HEALTH, "cordon")
    assert (state / FILES[0]).read_bytes() == before


@pytest.mark.parametrize("synced", [False, True])
def test_the_files_and_the_number_of_events_are_bounded(state, log, synced):
    for number in range(3000):
        assert log.write(HEALTH, f"{number}" * 100)
        assert log.add_event(f"{number}" * 20)
        if synced and number % 50 == 0:
            assert log.sync()
    assert latest(state) == "2999" * 100
    assert events(state) == [f"{number}" * 20 for number in range(3000 - KEPT, 3000)]
    assert all((state / name).stat().st_size < 512 * 1024 for name in FILES)


def test_long_events_are_bounded_in_bytes(state, log):
    for number in range(KEPT):
        assert log.add_event(f"{number}" + "x" * 6000)
    assert all((state / name).stat().st_size < EVENT_BYTES + 2 * 1024 * 1024 for name in FILES)
    newest = [str(text).rstrip("x") for text in events(state)]
    assert newest == [str(number) for number in range(KEPT - len(newest), KEPT)]
    assert len(newest) * 6000 > EVENT_BYTES / 2


def test_a_full_disk_takes_any_number_of_faults_and_events(state, log, monkeypatch, caplog):
    full(monkeypatch)
    for number in range(500):
        assert log.write(HEALTH, f"{number}" + "x" * (number % 7 * 1000))
        assert log.add_event(number)
        assert latest(state) == f"{number}" + "x" * (number % 7 * 1000)
        assert events(state)[-1] == number
    assert log.sync()
    assert opened(state).write(HEALTH, "of the next process")
    assert latest(state) == "of the next process"
    assert not caplog.records


def test_on_a_full_disk_an_event_without_room_is_refused(state, log, monkeypatch):
    full(monkeypatch)
    assert log.write(HEALTH, "x" * (RESERVED - 1500))
    accepted = []
    for number in range(300):
        if log.add_event(number):
            accepted.append(number)
            assert events(state)[-1] == number
    assert 0 < len(accepted) < 300
    assert latest(state) == "x" * (RESERVED - 1500)


def test_on_a_full_disk_gpus_and_devices_leave_room_for_health(state, log, monkeypatch, caplog):
    log.write(DEVICES, "former")
    with monkeypatch.context() as disk:
        full(disk)
        assert not log.write(DEVICES, "x" * RESERVED)
        assert not log.write(GPUS, "x" * (RESERVED - 1000))
        assert log.write(HEALTH, "x" * 10_000)
        assert log.write(HEALTH, "y" * 10_000)
        assert latest(state, DEVICES) == "former"
        assert not log.write(HEALTH, "x" * RESERVED)
        assert latest(state) == "y" * 10_000
    for kind in (DEVICES, GPUS, HEALTH):
        assert caplog.text.count(f"records of {kind} cannot be written") == 1
    assert log.write(DEVICES, "x" * RESERVED)
    assert log.write(HEALTH, "z" * RESERVED)
    assert (latest(state, DEVICES), latest(state)) == ("x" * RESERVED, "z" * RESERVED)


def test_a_content_above_the_limit_is_refused_and_costs_nothing(state, log):
    write_all(log)
    assert not log.write(DEVICES, "x" * MAX_BYTES)
    require_all(state)


def test_without_allocation_a_warning_is_logged_and_the_log_grows_nevertheless(state, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    log = opened(state)
    assert "no space could be allocated" in caplog.text
    assert log.write(DEVICES, "x" * 2 * RESERVED)
    assert log.write(HEALTH, "cordon")
    assert (latest(state), latest(state, DEVICES)) == ("cordon", "x" * 2 * RESERVED)


def test_a_short_write_is_a_failure_and_the_next_write_is_readable(state, log, monkeypatch, caplog):
    write = os.pwrite
    for end in range(80):
        assert log.write(HEALTH, f"before {end}")
        with monkeypatch.context() as disk:
            disk.setattr(os, "pwrite", lambda to, line, at, end=end: write(to, line[:end], at))
            accepted = log.write(HEALTH, [end] * 20)
        assert latest(state) in ([[end] * 20] if accepted else [f"before {end}"])
        assert log.write(HEALTH, "next" * (end % 3))
        assert latest(state) == "next" * (end % 3)
    caplog.clear()
    opened(state)
    assert not caplog.records, "no incomplete line stays"


def test_every_damaged_byte_costs_one_record_at_most_and_is_logged(state, log, caplog):
    for content in ("fault", "cordon"):
        log.write(HEALTH, content)
        log.add_event(content)
    file = state / FILES[0]
    whole = file.read_bytes()
    lines = whole.rstrip(b"\0")
    for at in range(len(lines)):
        for damage in (b"\xff", b"\n\xff"):
            caplog.clear()
            file.write_bytes(whole[:at] + damage + whole[at + len(damage) :])
            again = opened(state)
            assert latest(state) in ("cordon", "fault")
            assert set(events(state)) <= {"fault", "cordon"}
            lost = (latest(state) == "fault") + (2 - len(events(state)))
            assert lost <= len(damage)
            assert ("cannot be read and" in caplog.text) or not lost
            assert again.write(HEALTH, "next")
            assert latest(state) == "next"
            (state / FILES[1]).write_bytes(b"")


def test_a_file_that_is_cut_at_any_length_keeps_its_whole_records(state, log):
    log.write(HEALTH, "fault")
    log.write(HEALTH, "cordon")
    file = state / FILES[0]
    whole = file.read_bytes()
    ends = [whole.index(word) + len(word) for word in (b'"fault"', b'"cordon"')]
    for length in range(ends[1] + 3):
        file.write_bytes(whole[:length])
        assert latest(state) == ("cordon" if length >= ends[1] else "fault" if length >= ends[0] else None)
        assert opened(state).write(HEALTH, "next")
        assert latest(state) == "next"
        (state / FILES[1]).write_bytes(b"")


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"\0" * 100, b"[" * 100_000, b'00000000 1 health "x"\n', b"\xff" * 9]
)
def test_a_line_that_is_no_record_is_left_out_and_logged(state, caplog, content):
    state.mkdir()
    (state / FILES[0]).write_bytes(content)
    assert opened(state).latest(HEALTH) is None
    assert bool(caplog.records) is bool(content.strip(b"\n\0"))


@pytest.mark.parametrize("content", [b"\xff\n", b"\n00000000 1 health x", b"\n", b"\0" * 99 + b"x"])
@pytest.mark.parametrize("spoiled", [FILES[:1], FILES[1:], FILES])
def test_files_with_much_garbage_are_replaced_and_keep_their_records(state, log, caplog, content, spoiled):
    write_all(log)
    log._move()
    for name in spoiled:
        with (state / name).open("ab") as file:
            file.write(content * (2 * MAX_GROWTH // len(content)) + b"x")
    again = opened(state)
    for name in FILES:
        assert caplog.text.count(f"{state / name} has ") == (name in spoiled)
        assert (state / f"{name}.corrupt").exists() is (name in spoiled)
        assert (state / name).stat().st_size < 2 * RESERVED
    require_all(state)
    assert again.add_event(5)
    assert again.write(HEALTH, "next")
    assert (latest(state), events(state)) == ("next", [*range(6)])


def test_garbage_on_a_disk_that_refuses_writes_costs_no_record(state, log, monkeypatch, caplog):
    write_all(log)
    with (state / FILES[0]).open("ab") as file:
        file.write(b"x" * (2 * MAX_GROWTH))

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", fail)
        again = opened(state)
        assert "bytes that are not records and are left out (and the file cannot be replaced" in caplog.text
    require_all(state)
    assert again.write(HEALTH, "next")
    assert latest(state) == "next"


def test_events_that_only_a_file_with_much_garbage_has_are_in_the_other_file(state, log):
    for number in range(9):
        log.add_event(number)
    log._move()
    log.add_event(9)
    content = (state / FILES[1]).read_bytes()
    newest = content[content.index(b"event 8\n") + len(b"event 8\n") :]
    (state / FILES[1]).write_bytes(b"x" * (2 * MAX_GROWTH) + newest)
    opened(state)
    assert (state / f"{FILES[1]}.corrupt").exists()
    assert events(state) == [*range(10)]


def test_records_are_on_the_disk_before_a_file_with_much_garbage_is_emptied(state, log, monkeypatch):
    write_all(log)
    with (state / FILES[0]).open("ab") as file:
        file.write(b"x" * (2 * MAX_GROWTH))
    steps = []
    for step in ("fdatasync", "ftruncate"):
        call = getattr(os, step)

        def noted(descriptor, *arguments, step=step, call=call):
            steps.append((step, str(Path(f"/proc/self/fd/{descriptor}").readlink())))
            return call(descriptor, *arguments)

        monkeypatch.setattr(os, step, noted)
    opened(state)
    assert steps == [("fdatasync", str(state / FILES[1])), ("ftruncate", str(state / FILES[0]))]


def test_on_a_full_disk_a_file_with_much_garbage_keeps_its_space(state, log, monkeypatch, caplog):
    log.write(HEALTH, "x" * (2 * MAX_GROWTH))  # both files have space for two
    log.write(HEALTH, "cordon")
    log._move()
    former = state / FILES[0]
    size = former.stat().st_size
    former.write_bytes(b"x" * size)
    full(monkeypatch)

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gpu_plugin.state.directory.replace_file", refuse)
    again = opened(state)
    assert f"{former} has {size} bytes that are not records and are left out (without a copy: No space" in caplog.text
    for number in range(300):  # more than the present file takes
        assert again.write(HEALTH, f"{number}{'x' * 10_000}")
    assert not read_log(state).unreadable


def test_a_lost_page_costs_no_record_that_begins_after_its_end(state, log):
    log.write(HEALTH, "cordon")
    file = state / FILES[0]
    content = file.read_bytes()
    file.write_bytes(bytes(4096) + content[1:])  # the line feed was the last byte of the page
    assert latest(state) == "cordon"
    assert opened(state).write(HEALTH, "next")
    assert latest(state) == "next"


def test_garbage_does_not_take_a_multiple_of_its_size_in_memory(state, log):
    log.write(HEALTH, "cordon")
    with (state / FILES[0]).open("ab") as file:
        for _ in range(8):
            file.write(b"\nx" * MAX_GROWTH)
    tracemalloc.start()
    try:
        assert latest(state) == "cordon"
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES + 30 * MAX_GROWTH
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("damaged", FILES)
def test_a_record_that_only_the_former_file_has_is_in_both_after_a_restart(state, log, damaged):
    write_all(log)
    log._move()  # both files have everything
    other = FILES[1 - FILES.index(damaged)]
    for name, word in ((damaged, b"cordon"), (damaged, b"GPU-1"), (other, b"device")):
        file = state / name
        file.write_bytes(file.read_bytes().replace(word, b"\xff" * len(word)))
    opened(state)
    require_all(state)
    assert any(
        all(word in (state / name).read_bytes() for word in (b"cordon", b"GPU-1", b"device")) for name in FILES
    ), "one file has everything, so that the other may be overwritten"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["removed", "renamed", "replaced", "cut", "directory renamed", "directory removed"])
def test_a_lost_file_is_noticed_and_the_next_write_restores_it(state, log, name, how):
    write_all(log)
    log._move()
    assert log.in_place
    if how == "directory renamed":
        state.rename(state.with_name("away"))
    elif how == "directory removed":
        shutil.rmtree(state)
    elif how == "cut":
        os.truncate(state / name, 3)
    elif how == "removed":
        (state / name).unlink()
    else:
        (state / name).rename(state / "away")
        if how == "replaced":
            (state / name).write_text("{}\n" * 1000)
    assert not log.in_place
    assert log.write(HEALTH, "cordon")  # unchanged
    assert log.in_place
    require_all(state)
    assert all((state / each).stat().st_size >= RESERVED for each in FILES)
    assert opened(state).write(HEALTH, "next")


def test_the_file_with_all_records_stays_in_use_after_a_restart_and_without_the_other(state, log):
    write_all(log)
    log._move()
    assert log.write(HEALTH, "superseded")
    assert log.add_event(5)
    first, second = (state / name for name in FILES)
    former, active = (file.read_bytes().rstrip(b"\0") for file in (first, second))
    again = opened(state)
    assert again.add_event(6)
    assert first.read_bytes().rstrip(b"\0") == former
    first.unlink()
    assert again.add_event(7)
    assert first.read_bytes().strip(b"\0") == b""
    # The records are not written over in place: a kill would leave a part of them.
    assert second.read_bytes().startswith(active)
    assert events(state) == [*range(8)]


def test_a_sync_of_a_file_that_is_nearly_full_puts_the_records_on_the_disk_in_both(state, log):
    write_all(log)
    assert log.sync()
    assert not read_log(state).numbers[1]
    while log._files[0].end < RESERVED * 2 // 3:
        assert log.write(HEALTH, "x" * 2000) is log.write(HEALTH, "cordon") is True
    assert log.sync()
    assert len(read_log(state).numbers[1]) == 8
    require_all(state)


def test_a_lost_file_that_was_nearly_full_is_restored_with_all_events(state, log):
    while log._files[0].end < RESERVED - 300:
        assert log.add_event("x" * 200)
    count = len(events(state))
    shutil.rmtree(state)
    assert log.write(HEALTH, "cordon")
    assert len(events(state)) == count


@pytest.mark.parametrize("made", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_something_else_at_the_name_is_moved_aside_and_not_written(state, log, made, caplog):
    write_all(log)
    for name in FILES:
        (state / name).unlink()
        made(state / name)
    assert not read_log(state).latest
    assert set(read_log(state).errors) == set(FILES)
    assert log.write(HEALTH, "cordon")
    require_all(state)
    assert all(os.path.lexists(state / f"{name}.corrupt") for name in FILES)


@pytest.mark.parametrize("why", ["too large", "input/output error"])
def test_a_file_that_cannot_be_read_is_kept_aside(state, log, monkeypatch, caplog, why):
    assert all(log.write(HEALTH, f"former {number}") for number in range(9))
    if why == "too large":
        os.truncate(state / FILES[0], MAX_BYTES + 1)
    with monkeypatch.context() as disk:
        if why == "input/output error":

            def fail(_):
                raise OSError(errno.EIO, "Input/output error")

            disk.setattr("gpu_plugin.state.log.bounded", fail)
        assert opened(state).write(HEALTH, "cordon")
    assert f"(kept as {state / FILES[0]}.corrupt)" in caplog.text
    assert latest(state) == "cordon"


def test_a_directory_that_cannot_be_written_is_logged_once_until_it_can(state, caplog):
    caplog.set_level("INFO")
    state.write_text("a file")
    log = opened(state)
    for _ in range(3):
        assert not log.write(HEALTH, "cordon")
        assert not log.add_event("order")
    state.unlink()
    assert log.write(HEALTH, "cordon")
    assert log.add_event("order")
    assert [record.levelname for record in caplog.records] == [*["ERROR"] * 2, "WARNING", *["ERROR"] * 2, *["INFO"] * 2]
    assert log.latest(GPUS) is None
    assert (latest(state), events(state)) == ("cordon", ["order"])


def test_a_sync_reaches_the_disk_without_holding_up_writes(state, log, monkeypatch):
    began, go, real = threading.Event(), threading.Event(), os.fdatasync

    def slow(descriptor):
        began.set()
        assert go.wait(5)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    log.write(HEALTH, "fault")
    syncing = threading.Thread(target=log.sync)
    syncing.start()
    assert began.wait(5)
    assert log.write(HEALTH, "cordon")
    assert latest(state) == "cordon"
    go.set()
    syncing.join(5)


def test_after_a_failed_sync_the_records_are_written_to_the_disk_again(state, log, monkeypatch, caplog):
    write_all(log)
    synced: list[str] = []
    real = os.fdatasync

    def sync(descriptor):
        if not synced:
            synced.append("failed")
            raise OSError(errno.EIO, "Input/output error")
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    assert not log.sync()
    assert "cannot be written to the disk" in caplog.text
    assert log.sync()
    # The kernel may have dropped the pages of the failed write, and reports that only once.
    assert synced == ["failed", str(state / FILES[0]), str(state / FILES[1])]
    require_all(state)


def test_a_released_log_is_not_written_until_it_is_loaded_again(state, log):
    write_all(log)
    assert log.release()
    assert not log.write(HEALTH, "late")
    assert not log.add_event("late")
    new = opened(state)
    assert new.write(HEALTH, "of the new daemon")
    log.load()
    assert json.loads(log.latest(HEALTH) or b"") == "of the new daemon"
    assert log.write(HEALTH, "of the former daemon")
    assert latest(state) == "of the former daemon"
    assert events(state) == [*range(5)]


def test_a_log_with_a_hanging_write_is_not_released_and_its_place_is_not_asked_for(state, log, monkeypatch):
    began, go, real = threading.Event(), threading.Event(), os.pwrite

    def hang(*arguments):
        began.set()
        assert go.wait(5)
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", hang)
    writing = threading.Thread(target=log.write, args=(HEALTH, "cordon"))
    writing.start()
    assert began.wait(5)
    assert not log.release()
    assert log.in_place
    go.set()
    writing.join(5)
    assert log.release()
    assert latest(state) == "cordon"
