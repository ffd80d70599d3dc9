"""Events inside the real process, for tests. This directory is on PYTHONPATH, so the interpreter imports the module first.

STOP_AT: the process sends itself SIGTERM at the audit event (sys.addaudithook) of this number. They are counted from the first
long import on: imports, opened files, sockets, threads. STOP_COUNT: the file that gets their number at the exit.

HANG: a call (stat, open, read, write or flock) on files of the state directory HANG_IN does not return, for as long as the file
HANG_UNTIL is not there: as on a disk that does not answer. With HANG_SECONDS, each such call takes this time. The simulated
node's own files are no part of it.
"""

import atexit
import fcntl
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

FIRST_IMPORT = "gpu_plugin.cli"


def count_events(stop_at: int, count: str) -> None:
    """Has SIGTERM sent at this event of the main thread."""
    events = [-1]
    main = threading.main_thread()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if threading.current_thread() is not main or (
            events[0] < 0 and (event, arguments[:1]) != ("import", (FIRST_IMPORT,))
        ):
            return
        events[0] += 1
        if events[0] == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    sys.addaudithook(hook)
    if count:
        atexit.register(lambda: Path(count).write_text(str(events[0])))


if "STOP_AT" in os.environ or "STOP_COUNT" in os.environ:
    count_events(int(os.environ.get("STOP_AT", "-1")), os.environ.get("STOP_COUNT", ""))


def hang(call: str, directory: str, until: Path, seconds: float) -> None:
    """Delay this call on files of the directory by `seconds`, or until the file `until` exists."""

    def stop(of: str, file: object) -> None:
        if of != call or (isinstance(file, int) and file < 0):
            return
        path = Path(f"/proc/self/fd/{file}").readlink() if isinstance(file, int) else os.fspath(file)  # type: ignore[call-overload]
        inside = os.path.relpath(path, directory)
        if not inside.startswith(("..", "simulated", ".simulated", "dev", "driver-root")):
            begun = time.monotonic()
            while not until.exists() and time.monotonic() - begun < seconds:
                time.sleep(0.02)

    def wrapped(of: str, function):
        def wrapper(file, *arguments, **more):
            stop(of, file)
            return function(file, *arguments, **more)

        return wrapper

    class Slow(io.FileIO):
        """The file under each `os.fdopen`."""

        def readinto(self, buffer):
            stop("read", self.fileno())
            return super().readinto(buffer)

        def write(self, content):
            stop("write", self.fileno())
            return super().write(content)

    fdopen = os.fdopen

    def slow_fdopen(descriptor, mode="r", *arguments, **more):
        if mode == "rb":
            return io.BufferedReader(Slow(descriptor, mode))
        if mode == "wb":
            return io.BufferedWriter(Slow(descriptor, mode))
        return fdopen(descriptor, mode, *arguments, **more)

    os.fdopen = slow_fdopen  # type: ignore[assignment]
    for name, of in (("open", "open"), ("read", "read"), ("pread", "read"), ("write", "write"), ("pwrite", "write")):
        setattr(os, name, wrapped(of, getattr(os, name)))
    for name in ("stat", "lstat", "scandir"):
        setattr(os, name, wrapped("stat", getattr(os, name)))
    fcntl.flock = wrapped("flock", fcntl.flock)


if "HANG" in os.environ:
    hang(
        os.environ["HANG"],
        os.environ["HANG_IN"],
        Path(os.environ["HANG_UNTIL"]),
        float(os.environ.get("HANG_SECONDS", "inf")),
    )
