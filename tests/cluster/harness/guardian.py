"""Remove the cluster when the process that started it ends, also after a kill.

`Guardian` takes a lock that only one cluster on the machine can have, and starts a small process that reads a pipe. When the pipe
closes, because its owner has finished or is dead, that process removes the rest of the cluster. It shares the lock, so a new run
begins only after that.
"""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

from .layout import LOCK, Layout
from .sweep import LeftoverError, sweep
from .wait import DeadlineError, NotYet, wait_until

LOCKED_WITHIN = 60.0
"""Seconds to wait for the end of another run and of the removal of its cluster."""


class OccupiedError(Exception):
    """Another run of the cluster tests has the lock."""


class Guardian:
    """Holds the lock and the pipe."""

    def __init__(self, layout: Layout) -> None:
        """Take the lock and start the waiting process.

        Raises:
            OccupiedError: another run did not end within `LOCKED_WITHIN` seconds.
        """
        self._lock = LOCK.open("a")
        try:
            wait_until(self._take, "the lock is free", within=LOCKED_WITHIN)
        except DeadlineError as error:
            self._lock.close()
            raise OccupiedError(f"another run of the cluster tests holds {LOCK}") from error
        package = __package__ or ""
        root = Path(__file__).resolve().parents[len(package.split("."))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{package}.guardian", str(layout.root)],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
            pass_fds=[self._lock.fileno()],
            start_new_session=True,
        )

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NotYet("held by another process") from error

    def release(self) -> None:
        """Let the waiting process remove the cluster, wait for its end, and release the lock.

        Raises:
            LeftoverError: the removal was incomplete. The waiting process has written the details to standard error.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        status = self._process.wait()
        self._lock.close()
        if status:
            raise LeftoverError(f"the removal of the cluster failed with exit status {status}, see above")


def _guard(layout: Layout) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(layout)


if __name__ == "__main__":
    _guard(Layout(Path(sys.argv[1])))
