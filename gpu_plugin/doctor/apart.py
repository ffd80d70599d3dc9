"""A piece of work in a process of its own, so that what hangs in the kernel holds that process and not the one that tells of it.

A thread that a driver holds in the kernel cannot be ended, and neither can its process: whoever waited for that would wait, too.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_MAX_RESULT_BYTES = 2 * 1024 * 1024
"""Bytes of a result that are taken: the longest config file has half of it."""

_EXIT_SECONDS = 0.5
"""Seconds that the process may take to end once it has said what it had to say, or was killed."""

_POLL_INTERVAL = 0.01
"""Seconds between two looks whether it has: one that is stuck tells nobody."""


class ApartError(Exception):
    """The process ended without a result, or gave none in time; the text says which."""


class StuckError(ApartError):
    """It gave none in time."""


def apart(work: Callable[[], bytes], limit: float) -> bytes:
    """The result of `work`, made in a process of its own within `limit` seconds.

    In a process with other threads, which none can be forked from in good order, it is made right here.

    Raises:
        StuckError: there is no result in time.
        ApartError: there is none at all. What `work` raises is for it to put into its result.
    """
    if threading.active_count() > 1:
        return work()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _do(work, writing)
    os.close(writing)
    try:
        return _received(reading, time.monotonic() + limit, limit)
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(reading)
        _part_with(child)


def _do(work: Callable[[], bytes], writing: int) -> None:
    """Does the work and ends this process, without anything that the other one has begun being ended here."""
    status = 1
    try:
        result = work()
        view = memoryview(len(result).to_bytes(8) + result)
        while view:
            view = view[os.write(writing, view) :]
        status = 0
    finally:
        os._exit(status)  # also from an interrupt: nothing of the other process's stack is to run here


def _received(reading: int, until: float, limit: float) -> bytes:
    got = bytearray()
    while len(got) < 8 or len(got) < 8 + int.from_bytes(got[:8]):
        if not select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
            raise StuckError(f"no answer within {round(limit, 1):g} s: something holds the process that looks")
        piece = os.read(reading, 65536)
        if not piece:
            raise ApartError("the process that looks has ended without an answer: was it killed for lack of memory?")
        got += piece
        if len(got) > _MAX_RESULT_BYTES:
            raise ApartError(f"the answer is longer than {_MAX_RESULT_BYTES} bytes")
    return bytes(got[8:])


def _part_with(child: int) -> None:
    """Takes notice of the process's end, unless it is stuck: then it is left to whoever reaps orphans."""
    until = time.monotonic() + _EXIT_SECONDS
    with suppress(ChildProcessError):
        while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < until:
            time.sleep(_POLL_INTERVAL)
