"""An nvidia-cuda-mps-control daemon as a child process: starts it, sends it commands, and ends it with all its servers.

A control daemon starts server processes, which survive if the daemon is killed. To find them, the daemon is started with a mark
in its environment, which its servers inherit. No client in a pod has this mark. Unlike a process id, it is never reused.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from gpu_plugin.mps import control_program, tether
from gpu_plugin.mps.control_program import PROGRAM
from gpu_plugin.mps.errors import MpsError
from gpu_plugin.mps.plan import MpsDaemon
from gpu_plugin.runtime.threads import Job, begin

log = logging.getLogger(__name__)

# The environment variable that marks a daemon and its servers, with the MPS root and the resource in its value
MARK = "GPU_PLUGIN_MPS_DAEMON"

# Seconds to wait until a killed process has ended. A process stuck in the driver takes longer and stays.
_KILL_PATIENCE = 2.0

_LONGEST_LINE = 1000  # bytes
_OUTPUT_PATIENCE = 0.5  # seconds for the last line after the exit; servers that survive keep the output open

_SWEEP_PATIENCE = 5.0  # seconds


class ControlDaemon:
    """One control daemon and its servers, from start to end."""

    def __init__(self, daemon: MpsDaemon, root: Path, control: Sequence[str]) -> None:
        """Store the daemon's description, the MPS root, and the control program with its constant arguments."""
        self.daemon = daemon
        self._root = root
        self._control = tuple(control)
        self._process: subprocess.Popen[bytes] | None = None
        self._exit: Job[int] | None = None
        self._output: Job[None] | None = None
        self._last_line = ""

    @property
    def pid(self) -> int:
        """The daemon's process id; 0 before the start."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the daemon in the foreground, in a process group of its own. It is killed if this process ends.

        Raises MpsError if it cannot be started.
        """
        marked = {MARK: mark(self._root, self.daemon.resource)}
        # Not a process of asyncio: that reports the exit only when all children with its output, such as servers, close it.
        try:
            self._process = subprocess.Popen(  # noqa: S603, ASYNC220 - no shell; it returns once forked
                [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), self.daemon.pipe, *self._control, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=control_program.environment(self._control[0], self.daemon.environment, marked),
                start_new_session=True,
            )
        except OSError as error:
            raise MpsError(f"{sys.executable} cannot be started: {error.strerror}") from None
        self._output = begin(self._log_output, "mps-daemon-output")
        self._exit = begin(self._process.wait, "mps-daemon-exit")

    async def exited(self) -> str:
        """Wait until the daemon has exited by itself, and return a sentence with its exit status or signal."""
        assert self._exit is not None
        assert self._output is not None
        await self._exit.wait()
        await self._output.wait(_OUTPUT_PATIENCE)
        status = self._exit.done.result()
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status}"
        return f"{PROGRAM} {how}{f': {self._last_line}' if self._last_line else ''}"

    async def ask(self, *commands: str, patience: float) -> str:
        """Give the daemon commands on one connection. Return its answers in one line; some commands have an empty answer.

        Raises:
            MpsError: the daemon is not there, or does not answer within `patience` seconds.
        """
        process = control_program.start_client(self._control, self.daemon.environment)
        command = "\n".join(commands)
        job = begin(lambda: control_program.answer_of(process, command, patience), "mps-command")
        try:
            if not await job.wait(patience):
                raise control_program.unanswered(command, patience)
            return job.done.result()
        finally:
            process.kill()

    async def end(self, patience: float) -> None:
        """Send quit, wait up to `patience` seconds, then kill the daemon. Then kill all processes that it has left."""
        if self._process is not None and self._exit is not None and not self._exit.returned:
            with anyio.move_on_after(patience):
                with suppress(MpsError):
                    await self.ask("quit", patience=patience)
                await self._exit.wait()
            if not self._exit.returned:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await self._exit.wait(patience)
            if not self._exit.returned:
                log.error("%s: its MPS daemon (process %d) cannot be killed", self.daemon.resource, self.pid)
        await end_leftovers(self._root, self.daemon.resource)

    def _log_output(self) -> None:
        """Log the daemon's output at level debug, line by line, and keep the last line for the message about its exit."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while line := stream.readline(_LONGEST_LINE):
                if text := line.decode(errors="replace").strip():
                    self._last_line = text
                    log.debug("%s: %s", self.daemon.resource, text)


async def end_leftovers(root: Path, resource: str = "") -> None:
    """Kill and log processes that daemons under this root have left, of one resource or of all resources."""
    try:
        left = await begin(lambda: _end(mark(root, resource)), "mps-processes").result(_SWEEP_PATIENCE)
    except (OSError, TimeoutError) as error:
        log.warning("processes of MPS daemons under %s may be left: %s", root, error)
        return
    if left and resource:
        log.warning("%s: killed processes that its MPS daemon had left: %s", resource, left)
    elif left:
        log.warning("killed processes that an earlier gpu-plugin mps had left: %s", left)


def mark(root: Path, resource: str = "") -> str:
    """Return the variable's value for a resource; without a resource, the common prefix of all values under this root.

    The value has the root's device and inode, since each container may have the root at another path.
    """
    status = root.stat()
    return f"{status.st_dev}:{status.st_ino}:{resource}"


def _end(value: str) -> list[int]:
    """Kill all processes with this mark, and wait until they have ended. Return their ids.

    A mark without a resource matches all resources under its root.
    """
    ended: dict[int, None] = {}
    until = time.monotonic() + _KILL_PATIENCE
    while (found := _marked(value)) and time.monotonic() < until:
        for pid in found:
            ended[pid] = None
            _kill(pid, value, until)
    return [*ended]


def _marked(value: str) -> list[int]:
    """Return the ids of the processes with this mark."""
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal() and _carries(entry.path, value)]


def _carries(process: str, value: str) -> bool:
    """Return whether the process of this directory has the mark. A zombie has no environment and no mark."""
    wanted = f"{MARK}={value}".encode()
    try:
        variables = Path(process, "environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended, or belongs to another user and so is not an MPS process of ours
        return False
    return any(variable == wanted or (value.endswith(":") and variable.startswith(wanted)) for variable in variables)


def _kill(pid: int, value: str, until: float) -> None:
    """Kill a process with this mark, and wait until it has closed its files and released its locks, which takes longer."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # kernels before 5.3 have no pidfd
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        while _runs(pid) and time.monotonic() < until:
            time.sleep(0.01)
        return
    try:
        if not _carries(f"/proc/{pid}", value):
            return  # another process has the id already
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        with suppress(OSError):  # works only for child processes, such as orphans if this is process 1 of a container
            os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG)
    finally:
        os.close(descriptor)


def _runs(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] != b"Z"
    except OSError:
        return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
