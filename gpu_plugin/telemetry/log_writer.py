"""Writes log lines from a thread of its own: whoever logs never waits for the pipe or the disk behind standard error.

A reader that has stopped, such as a runtime that does not take a container's output, fills the pipe after 64 KiB. What is
logged meanwhile waits in a bounded queue; beyond that it is dropped, counted, and said once lines are taken again.
"""

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable

MAX_BYTES = 1024 * 1024
"""What may wait to be written; some 5,000 lines."""

PATIENCE = 0.5
"""Seconds that the process's end waits at most for what is left to be written."""


class LogWriter:
    """A bounded queue of lines and the daemon thread that empties it. Safe between threads."""

    def __init__(
        self, write: Callable[[bytes], None], dropped_line: Callable[[int], str], limit: int = MAX_BYTES
    ) -> None:
        """Takes what writes bytes, all of them, or raises OSError; and the line that says how many lines were dropped."""
        self._write = write
        self._dropped_line = dropped_line
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._said = 0
        self._busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """Lines that were dropped since the start."""

    def put(self, line: str) -> None:
        """Has a line written, or drops it where too much waits already. Never waits for the writing."""
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
        """Waits until all is written, but not for longer than this. Returns whether it is."""
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
            except (OSError, ValueError):  # a full disk, no reader, or closed; there is nowhere to say so but the count
                with self._changed:
                    self.dropped += 1
            else:
                self._say_dropped()
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _say_dropped(self) -> None:
        dropped = self.dropped
        if dropped > self._said:
            with contextlib.suppress(OSError, ValueError):  # said with a later line, then
                self._write(self._dropped_line(dropped - self._said).encode() + b"\n")
                self._said = dropped


def to_descriptor(descriptor: int) -> Callable[[bytes], None]:
    """Writes all of what it is given to a descriptor, waiting as long as that takes. Raises OSError.

    What comes after a content of which only a part could be written begins on a line of its own. Not through Python's own
    standard error: its lock, held by a thread that waits, would end the process in a crash.
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
                except BlockingIOError:  # another process that has the same pipe made it non-blocking
                    with contextlib.suppress(OSError):
                        select.select([], [descriptor], [])
        finally:
            if written := len(whole) - len(left):
                torn = whole[written - 1 : written] != b"\n"

    return write
