"""What every task and every thread of the process is doing, as lines for the log: for an operator who sends SIGUSR2.

Bounded, whatever there is to tell: so many tasks, so many threads, so many frames of each. A thread of its own looks and writes,
so that an event loop that stands still is shown, too, and one that runs goes on.
"""

import asyncio
import itertools
import logging
import math
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # who asks is answered, whatever --log-level says

MAX_STACKS = 100
"""Tasks, and threads, that are told."""

MAX_FRAMES = 12
"""Innermost frames that are told of each."""

WIDTH = 200
"""Characters of a task's name or of a file's that are told."""


SECONDS_BETWEEN = 1.0
"""At most one signal in this time is answered."""


@contextmanager
def logged_on(number: int) -> Iterator[None]:
    """Has each signal of this number answered by the tasks of the main thread's event loop, and all threads, in the log.

    From the main thread. A signal within a second of the last answer, or while it is written, gets none.
    """
    answering = threading.Lock()
    answered = -math.inf

    def answer(loop: asyncio.AbstractEventLoop | None) -> None:
        try:
            log.info("%s: what each task and thread does", signal.Signals(number).name)
            for line in told(() if loop is None else asyncio.all_tasks(loop)):
                log.info("%s", line)
        except Exception:
            log.exception("the tasks and threads could not be told")
        finally:
            answering.release()

    def asked(_number: int, _frame: FrameType | None) -> None:
        # Wherever the main thread was interrupted, it may be holding any lock: nothing more is done here.
        nonlocal answered
        # The main thread waits for each new thread. Signals that come faster would interrupt that wait with the next start.
        if time.monotonic() - answered < SECONDS_BETWEEN:
            return
        if answering.acquire(blocking=False):
            answered = time.monotonic()
            loop = None
            with suppress(RuntimeError):  # it has not begun, or has ended
                loop = asyncio.get_running_loop()
            try:
                threading.Thread(target=answer, args=[loop], name="stacks", daemon=True).start()
            except RuntimeError:  # the process may have no more threads
                answering.release()

    before = signal.signal(number, asked)
    try:
        yield
    finally:
        signal.signal(number, before)


def told(tasks: Iterable["asyncio.Task[Any]"]) -> Iterator[str]:
    """A line for each task and each thread, and one for each of its frames, the innermost last."""
    known = sorted(tasks, key=lambda task: task.get_name())
    yield f"{len(known)} tasks:"
    for task in known[:MAX_STACKS]:
        coroutine = task.get_coro()
        named = getattr(coroutine, "__qualname__", None) or repr(coroutine)
        yield f"  task {_short(task.get_name())}: {_short(named)}"
        yield from _frames(awaited(task))
    yield from _left_out(len(known))
    frames = sys._current_frames()  # noqa: SLF001 - the interpreter's own, and there is no other
    threads = sorted(threading.enumerate(), key=lambda thread: thread.name)
    yield f"{len(threads)} threads:"
    for thread in threads[:MAX_STACKS]:
        yield f"  thread {_short(thread.name)} ({thread.native_id}{', daemon' if thread.daemon else ''})"
        if (frame := frames.get(thread.ident or 0)) is not None:
            innermost = itertools.islice(traceback.walk_stack(frame), MAX_FRAMES + 1)
            yield from _frames([(each.f_code, line) for each, line in innermost][::-1])
    yield from _left_out(len(threads))


_WAITING = (("cr_frame", "cr_await"), ("ag_frame", "ag_await"), ("gi_frame", "gi_yieldfrom"))
"""Of a coroutine, an asynchronous generator and a generator: its frame, and what it waits for."""


def awaited(task: "asyncio.Task[Any]") -> list[tuple[CodeType, int]]:
    """Where a task stands: the code and line of each coroutine on the way to what it waits for, the innermost last.

    `Task.get_stack` knows the outermost alone.
    """
    found: list[tuple[CodeType, int]] = []
    waits_on: Any = task.get_coro()
    while len(found) < 10 * MAX_FRAMES:
        # Asked for once: the loop runs on meanwhile, and a coroutine that has ended has no frame any more.
        seen = ((getattr(waits_on, frame, None), inner) for frame, inner in _WAITING)
        frame, inner = next((pair for pair in seen if pair[0] is not None), (None, ""))
        if frame is None:
            break
        found.append((frame.f_code, frame.f_lineno))
        waits_on = getattr(waits_on, inner)
    return found


def _frames(stack: list[tuple[CodeType, int]]) -> Iterator[str]:
    if len(stack) > MAX_FRAMES:
        yield "    ..."
    for code, line in stack[-MAX_FRAMES:]:
        yield f"    {_short(code.co_filename)}:{line} in {code.co_name}"


def _left_out(count: int) -> Iterator[str]:
    if count > MAX_STACKS:
        yield f"  and {count - MAX_STACKS} more"


def _short(text: str) -> str:
    return text if len(text) <= WIDTH else f"...{text[-WIDTH:]}"
