"""Measured processes. They start with a clean environment, are always ended by their own pid, and are read from /proc."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bench.plan import PATIENCE, MeasurementError

ROOT = Path(__file__).resolve().parent.parent

DAEMON = str(Path(sys.executable).with_name("gpu-plugin"))
PROFILE = "hgx-h100"

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
"""Variables that processes get. No other variable can change the daemon's settings or keep Python from using its bytecode."""

_PROCESS_CPU_CLOCK = 2
"""CPUCLOCK_SCHED, the low bits of the clock id of a process from clock_getcpuclockid(3)."""


class Child:
    """A running process. `began` is the perf_counter() just before its start. Standard error is written to `log`."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        with log.open("ab") as errors:
            self.began = time.perf_counter()
            self._process = subprocess.Popen(
                arguments, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            )
        self.pid = self._process.pid
        self._descriptor = os.pidfd_open(self.pid)

    @property
    def output(self) -> IO[bytes]:
        """Its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout

    def exited(self) -> float:
        """Wait for its end and return the perf_counter() of the end. Raises MeasurementError if it does not end or fails."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        ended = poll.poll(PATIENCE * 1000)
        at = time.perf_counter()
        if not ended:
            raise MeasurementError(f"{self._process.args!r} does not end: {self.log_tail()}")
        status = self._process.wait()
        if status not in {0, -signal.SIGTERM}:
            raise MeasurementError(f"{self._process.args!r} ended with status {status}: {self.log_tail()}")
        return at

    def terminate(self) -> float:
        """Send SIGTERM and wait for the end. Returns the seconds from SIGTERM to the end."""
        sent = time.perf_counter()
        self._process.send_signal(signal.SIGTERM)
        return self.exited() - sent

    def close(self) -> None:
        """Kill the process if it still runs, and close its files."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._descriptor)
        self.output.close()

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-5:]) or "it logged nothing"


@contextmanager
def running(arguments: Sequence[str], log: Path) -> Iterator[Child]:
    """Run a process until the context ends."""
    child = Child(arguments, log)
    try:
        yield child
    finally:
        child.close()


def daemon_command(
    directory: Path, *more: str, profile: str = PROFILE, program: Sequence[str] = (DAEMON,)
) -> list[str]:
    """Return the command line of the daemon on a simulated node. `directory` is the kubelet's, `program` is gpu-plugin."""
    directories = ["--device-plugin-dir", str(directory), "--state-dir", str(state_dir(directory))]
    return [*program, "run", "--simulate", profile, *directories, *more]


def state_dir(directory: Path) -> Path:
    """Return the state directory of the daemon of `daemon_command(directory)`."""
    return directory / "state"


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process in seconds, of all its threads, including ended threads; nanosecond resolution."""
    return time.clock_gettime((~pid << 3) | _PROCESS_CPU_CLOCK)


def memory(pid: int, field: str) -> float:
    """Return a size from /proc/PID/status, such as VmRSS or VmHWM, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) / 1024
    raise MeasurementError(f"/proc/{pid}/status has no {field}")


def stolen() -> tuple[float, float]:
    """Return CPU time of this machine since its start, in ticks: the time stolen by its host, and the total."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return float(fields[7]), float(sum(fields))


def threads(pid: int) -> int:
    """Return the number of threads of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
