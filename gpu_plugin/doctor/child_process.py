"""Work in a child process, so that what hangs in the kernel holds the child and not the process that reports.

A thread that a driver holds in the kernel cannot be ended, and neither can its process: whoever waited for that would wait, too.
"""

import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

_MAX_RESULT_BYTES = 2 * 1024 * 1024
"""Bytes of a result that are taken: the longest config file has half of it."""

_EXIT_SECONDS = 0.5
"""Seconds that the child may take to end once it has answered or was killed."""

_POLL_INTERVAL = 0.01
"""Seconds between two looks whether it has: one that is stuck tells nobody."""


class ChildError(Exception):
    """The child ended without a result, or gave none in time; the text says which."""


class ChildTimeoutError(ChildError):
    """The child gave no result in time."""


def in_child(work: Callable[[], T], limit: float) -> T:
    """The result of `work`, made in a child process within `limit` seconds; what it raises is raised here.

    In a process with other threads, which none can be forked from in good order, it is made right here.

    Raises:
        ChildTimeoutError: there is no result in time.
        ChildError: there is none at all.
    """
    if threading.active_count() > 1:
        return work()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _answer(work, writing)
    os.close(writing)
    try:
        result, error = pickle.loads(_received(reading, time.monotonic() + limit, limit))  # noqa: S301 - from our own child
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(reading)
        _reap(child)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _answer(work: Callable[[], object], writing: int) -> None:
    """Sends what the work gives or raises and ends this process, without ending anything that the parent has begun."""
    status = 1
    try:
        try:
            result = pickle.dumps((work(), None))
        except Exception as error:  # noqa: BLE001 - raised again by the parent
            result = pickle.dumps((None, error))
        view = memoryview(len(result).to_bytes(8) + result)
        while view:
            view = view[os.write(writing, view) :]
        status = 0
    finally:
        os._exit(status)  # also from an interrupt: nothing of the parent's stack is to run here


def _received(reading: int, until: float, limit: float) -> bytes:
    got = bytearray()
    while len(got) < 8 or len(got) < 8 + int.from_bytes(got[:8]):
        if not select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
            raise ChildTimeoutError(f"no answer within {round(limit, 1):g} s: something holds the process that looks")
        piece = os.read(reading, 65536)
        if not piece:
            raise ChildError("the process that looks has ended without an answer: was it killed for lack of memory?")
        got += piece
        if len(got) > _MAX_RESULT_BYTES:
            raise ChildError(f"the answer is longer than {_MAX_RESULT_BYTES} bytes")
    return bytes(got[8:])


def _reap(child: int) -> None:
    """Waits for the child's end, unless it is stuck: then it is left to whoever reaps orphans."""
    until = time.monotonic() + _EXIT_SECONDS
    with suppress(ChildProcessError):
        while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < until:
            time.sleep(_POLL_INTERVAL)
