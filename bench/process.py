"""Processes under measurement: begun with a clean environment, ended by their own pid whatever happens, read from /proc."""

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
"""Variables handed on; none that would change the daemon's settings or keep Python from using its bytecode."""

_PROCESS_CPU_CLOCK = 2
"""CPUCLOCK_SCHED, the low bits of a process' clock id as clock_getcpuclockid(3) makes it."""


class Child:
    """A running process. `began` is the perf_counter() just before it was made; standard error goes to `log`."""

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
        """What it prints."""
        assert self._process.stdout is not None
        return self._process.stdout

    def exited(self) -> float:
        """Waits for its end and gives the perf_counter() of it. Raises MeasurementError if it does not come or is a failure."""
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
        """Sends SIGTERM and waits for the end. Returns the seconds it took."""
        sent = time.perf_counter()
        self._process.send_signal(signal.SIGTERM)
        return self.exited() - sent

    def close(self) -> None:
        """Ends it at once if it still runs, and lets go of it."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._descriptor)
        self.output.close()

    def log_tail(self) -> str:
        """The last lines it logged."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-5:]) or "it logged nothing"


@contextmanager
def running(arguments: Sequence[str], log: Path) -> Iterator[Child]:
    """A process for as long as the context lasts."""
    child = Child(arguments, log)
    try:
        yield child
    finally:
        child.close()


def daemon_command(
    directory: Path, *more: str, profile: str = PROFILE, program: Sequence[str] = (DAEMON,)
) -> list[str]:
    """The command line of the daemon on a simulated node, with `directory` as the kubelet's; `program` is gpu-plugin."""
    directories = ["--device-plugin-dir", str(directory), "--state-dir", str(state_dir(directory))]
    return [*program, "run", "--simulate", profile, *directories, *more]


def state_dir(directory: Path) -> Path:
    """Where the daemon of `daemon_command(directory)` keeps its state."""
    return directory / "state"


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all its threads, also those that have ended; of nanosecond resolution."""
    return time.clock_gettime((~pid << 3) | _PROCESS_CPU_CLOCK)


def memory(pid: int, field: str) -> float:
    """A field of /proc/PID/status that is a size, as VmRSS or VmHWM, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) / 1024
    raise MeasurementError(f"/proc/{pid}/status has no {field}")


def stolen() -> tuple[float, float]:
    """CPU time of this machine since its start, in ticks: what its host took for others, and all of it."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return float(fields[7]), float(sum(fields))


def threads(pid: int) -> int:
    """How many threads a process has."""
    return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
