"""Events outlive restarts."""

import threading
from pathlib import Path

import anyio
import pytest

from gpu_plugin.state import event_store
from gpu_plugin.state.event_store import LONGEST, Event, EventStore, bounded, recollect
from gpu_plugin.state.log import FILES, KEPT, StateLog


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


def texts(state: Path) -> list[str]:
    """Return the texts of the events that a restart reads."""
    return [event.text for event in recollect(state)[0]]


def store(state, begin=100.0):
    """Return a store with the events of earlier processes."""
    times = iter(range(int(begin), 10**9))
    log = StateLog(state)
    made = EventStore(log, lambda: float(next(times)))
    made.recall(log.load().events)
    return made


async def test_events_outlive_the_process(state):
    first = store(state)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run)
        await anyio.wait_all_tasks_blocked()
        first.add("daemon", "one")
        assert await first.written()
        first.add("daemon", "two")
        tasks.cancel_scope.cancel()
    first.add("health", "three", uuid="GPU-0", index=0, xid=79)
    await first.save_within(5)
    second = store(state)
    assert [event.text for event in second.events] == ["one", "two", "three"]
    assert second.events[-1] == Event(102.0, "health", "three", uuid="GPU-0", index=0, xid=79)
    await second.save_within(5)
    assert texts(state) == ["one", "two", "three"]


async def test_events_that_came_before_the_log_was_read_are_the_latest(state):
    first = store(state)
    for number in range(KEPT):
        first.add("daemon", f"old {number}")
    await first.save_within(10)
    log = StateLog(state)
    second = EventStore(log, lambda: 5.0)
    second.add("daemon", "new")
    second.recall(log.load().events)
    await second.save_within(5)
    assert [event.text for event in second.events] == texts(state)
    assert texts(state) == [*(f"old {number}" for number in range(1, KEPT)), "new"]


async def test_of_more_events_than_are_kept_the_newest_are_written(state):
    made = store(state)
    for number in range(KEPT + 5):
        made.add("daemon", str(number))
    await made.save_within(10)
    assert texts(state) == [str(number) for number in range(5, KEPT + 5)]


def test_texts_are_cut():
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
    made.add("daemon", text)
    made.add("order", "refused", by=text, reason=text)
    await made.save_within(5)
    assert len(texts(state)) == 2
    for event in (*recollect(state)[0], *made.events):
        assert all(each.isprintable() for each in (event.text, event.by, event.reason))
        assert event.text[0] + event.text[-1] in ("ab", "rd")


@pytest.mark.parametrize(
    "wrong", [{"at": 1e300, "kind": "order", "text": "x"}, {"at": -1, "kind": "order", "text": "x"}, 7]
)
def test_an_event_that_no_daemon_wrote_is_left_out(state, wrong):
    log = StateLog(state)
    log.add_event(wrong)
    log.add_event({"at": 1, "kind": "order", "text": "x" * 400})
    [event] = recollect(state)[0]
    assert len(event.text) == LONGEST


def test_without_a_log_there_are_no_events(state):
    with pytest.raises(FileNotFoundError):
        recollect(state)
    (state / FILES[0]).mkdir(parents=True)
    with pytest.raises(OSError, match="is a directory"):
        recollect(state)


async def test_a_write_that_fails_is_tried_again_and_an_order_does_not_wait_for_it(state, monkeypatch):
    made = store(state)
    monkeypatch.setattr(event_store, "RETRY", 0.01)
    with monkeypatch.context() as disk:
        disk.setattr(StateLog, "add_event", lambda *_: False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            await anyio.wait_all_tasks_blocked()
            made.add("order", "one")
            assert not await made.written(5)
            assert made.trouble
            disk.undo()
            with anyio.fail_after(5):
                while made.trouble:
                    await anyio.sleep(0.001)
            made.add("order", "two")
            assert await made.written()
            tasks.cancel_scope.cancel()
    assert texts(state) == ["one", "two"]


async def test_an_order_waits_for_one_attempt_to_write_it_and_not_without_a_writer(state, monkeypatch):
    made, add = store(state), StateLog.add_event
    began, go = threading.Event(), threading.Event()

    def fail(*_):
        began.set()
        go.wait(5)
        return False

    monkeypatch.setattr(event_store, "RETRY", 3600.0)
    monkeypatch.setattr(StateLog, "add_event", fail)
    made.add("order", "one")
    with anyio.fail_after(10):
        assert not await made.written(3600)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            while not began.is_set():
                await anyio.sleep(0.001)
            made.add("order", "two")  # the write of the first order is under way, and fails
            assert not await made.written(0.01)
            tasks.start_soon(anyio.to_thread.run_sync, go.set)
            assert not await made.written(3600)
            monkeypatch.setattr(StateLog, "add_event", add)
            made.add("order", "three")
            assert await made.written(3600)
            tasks.cancel_scope.cancel()
        made.add("order", "four")
        assert not await made.written(3600)
    assert texts(state) == ["one", "two", "three"]


async def test_a_write_that_succeeds_after_its_patience_is_no_trouble(state, monkeypatch):
    add, back = StateLog.add_event, threading.Event()

    def slow(log, event):
        assert back.wait(5)
        return add(log, event)

    monkeypatch.setattr(StateLog, "add_event", slow)
    monkeypatch.setattr(event_store, "PATIENCE", 0.01)
    made = store(state)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        made.add("daemon", "one")
        with anyio.fail_after(5):
            while not made.trouble:
                await anyio.sleep(0.001)
        monkeypatch.setattr(event_store, "RETRY", 0.01)
        back.set()
        await made.hanging_write()
        made.news.ring()  # the retry is due
        with anyio.fail_after(5):
            while made.trouble:
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert texts(state) == ["one"]


async def test_each_event_is_written_once_although_the_disk_hangs(state, monkeypatch, caplog):
    add, back, began = StateLog.add_event, threading.Event(), []

    def hang(log, event):
        began.append(event)
        assert back.wait(5)
        return add(log, event)

    monkeypatch.setattr(StateLog, "add_event", hang)
    monkeypatch.setattr(event_store, "PATIENCE", 0.01)
    monkeypatch.setattr(event_store, "RETRY", 0.01)
    made = store(state)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        for text in ("one", "two", "three"):
            made.add("daemon", text)
            await anyio.sleep(0.03)
            assert made.trouble
            assert made.writes
        assert len(began) == 1, "no other write begins"
        monkeypatch.setattr(event_store, "PATIENCE", 5.0)
        back.set()
        await made.hanging_write()
        with anyio.fail_after(5):
            while made.trouble:
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert texts(state) == ["one", "two", "three"]
    assert caplog.text.count("events cannot be written") == 1


async def test_the_end_of_the_process_is_not_held_up(state, caplog, monkeypatch):
    back = threading.Event()
    made = store(state)
    made.add("daemon", "one")
    monkeypatch.setattr(StateLog, "add_event", lambda *_: back.wait(5))
    await made.save_within(0.01)
    assert "the last events are lost" in caplog.text
    back.set()
    await made.hanging_write()
    made = store(state)
    made.add("daemon", "two")
    monkeypatch.setattr(StateLog, "add_event", lambda *_: 1 // 0)
    await made.save_within(5)
