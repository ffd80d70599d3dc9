"""Writes log lines on a thread of its own, so that logging never waits for the pipe or disk behind standard error.

If the reader stops, such as a container runtime that does not read the output, the pipe is full after 64 KiB. Further lines
wait in a bounded queue. Beyond its limit lines are dropped and counted, and the count is logged once lines are read again.
"""

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable

MAX_BYTES = 1024 * 1024  # largest size of lines that wait to be written; about 5,000 lines
PATIENCE = 0.5  # seconds for which the end of the process waits for the remaining lines to be written


class LogWriter:
    """A bounded queue of lines and the daemon thread that empties it. Safe between threads."""

    def __init__(
        self, write: Callable[[bytes], None], dropped_line: Callable[[int], str], limit: int = MAX_BYTES
    ) -> None:
        """Store a function that writes all bytes or raises OSError, and a function that makes the line about dropped lines."""
        self._write = write
        self._dropped_line = dropped_line
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._logged_dropped = 0
        self._busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.dropped = 0  # number of lines that were dropped since the start

    def put(self, line: str) -> None:
        """Queue a line for writing, or drop it if the queue is full. Never waits for the writing."""
        content = line.encode(errors="backslashreplace") + b"\n"
        with self._changed:
            if self._bytes + len(content) > self._limit:
                self.dropped += 1
                return
            self._lines.append(content)
            self._bytes += len(content)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float = PATIENCE) -> bool:
        """Wait up to `seconds` until all lines are written. Return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._busy, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines))
                content = self._lines.popleft()
                self._bytes -= len(content)
                self._busy = True
            try:
                self._write(content)
            except (OSError, ValueError):  # a full disk, no reader, or a closed stream; only the count can report it
                with self._changed:
                    self.dropped += 1
            else:
                self._log_dropped()
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _log_dropped(self) -> None:
        dropped = self.dropped
        if dropped > self._logged_dropped:
            with contextlib.suppress(OSError, ValueError):  # repeated after a later line
                self._write(self._dropped_line(dropped - self._logged_dropped).encode() + b"\n")
                self._logged_dropped = dropped


def to_descriptor(descriptor: int) -> Callable[[bytes], None]:
    """Return a function that writes all bytes to a descriptor, however long it takes. It raises OSError.

    If only a part of a content was written, the next content begins on a new line. It does not use Python's sys.stderr: if
    a thread waits while it holds the lock of sys.stderr, the interpreter crashes at exit.
    """
    torn = False

    def write(content: bytes) -> None:
        nonlocal torn
        whole = b"\n" + content if torn else content
        left = memoryview(whole)
        try:
            while left:
                try:
                    left = left[os.write(descriptor, left) :]
                except BlockingIOError:  # another process made the shared pipe non-blocking
                    with contextlib.suppress(OSError):
                        select.select([], [descriptor], [])
        finally:
            if written := len(whole) - len(left):
                torn = whole[written - 1 : written] != b"\n"

    return write
