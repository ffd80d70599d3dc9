"""Logs the stacks of all tasks and threads when an operator sends SIGUSR2.

The numbers of tasks, threads and frames are limited. A thread of its own reads and logs the stacks, so that this works for a
blocked event loop too and does not block a running loop.
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
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # these lines are logged at any --log-level

MAX_STACKS = 100  # largest number of tasks, and of threads, that are logged
MAX_FRAMES = 12  # largest number of frames that are logged for each; the innermost
WIDTH = 200  # longest name of a task or file in characters; only its end is logged if it is longer
SECONDS_BETWEEN = 1.0  # shortest time in seconds between two answered signals


@contextmanager
def logged_on(number: int) -> Iterator[None]:
    """Log the stacks of the main event loop's tasks and of all threads at each signal of this number.

    Call it on the main thread. A signal within a second of the last answer, or while an answer is written, is ignored.
    """
    answering = threading.Lock()
    answered = -math.inf

    def answer(loop: asyncio.AbstractEventLoop | None) -> None:
        try:
            log.info("%s: stacks of all tasks and threads", signal.Signals(number).name)
            for line in told(() if loop is None else asyncio.all_tasks(loop)):
                log.info("%s", line)
        except Exception:
            log.exception("the stacks of tasks and threads could not be logged")
        finally:
            answering.release()

    def asked(_number: int, _frame: FrameType | None) -> None:
        # The interrupted main thread may hold any lock, so do nothing here that might need a lock.
        nonlocal answered
        # To start a thread, the main thread waits for it. Signals in quick succession would interrupt each wait by a new start.
        if time.monotonic() - answered < SECONDS_BETWEEN:
            return
        if answering.acquire(blocking=False):
            answered = time.monotonic()
            loop = None
            with suppress(RuntimeError):  # the event loop is not running yet, or has ended
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
    """Return a line for each task and each thread, followed by a line for each of its frames, the innermost last."""
    known = sorted(tasks, key=lambda task: task.get_name())
    yield f"{len(known)} tasks:"
    for task in known[:MAX_STACKS]:
        coroutine = task.get_coro()
        named = getattr(coroutine, "__qualname__", None) or repr(coroutine)
        yield f"  task {_short(task.get_name())}: {_short(named)}"
        yield from _frames(awaited(task))
    yield from _left_out(len(known))
    frames = sys._current_frames()  # noqa: SLF001 - there is no public function for the frames of other threads
    threads = sorted(threading.enumerate(), key=attrgetter("name"))
    yield f"{len(threads)} threads:"
    for thread in threads[:MAX_STACKS]:
        yield f"  thread {_short(thread.name)} ({thread.native_id}{', daemon' if thread.daemon else ''})"
        if (frame := frames.get(thread.ident or 0)) is not None:
            innermost = itertools.islice(traceback.walk_stack(frame), MAX_FRAMES + 1)
            yield from _frames([(each.f_code, line) for each, line in innermost][::-1])
    yield from _left_out(len(threads))


# The attributes for the frame and for the awaited object: of a coroutine, an asynchronous generator and a generator.
_WAITING = (("cr_frame", "cr_await"), ("ag_frame", "ag_await"), ("gi_frame", "gi_yieldfrom"))


def awaited(task: "asyncio.Task[Any]") -> list[tuple[CodeType, int]]:
    """Return the stack of a task: the code and line of each awaited coroutine, the innermost last.

    `Task.get_stack` returns only the outermost coroutine.
    """
    found: list[tuple[CodeType, int]] = []
    waits_on: Any = task.get_coro()
    while len(found) < 10 * MAX_FRAMES:
        # Read the frame only once: the loop continues to run, and a finished coroutine has no frame.
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
