"""One nvidia-cuda-mps-control as a child process: started, asked, and ended with all that it started."""

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from gpu_plugin.mps import leftovers, tether
from gpu_plugin.mps.errors import MpsError
from gpu_plugin.mps.plan import MpsDaemon
from gpu_plugin.threads import DaemonThreads, Job, begin

log = logging.getLogger(__name__)

PROGRAM = "nvidia-cuda-mps-control"

PROBE_COMMAND = "get_default_active_thread_percentage"
"""What a control daemon that works can always answer (NVIDIA's plugin asks the same)."""

_LONGEST_LINE = 1000
_MOST_CHUNKS = 64
"""Reads in a row: a daemon that talks without end holds up nobody."""

_SWEEP_PATIENCE = 5.0


def find_program(roots: Sequence[str], path: str | None = None) -> str:
    """The control program: under one of these driver roots, else on `path` (None: $PATH).

    Raises:
        MpsError: it is nowhere, with the places that were looked at.
    """
    places = [f"{root.rstrip('/')}/usr/bin/{PROGRAM}" for root in roots if root.rstrip("/")]
    for place in places:
        if os.access(place, os.X_OK):
            return place
    found = shutil.which(PROGRAM, path=path)
    if found is None:
        raise MpsError(
            f"no {PROGRAM} at {', '.join([*places, '$PATH'])}; install the driver's compute utilities, "
            "or say where it is with --mps-control-binary"
        )
    return found


class ControlDaemon:
    """One control daemon and its servers, from start to end."""

    def __init__(self, daemon: MpsDaemon, root: Path, control: Sequence[str]) -> None:
        """Takes what the daemon is to be, the MPS root, and the control program with what arguments it always gets."""
        self.daemon = daemon
        self._root = root
        self._control = tuple(control)
        self._process: subprocess.Popen[bytes] | None = None
        self._exit: Job[int] | None = None
        self._output: int | None = None
        self._rest = b""
        self._last_line = ""

    @property
    def pid(self) -> int:
        """Its process id; 0 before it was started."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Starts it in the foreground, in a process group of its own; it dies with this process.

        Raises:
            MpsError: it cannot be started.
        """
        marked = {leftovers.VARIABLE: leftovers.mark(self._root, self.daemon.resource)}
        # asyncio's own processes count as running for as long as a child of theirs holds their output open, as servers do.
        output, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(theirs, True)
        try:
            self._process = subprocess.Popen(  # noqa: S603, ASYNC220 - no shell; it returns once forked
                [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *self._control, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=subprocess.STDOUT,
                env=self._environment(marked),
                start_new_session=True,
            )
        except OSError as error:
            os.close(output)
            raise MpsError(f"{sys.executable} cannot be started: {error.strerror}") from None
        finally:
            os.close(theirs)
        self._output = output
        asyncio.get_running_loop().add_reader(output, self._read)
        self._exit = begin(self._process.wait, "mps-daemon-exit")

    async def exited(self) -> str:
        """Waits until it has exited by itself, and gives a sentence that says how."""
        assert self._exit is not None
        await asyncio.wait([self._exit.done])
        self._read()
        status = self._exit.done.result()
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status}"
        return f"{PROGRAM} {how}{f': {self._last_line}' if self._last_line else ''}"

    async def ask(self, command: str, patience: float) -> str:
        """What it answers to a command.

        Raises:
            MpsError: it refuses, or does not answer within `patience` seconds.
        """
        try:
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - no shell; it returns once forked
                self._control,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment({}),
                start_new_session=True,
            )
        except OSError as error:
            raise MpsError(f"{self._control[0]} cannot be started: {error.strerror}") from None
        answered = begin(lambda: process.communicate(f"{command}\n".encode())[0], "mps-command")
        try:
            await asyncio.wait([answered.done], timeout=patience)
            if not answered.done.done():
                raise MpsError(f"its control has not answered {command!r} for {patience:g} s")
        finally:
            if not answered.done.done():
                process.kill()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([answered.done], timeout=1)
        answer = " ".join(answered.done.result().decode(errors="replace").split())[:_LONGEST_LINE]
        if process.returncode:
            raise MpsError(f"its control answers {command!r} with status {process.returncode}: {answer or 'no word'}")
        return answer

    async def end(self, patience: float) -> None:
        """Lets it quit, for at most `patience` seconds, then kills it; nothing of it is left when this returns."""
        if self._process is not None and self._exit is not None and not self._exit.done.done():
            with anyio.move_on_after(patience):
                with suppress(MpsError):
                    await self.ask("quit", patience)
                await asyncio.wait([self._exit.done])
            if not self._exit.done.done():
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await asyncio.wait([self._exit.done], timeout=patience)
            if not self._exit.done.done():
                log.error("%s: its MPS daemon (process %d) cannot be killed", self.daemon.resource, self.pid)
        await self.end_leftovers()
        self._close_output()

    async def end_leftovers(self) -> None:
        """Kills what this daemon, or one that was run for the resource before, has left."""
        left = await end_leftovers(self._root, self.daemon.resource)
        if left:
            log.warning("%s: killed what an MPS daemon of it left: processes %s", self.daemon.resource, left)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        directory = os.path.dirname(self._control[0])  # noqa: PTH120 - the server lies beside it, under a driver root too
        path = os.pathsep.join(part for part in (directory, inherited.get("PATH", os.defpath)) if part)
        return {**inherited, **self.daemon.environment, **more, "PATH": path}

    def _read(self) -> None:
        """Passes on what it says, a line at a time, as debugging; the last line is kept for the reason of its end."""
        for _ in range(_MOST_CHUNKS):
            if self._output is None:
                return
            try:
                chunk = os.read(self._output, 4096)
            except BlockingIOError:
                return
            *lines, rest = (self._rest + chunk).split(b"\n")
            self._rest = rest[-_LONGEST_LINE:]
            for line in lines if chunk else [rest]:
                self._say(line)
            if not chunk:
                self._close_output()

    def _close_output(self) -> None:
        if self._output is not None:
            asyncio.get_running_loop().remove_reader(self._output)
            os.close(self._output)
            self._output = None

    def _say(self, line: bytes) -> None:
        text = line[:_LONGEST_LINE].decode(errors="replace").strip()
        if text:
            self._last_line = text
            log.debug("%s: %s", self.daemon.resource, text)


async def end_leftovers(root: Path, resource: str = "") -> list[int]:
    """Kills what daemons under this root have left, of one resource or of all. Gives process ids."""
    threads = DaemonThreads("mps-processes")
    try:
        return await threads.run(lambda: leftovers.end(leftovers.mark(root, resource)), _SWEEP_PATIENCE)
    except (OSError, TimeoutError) as error:
        log.warning("processes of MPS daemons under %s may be left: %s", root, error)
        return []
    finally:
        threads.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
