"""The stacks of tasks and threads that SIGUSR2 logs, and their limits."""

import asyncio
import logging
import os
import signal
import sys
import threading

import anyio

from gpu_plugin.telemetry import stacks


async def _inner(event):
    await event.wait()


async def _outer(event):
    await _inner(event)


async def test_a_task_is_told_down_to_what_it_waits_for():
    event = asyncio.Event()
    task = asyncio.create_task(_outer(event), name="waiting for nothing")
    await anyio.lowlevel.checkpoint()
    assert [code.co_name for code, _ in stacks.awaited(task)] == ["_outer", "_inner", "wait"]
    lines = list(stacks.told([task]))
    at = lines.index("  task waiting for nothing: _outer")
    assert lines[at + 2].endswith(" in _inner")
    assert f"{__file__}:{_inner.__code__.co_firstlineno + 1}" in lines[at + 2]
    event.set()
    await task
    assert stacks.awaited(task) == []


async def test_a_coroutine_that_ends_while_it_is_looked_at_costs_the_answer_nothing():
    class Ending:
        """Like a coroutine read by another thread: its frame is gone at the second read."""

        cr_await = None

        def __init__(self):
            self._frames = iter([sys._getframe()])

        @property
        def cr_frame(self):
            return next(self._frames, None)

    class Task(asyncio.Task[None]):
        def get_coro(self):
            return Ending()

    task = Task(_inner(asyncio.Event()))
    try:
        assert [code.co_name for code, _ in stacks.awaited(task)] == ["__init__"]
    finally:
        task.cancel()


async def test_threads_are_told_with_their_frames():
    free = threading.Event()
    thread = threading.Thread(target=free.wait, name="idle thread", daemon=True)
    thread.start()
    try:
        lines = list(stacks.told([]))
    finally:
        free.set()
        thread.join()
    at = lines.index(f"  thread idle thread ({thread.native_id}, daemon)")
    assert lines[at + 1].startswith("    ")
    assert any(line.endswith(" in wait") for line in lines[at:])
    assert "0 tasks:" in lines


async def _deep(levels, event):
    if levels:
        await _deep(levels - 1, event)
    else:
        await event.wait()


async def test_it_is_bounded_whatever_there_is_to_tell():
    event = asyncio.Event()
    tasks = [asyncio.create_task(_deep(40, event), name="n" * 10_000) for _ in range(stacks.MAX_STACKS + 7)]
    await anyio.lowlevel.checkpoint()
    lines = list(stacks.told(tasks))
    event.set()
    await asyncio.gather(*tasks)
    assert "  and 7 more" in lines
    assert lines[0] == f"{stacks.MAX_STACKS + 7} tasks:"
    threads = len(lines) - lines.index("  and 7 more")
    assert len(lines) - threads == 1 + stacks.MAX_STACKS * (1 + 1 + stacks.MAX_FRAMES)
    assert max(map(len, lines)) < 3 * stacks.WIDTH


async def test_a_loop_that_stands_still_is_told_of_all_the_same(caplog, monkeypatch):
    """The main thread is busy in Python and never comes back to its loop before the answer is there."""
    answered = threading.Event()

    class Listening(logging.Handler):
        def emit(self, record):
            if "in test_a_loop_that_stands_still" in record.getMessage():
                answered.set()

    heard = Listening()
    stacks.log.addHandler(heard)
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    try:
        with stacks.logged_on(signal.SIGUSR2):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert answered.wait(10)
    finally:
        stacks.log.removeHandler(heard)
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    assert "SIGUSR2: stacks of all tasks and threads" in caplog.text
