"""Finding and ending the processes of an MPS daemon that nobody supervises any more. Every call blocks.

A control daemon starts servers, and those outlive it if it is killed. All of them carry the mark that it was started with in
their environment, which no client in a pod does: a process id can be another's by now, this cannot.
"""

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "GPU_PLUGIN_MPS_DAEMON"
"""The environment variable that marks a daemon and its servers as those of one resource under one MPS root."""

_PATIENCE = 2.0
"""Seconds that a killed process may take to be gone; one stuck in the driver takes longer and is left behind."""


def mark(root: Path, resource: str = "") -> str:
    """The value of the variable for a resource; without one, what the values of all under this root begin with.

    The root is named by what it is, since each container may have it at another path.
    """
    status = root.stat()
    return f"{status.st_dev}:{status.st_ino}:{resource}"


def end(value: str, proc: Path = Path("/proc")) -> list[int]:
    """Kills every process that carries this mark, and waits until they are gone. Gives their ids.

    A mark without a resource is that of all resources under its root.
    """
    ended: list[int] = []
    until = time.monotonic() + _PATIENCE
    while (found := _marked(value, proc)) and time.monotonic() < until:
        for pid in found:
            if pid not in ended:
                ended.append(pid)
            _kill(pid, value, proc, until)
    return ended


def _marked(value: str, proc: Path) -> list[int]:
    return [
        int(entry.name) for entry in os.scandir(proc) if entry.name.isdecimal() and _carries(proc / entry.name, value)
    ]


def _carries(process: Path, value: str) -> bool:
    """Whether a process carries the mark; a zombie carries nothing."""
    wanted = f"{VARIABLE}={value}".encode()
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's and thus none of ours
        return False
    return any(variable == wanted or (value.endswith(":") and variable.startswith(wanted)) for variable in variables)


def _kill(pid: int, value: str, proc: Path, until: float) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # kernels before 5.3 have no such descriptors
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        return
    try:
        if not _carries(proc / str(pid), value):
            return  # the id is another's already
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        with suppress(OSError):  # only a process that fell to us, as to process 1 of a container, is ours to reap
            os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG)
    finally:
        os.close(descriptor)
