"""SIGTERM at moments of the start, to a process with PID 1, as in a container."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from gpu_plugin.state.log import EVENT
from tests.state_log import stored

HOOKS = Path(__file__).parent / "hooks"
AS_PID_1 = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
MOMENTS = int(os.environ.get("GPU_PLUGIN_MOMENTS", "6"))
"""Moments of each start at which it is stopped; `.ci/run` takes more."""

SECONDS = 10
"""The time in which a stopped process ends, also on a busy machine."""


def namespaces() -> bool:
    return subprocess.run([*AS_PID_1, "true"], check=False, capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.skipif(not namespaces(), reason="no PID namespace can be made here: it takes root"),
    pytest.mark.timeout(60 + MOMENTS * SECONDS),
]


class Start:
    """Starts of one command as PID 1, each ended by SIGTERM: at the latest when its log says that it `serves`."""

    def __init__(self, directory: Path, serves: str, *arguments: str) -> None:
        self.log = directory / "log"
        self.serves = serves
        self.command = [*AS_PID_1, sys.executable, "-m", "gpu_plugin", *arguments]

    async def stopped_at(self, number: int) -> int:
        """Start the command, send SIGTERM at this event, and return the exit status.

        The number of events varies: compiled modules, for example, take fewer. A start that serves before it reaches the event
        is stopped then.
        """
        return await self._ended(self._begin(STOP_AT=str(number)))

    async def length(self, count: Path) -> int:
        """Events of a whole start."""
        assert await self._ended(self._begin(STOP_COUNT=str(count))) == 0
        return int(count.read_text())

    async def _ended(self, process: "subprocess.Popen[bytes]") -> int:
        """Stop the process when it serves, if it does not end before, and return its exit status."""
        try:
            with anyio.fail_after(30):
                while process.poll() is None and self.serves not in self.log.read_text():
                    await anyio.sleep(0.02)
            if process.poll() is None:
                for inside in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                    with contextlib.suppress(ProcessLookupError):  # it has ended since
                        os.kill(int(inside), signal.SIGTERM)
            return await anyio.to_thread.run_sync(process.wait, SECONDS)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise AssertionError(f"it goes on:\n{self.log.read_text()[-2000:]}") from None
        finally:
            process.kill()
            process.wait()

    def _begin(self, **hook: str) -> "subprocess.Popen[bytes]":
        environ = {**os.environ, "PYTHONPATH": f"{HOOKS}:{Path.cwd()}", **hook}
        with self.log.open("wb") as log:
            return subprocess.Popen(self.command, env=environ, stdout=log, stderr=log)


async def test_a_daemon_that_is_pid_1_is_stopped_at_any_moment_of_its_start(kubelet, directory):
    start = Start(
        directory, "registered with the kubelet", "run", "--simulate", "t4-4", "--device-plugin-dir", str(directory),
        "--state-dir", str(directory / "state"), "--health-poll-interval", "100ms",
    )  # fmt: skip
    await stopped_at_each_moment(start, directory / "count", directory / "state")
    assert "gpu-plugin-" not in " ".join(each.name for each in directory.iterdir())


async def test_a_daemon_that_is_started_without_a_verb_is_stopped_at_its_start(directory):
    start = Start(directory, "waiting for the kubelet", "--simulate", "t4-4", "--device-plugin-dir", str(directory))
    assert await start.stopped_at(1) == 0


async def test_mps_daemons_that_are_pid_1_are_stopped_at_any_moment_of_their_start(directory):
    config = directory / "config.yaml"
    config.write_text("version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n")
    start = Start(
        directory, "MPS daemon ready", "mps", "--simulate", "t4-4", "--config-file", str(config),
        "--mps-root", str(directory / "mps"), "--state-dir", str(directory / "state"),
    )  # fmt: skip
    await stopped_at_each_moment(start, directory / "count")


async def stopped_at_each_moment(start: Start, count: Path, state: Path | None = None) -> None:
    """Stops starts at moments that are spread evenly over a whole one: from its first long import until it serves.

    Each start keeps the events in the state directory `state`.
    """
    assert await start.stopped_at(0) == 0
    events = await start.length(count)
    for moment in range(1, MOMENTS):
        before = [] if state is None else stored(state, EVENT)
        number = events * moment // MOMENTS
        assert await start.stopped_at(number) == 0, f"event {number} of {events}:\n{start.log.read_text()[-2000:]}"
        assert state is None or stored(state, EVENT)[: len(before)] == before


async def test_a_command_that_is_pid_1_is_ended_by_sigterm_too_and_did_not_succeed(directory):
    assert await Start(directory, "removed", "cleanup", "--state-dir", str(directory / "state")).stopped_at(1) == 143
