"""What happened is remembered over restarts, within a bound, whatever became of the file."""

import errno
import os
import shutil
import threading
from pathlib import Path

import anyio
import pytest

from gpu_plugin.state import event_store
from gpu_plugin.state.event_store import FILE, KEPT, LONGEST, Event, EventStore, bounded, recollect


def read(state_dir: Path) -> list[Event]:
    return recollect(state_dir)[0]


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


def store(state, begin=100.0):
    times = iter(range(int(begin), 10**9))
    return EventStore(state, lambda: float(next(times)))


async def written(made, texts):
    """Adds events to a running store, and returns once it has nothing left to write."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        for text in texts:
            made.add("daemon", text)
            await anyio.lowlevel.checkpoint()
        with anyio.fail_after(5):
            while made._unwritten:
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()


async def test_events_outlive_the_process(state):
    first = store(state)
    await written(first, ["one", "two"])
    first.add("health", "three", uuid="GPU-0", index=0, xid=79)
    first.save()
    second = store(state)
    second.recall()
    assert [event.text for event in second.events] == ["one", "two", "three"]
    assert second.events[-1] == Event(102.0, "health", "three", uuid="GPU-0", index=0, xid=79)
    assert (state / FILE).stat().st_mode & 0o777 == 0o600


async def test_events_that_came_before_the_file_was_read_are_the_latest_and_are_written(state):
    await written(store(state), [f"old {number}" for number in range(KEPT)])
    second = store(state)
    second.add("daemon", "new")
    second.recall()
    second.save()
    for events in (list(second.events), read(state)):
        assert len(events) == KEPT
        assert [event.text for event in events[-2:]] == [f"old {KEPT - 1}", "new"]
        assert events[0].text == "old 1"


async def test_neither_memory_nor_file_grows_beyond_their_bound(state):
    made = store(state)
    for round_ in range(4):
        await written(made, [f"{round_}-{number}" * 200 for number in range(KEPT - 50)])
    assert len(made.events) == KEPT
    lines = (state / FILE).read_bytes().splitlines()
    assert KEPT <= len(lines) <= 2 * KEPT
    assert (state / FILE).stat().st_size < 2 * 1024 * 1024
    assert read(state) == list(made.events)


async def test_the_file_keeps_its_bound_in_bytes_whatever_the_texts(state):
    made = store(state)
    long = "\U0001f600" * LONGEST  # 1,200 bytes
    sizes = []
    for _ in range(5):
        for _ in range(300):
            made.add("order", long, by=long, reason=long)
        await written(made, [])
        sizes.append((state / FILE).stat().st_size)
    assert max(sizes) <= event_store.MAX_BYTES
    known = read(state)
    assert len(known) > 700
    assert known == list(made.events)[-len(known) :]


def test_texts_are_cut(state):
    event = bounded(Event(1.0, "order", "x" * 1000, by="y" * 1000))
    assert (len(event.text), len(event.by)) == (LONGEST, LONGEST)
    assert event.text.endswith("...")
    words = "GPU-7a2fb1cb-d370-4c1b-9a0e-2b1d7c9e4f55 " * 20
    cut = bounded(Event(1.0, "order", words)).text
    assert cut.endswith("4f55...")
    assert len(cut) > 250


@pytest.mark.parametrize("text", ["a\udcffb", "a\nb", "a\x1b[2Jb", "a\x9bb", "a\u2028b", "a\u202eb"])
async def test_texts_can_be_written_and_shown_whatever_is_in_them(state, text):
    made = store(state)
    await written(made, [text])
    made.add("order", "refused", by=text, reason=text)
    made.save()
    assert len(read(state)) == 2
    for event in (*read(state), *made.events):
        assert all(each.isprintable() for each in (event.text, event.by, event.reason))
        assert event.text[0] + event.text[-1] in ("ab", "rd")


@pytest.mark.parametrize(
    "line", [b'{"at":1e300,"kind":"order","text":"x"}', b'{"at":-1,"kind":"order","text":"x"}', b"[" * 9999]
)
def test_a_line_that_no_daemon_wrote_is_left_out(state, line):
    state.mkdir()
    (state / FILE).write_bytes(line + b'\n{"at":1,"kind":"order","text":"ours"}\n')
    assert [event.text for event in read(state)] == ["ours"]


def test_the_end_of_the_process_is_never_held_up(state, caplog, monkeypatch):
    made = store(state)
    made.add("daemon", "one")
    monkeypatch.setattr(os, "open", lambda *_: 1 // 0)
    made.save()
    assert "1 events are lost" in caplog.text


async def test_what_comes_while_a_slow_disk_writes_is_written_next(state, monkeypatch):
    made, slow, real = store(state), threading.Event(), event_store._append
    await written(made, ["first"])

    def append(directory, events):
        assert slow.wait(5)
        real(directory, events)

    monkeypatch.setattr(event_store, "_append", append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        for number in range(KEPT):
            made.add("daemon", f"early {number}")
        await anyio.wait_all_tasks_blocked()
        made.add("daemon", "meanwhile")
        slow.set()
        with anyio.fail_after(5):
            while made._unwritten:
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert read(state) == list(made.events)
    assert read(state)[-1].text == "meanwhile"


async def test_a_disk_that_hangs_is_waited_for_and_what_came_meanwhile_is_written_once_it_answers(state, monkeypatch):
    began, back = [], threading.Event()
    written_down = event_store._write_down

    def hang(*told, **how):
        began.append(1)
        assert back.wait(5)
        return written_down(*told, **how)

    monkeypatch.setattr(event_store, "_write_down", hang)
    monkeypatch.setattr(event_store, "PATIENCE", 0.01)
    made = store(state)
    for text in ("one", "two", "three"):
        made.add("daemon", text)
        assert not await made._write()
        assert made.trouble
    assert len(began) == 1
    monkeypatch.setattr(event_store, "PATIENCE", 5)
    back.set()
    assert await made._write()
    assert not made.trouble
    assert [event.text for event in read(state)] == ["one", "two", "three"]


async def test_a_short_write_costs_no_event_and_is_made_good_without_another_one(state, monkeypatch):
    made, real, short = store(state), os.write, [True]
    await written(made, ["one"])

    def write(descriptor, content):
        if short and len(content) > 1:
            short.clear()
            return real(descriptor, content[:-5])
        return real(descriptor, content)

    monkeypatch.setattr(event_store, "RETRY", 0.01)
    monkeypatch.setattr(os, "write", write)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        made.add("daemon", "two")
        with anyio.fail_after(5):
            while made._unwritten:
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert [event.text for event in read(state)] == ["one", "two"]
    assert (state / FILE).read_bytes().count(b"\n") == 2  # what was cut short is replaced, not added to


def test_after_a_short_write_the_next_line_is_one_of_its_own(state, monkeypatch):
    state.mkdir()
    real, cut = os.write, [5]
    monkeypatch.setattr(os, "write", lambda to, content: real(to, content[: -cut.pop()] if cut else content))
    with pytest.raises(OSError, match="the write was incomplete") as refused:
        event_store._append(state, [Event(1.0, "daemon", "cut")])
    assert refused.value.errno == errno.ENOSPC
    event_store._append(state, [Event(2.0, "daemon", "whole")])
    assert [event.text for event in read(state)] == ["whole"]


async def test_a_line_cut_short_at_any_length_costs_itself_alone_and_nothing_that_comes_after(state):
    made, texts = store(state), ["one", "two", "three"]
    await written(made, texts)
    content = (state / FILE).read_bytes()
    ends = [at for at, byte in enumerate(content) if byte == ord("\n")]
    for length in range(len(content) + 1):
        (state / FILE).write_bytes(content[:length])
        whole = texts[: sum(end <= length for end in ends)]  # without the end of its line it is all there
        again = store(state)
        again.recall()
        assert [event.text for event in again.events] == whole
        again.add("daemon", "four")
        again.save()
        assert [event.text for event in read(state)] == [*whole, "four"]


async def test_a_bad_byte_costs_a_line_at_most_two_where_it_was_between_them(state):
    made = store(state)
    for text in ("one", "two"):
        made.add("daemon", text, uuid="GPU-1", index=3, xid=79, by="uid 0")
    made.save()
    content = (state / FILE).read_bytes()
    for at in range(len(content)):
        (state / FILE).write_bytes(content[:at] + b"\xff" + content[at + 1 :])
        texts = [event.text for event in read(state)]
        first = content.index(b"\n")
        assert texts == (["two"] if at < first else ["one"] if at > first else [])


@pytest.mark.parametrize(
    ("spoil", "lines", "left"),
    [
        (lambda whole: b"\xff" * len(whole), "1 line of it cannot be read and is", []),
        (lambda whole: whole.replace(b"one", b"o\xffe"), "1 line of it cannot be read and is", ["two", "three"]),
        (lambda whole: whole.replace(b'"at"', b'"\xff"'), "3 lines of it cannot be read and are", []),
        (lambda whole: whole[:-5], "1 line of it cannot be read and is", ["one", "two"]),
    ],
)
async def test_a_file_with_lines_that_cannot_be_read_is_said_and_kept(state, caplog, spoil, lines, left):
    made = store(state)
    await written(made, ["one", "two", "three"])
    spoilt = spoil((state / FILE).read_bytes())
    (state / FILE).write_bytes(spoilt)
    again = store(state)
    again.recall()
    assert [event.text for event in again.events] == left
    (line,) = caplog.messages
    assert line == f"{state / FILE}: {lines} left out (kept as {state / FILE}.corrupt)"
    assert (state / f"{FILE}.corrupt").read_bytes() == spoilt
    assert [event.text for event in read(state)] == left  # a kill costs nothing more
    caplog.clear()
    store(state).recall()
    assert not caplog.messages


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
async def test_what_is_no_file_is_not_read_and_said(state, caplog, kind):
    state.mkdir()
    path = state / FILE
    {"directory": path.mkdir, "fifo": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("/etc/passwd")}[kind]()
    made = store(state)
    made.recall()
    assert not made.events
    if kind == "directory":
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            made.add("daemon", "one")
            with anyio.fail_after(5):
                while "cannot be written" not in caplog.text:
                    await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        path.rmdir()
    await written(made, ["two"])  # the others are replaced
    assert [event.text for event in read(state)][-1] == "two"


async def test_a_disk_that_is_full_is_tried_again_with_the_next_event(state, monkeypatch, caplog):
    made = store(state)
    await written(made, ["one"])
    real, refuse = os.write, [True]

    def write(descriptor, content):
        if refuse:
            raise OSError(28, "No space left on device")
        return real(descriptor, content)

    monkeypatch.setattr(os, "write", write)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        made.add("daemon", "two")
        with anyio.fail_after(5):
            while "cannot be written" not in caplog.text:
                await anyio.sleep(0.001)
        refuse.clear()
        made.add("daemon", "three")
        with anyio.fail_after(5):
            while made._unwritten:
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert [event.text for event in read(state)] == ["one", "two", "three"]
    assert caplog.text.count("cannot be written") == 1


def test_what_is_no_file_has_no_events(state):
    state.mkdir()
    os.mkfifo(state / FILE)
    with pytest.raises(OSError, match="is a named pipe"):
        read(state)
    (state / FILE).unlink()
    (state / "elsewhere").write_bytes(b'{"at":1,"kind":"order","text":"of another"}\n')
    (state / FILE).symlink_to(state / "elsewhere")
    with pytest.raises(OSError, match="is a symbolic link"):
        read(state)


def test_of_a_file_without_end_the_newest_are_read_and_their_texts_cut(state, monkeypatch):
    state.mkdir()
    lines = [b'{"at":%d,"kind":"order","text":"%s"}\n' % (at, b"x" * 400) for at in range(20)]
    (state / FILE).write_bytes(b"".join(lines))
    monkeypatch.setattr(event_store, "MAX_BYTES", 3 * len(lines[-1]) + 5)
    found = read(state)
    assert [event.at for event in found] == [17.0, 18.0, 19.0]
    assert {len(event.text) for event in found} == {LONGEST}


async def test_more_than_are_kept_may_come_before_the_end_and_no_end_writes_them_twice(state):
    made = store(state)
    await written(made, ["first"])
    for number in range(KEPT + 5):
        made.add("daemon", f"late {number}")
    made.save()
    assert read(state) == list(made.events)
    made = store(state)
    await written(made, ["one"])
    made.add("daemon", "two")
    made.save()
    made.save()
    assert (state / FILE).read_bytes().count(b"\n") == 2


async def test_a_link_in_its_place_is_not_written_through(state):
    made = store(state)
    await written(made, ["one"])
    (state / FILE).rename(state / "elsewhere")
    (state / FILE).symlink_to(state / "elsewhere")
    made.add("daemon", "two")
    made.save()
    assert (state / "elsewhere").read_bytes().count(b"\n") == 1


async def test_that_it_cannot_be_written_is_said_once_each_time_it_begins(state, caplog):
    made = store(state)
    for _ in range(2):
        state.touch()  # no directory can be there
        for text in ("one", "two"):
            made.add("daemon", text)
            assert not await made._write()
        state.unlink()
        assert await made._write()
        assert read(state) == list(made.events)
        shutil.rmtree(state)
    assert caplog.text.count("cannot be written, so these events would be lost at a restart") == 2


async def test_events_saved_after_a_refusal_replace_what_was_cut(state, monkeypatch):
    made = store(state)
    await written(made, ["one"])
    real = os.write
    monkeypatch.setattr(os, "write", lambda to, content: real(to, content[:5]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        made.add("daemon", "two")
        with anyio.fail_after(5):
            while not made.trouble:
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    monkeypatch.undo()
    made.save()
    assert [event.text for event in read(state)] == ["one", "two"]
    assert len((state / FILE).read_bytes().splitlines()) == 2


async def test_a_look_while_the_disk_has_not_answered_asks_it_nothing_and_rings_for_nothing(state, monkeypatch):
    made, hanging, go = store(state), threading.Event(), threading.Event()
    rung: list[object] = []
    await written(made, ["one"])
    real = event_store._write_down

    def hangs(*args, **how):
        result = real(*args, **how)
        hanging.set()
        go.wait(5)
        return result

    monkeypatch.setattr(event_store, "_write_down", hangs)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        made.add("daemon", "two")
        assert await anyio.to_thread.run_sync(hanging.wait, 5)
        with monkeypatch.context() as watched:
            watched.setattr(event_store, "identity", rung.append)
            watched.setattr(made.news, "ring", lambda: rung.append("rung"))
            made.look()
        go.set()
        with anyio.fail_after(5):
            while made._unwritten:
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert rung == []


async def test_a_file_that_went_is_written_again_whole_also_at_the_end(state):
    made = store(state)
    await written(made, ["one", "two"])
    for gone in ((state / FILE).unlink, lambda: (state / FILE).write_text("{}\n")):
        gone()
        made.look()
        made.save()
        assert [event.text for event in read(state)] == ["one", "two"]
