"""Work in a child process, so that a call that hangs in the kernel blocks the child and not the process that reports.

A thread that a driver holds in the kernel cannot be ended, and neither can its process.
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

_MAX_RESULT_BYTES = 2 * 1024 * 1024  # twice the size of the longest config file
_EXIT_SECONDS = 0.5  # for the child's end after its answer or after it was killed


class ChildError(Exception):
    """The child ended without a result, or sent no result in time; the text says which."""


class ChildTimeoutError(ChildError):
    """The child sent no result in time."""


def in_child(work: Callable[[], T], limit: float) -> T:
    """Run `work` in a child process for up to `limit` seconds, and return its result or raise its exception.

    A process with other threads cannot fork safely: there, `work` runs in the calling process.

    Raises:
        ChildTimeoutError: there is no result in time.
        ChildError: the child ended without a result.
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
        result, error = pickle.loads(_receive(reading, limit))  # noqa: S301 - from our own child
    except (EOFError, pickle.UnpicklingError):
        raise ChildError(
            "the process that runs the checks ended without an answer: was it killed for lack of memory?"
        ) from None
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
    """Send the result or the exception of `work`, and end this process without running the parent's exit handlers."""
    status = 1
    try:
        try:
            result = pickle.dumps((work(), None))
        except Exception as error:  # noqa: BLE001 - raised again by the parent
            result = pickle.dumps((None, error))
        with os.fdopen(writing, "wb") as stream:  # closed before the exit, which may hang
            stream.write(result)
        status = 0
    finally:
        os._exit(status)  # also after an interrupt: no code of the parent's stack may run here


def _receive(reading: int, limit: float) -> bytes:
    """Return all bytes until the other end is closed, within `limit` seconds."""
    until = time.monotonic() + limit
    received = b""
    while select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
        piece = os.read(reading, 65536)
        if not piece:
            return received
        received += piece
        if len(received) > _MAX_RESULT_BYTES:
            raise ChildError(f"the answer is longer than {_MAX_RESULT_BYTES} bytes")
    raise ChildTimeoutError(f"no answer within {round(limit, 1):g} s: the process that runs the checks hangs")


def _reap(child: int) -> None:
    """Wait up to `_EXIT_SECONDS` for the child's end. If it is stuck, init reaps it later."""
    until = time.monotonic() + _EXIT_SECONDS
    with suppress(ChildProcessError):
        while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < until:
            time.sleep(0.01)
