"""A process of the cluster. It is started, stopped, killed and restarted by its process id."""

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from .layout import MARK, Layout
from .wait import wait_until


class PieceError(Exception):
    """A process of the cluster ended by itself, or did not end. The text contains the end of its log."""


class Piece(ABC):
    """A host process with its own log.

    A subclass defines the command line, and when the process counts as ready. `start` after `stop` or `kill` starts the process
    with the same ports and files.
    """

    name: ClassVar[str]
    ready_within: ClassVar[float] = 60.0
    stops_within: ClassVar[float] = 30.0

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._process: subprocess.Popen[bytes] | None = None
        self._told_to_end = False

    @abstractmethod
    def command(self) -> list[str]:
        """Program and arguments."""

    def prepare(self) -> None:  # noqa: B027 - most pieces read nothing
        """Write the files that the process reads at its start."""

    def environment(self) -> dict[str, str]:
        """Environment variables in addition to the variables of every process."""
        return {}

    def check_ready(self) -> None:  # noqa: B027 - some are ready once they run
        """Raise `NotYet` until the running process is ready."""

    @property
    def pid(self) -> int:
        """Process id of the running process.

        Raises:
            PieceError: the process does not run.
        """
        if self._process is None or not self.running:
            raise PieceError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def crashed(self) -> bool:
        """True if the process ended by itself."""
        return self._process is not None and not self.running and not self._told_to_end

    def start(self, *, wait: bool = True) -> None:
        """Start the process and, if `wait`, wait until it is ready.

        Raises:
            PieceError: the process already runs, or it ended before it was ready.
            DeadlineError: the process was not ready within `ready_within` seconds.
        """
        if self.running:
            raise PieceError(f"{self.name} is running already; stop it first")
        self._told_to_end = False
        self.prepare()
        command = self.command()
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.layout.root)}
        environment |= self.environment() | {MARK: str(self.layout.root)}
        with self._log.open("ab") as log:
            log.write(f"--- {' '.join(command)}\n".encode())
            log.flush()
            # Use a new session, so that Ctrl-C at the terminal reaches only the tests, which stop the processes in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.layout.root,
                env=environment,
                start_new_session=True,
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the process is ready.

        Raises:
            PieceError: the process ended.
            DeadlineError: the process was not ready within `ready_within` seconds.
        """

        def ready() -> None:
            process = self._process
            if process is None or process.poll() is not None:
                code = "it was never started" if process is None else f"exit status {process.returncode}"
                raise PieceError(f"{self.name} ended before it was ready: {code}. Its log ends:\n{self.log_tail()}")
            self.check_ready()

        wait_until(ready, f"{self.name} is ready", within=self.ready_within)

    def stop(self) -> int:
        """Send SIGTERM and wait for the end.

        Returns:
            The exit status, negative for a signal.

        Raises:
            PieceError: the process did not run, or was killed after `stops_within` seconds.
        """
        pid = self.pid
        self._told_to_end = True
        os.kill(pid, signal.SIGTERM)
        assert self._process is not None
        try:
            return self._process.wait(self.stops_within)
        except subprocess.TimeoutExpired:
            self.kill()
            raise PieceError(
                f"{self.name} ignored SIGTERM for {self.stops_within:g} s and was killed. Its log ends:\n{self.log_tail()}"
            ) from None

    def kill(self) -> None:
        """Send SIGKILL and wait for the end, if the process runs."""
        if self._process is not None:
            self._told_to_end |= self.running
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        """Stop with SIGTERM and start again."""
        self.stop()
        self.start()

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the log, over all starts of this run. Long lines are cut."""
        if not self._log.exists():
            return "(no log)"
        return "\n".join(line[:400] for line in self._log.read_text(errors="replace").splitlines()[-lines:])

    def log_size(self) -> int:
        """Return the present size of the log in bytes, for `log_since`."""
        return self._log.stat().st_size if self._log.exists() else 0

    def log_since(self, position: int) -> str:
        """Return the text that was logged after the log had `position` bytes."""
        with self._log.open("rb") as log:
            log.seek(position)
            return log.read().decode(errors="replace")

    @property
    def _log(self) -> Path:
        return self.layout.logs / f"{self.name}.log"


def run(
    command: list[str], *, within: float = 60.0, environment: dict[str, str] | None = None, may_end_with: int = 0
) -> str:
    """Run a short-lived program and return its standard output.

    Args:
        command: program and arguments.
        within: time limit in seconds.
        environment: replaces this process's environment.
        may_end_with: an exit status other than 0 that is not an error.

    Raises:
        PieceError: the program could not be started, failed or took too long. The text contains its output.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PieceError(f"{' '.join(command)}: {error}") from error
    if done.returncode not in (0, may_end_with):
        raise PieceError(
            f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout
