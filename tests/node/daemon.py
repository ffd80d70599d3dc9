"""The daemon as its own process on a simulated node, for tests."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from asyncinotify import Inotify, Mask

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.runtime.control import request
from tests.node.forked import Forked, fork
from tests.state_log import stored

GPU = "nvidia.com/gpu"


class DaemonProcess:
    """One `gpu-plugin run`. The fixture ends it by its process id."""

    def __init__(self, directory: Path, *, profile: str = "hgx-h100", state: str = "state") -> None:
        self.directory = directory
        self.state = directory / state
        self.log = directory / "daemon.log"
        self.specs = directory.parent / "cdi"
        self.profile = profile
        self.process: subprocess.Popen[bytes] | Forked | None = None

    def start(
        self,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        in_directory: bool = True,
        descriptors: int | None = None,
        cold: bool = False,
        verb: tuple[str, ...] = ("run",),
    ) -> None:
        """Start it with these flags. `descriptors` is a hard limit on its file descriptors.

        A cold start is a new interpreter, as for operators. Other starts are forks that have done their imports.
        """
        arguments = list(verb)
        if in_directory:
            arguments += ["--device-plugin-dir", str(self.directory)]
        arguments += ["--state-dir", str(self.state), "--cdi-dir", str(self.specs)]
        arguments += ["--health-poll-interval", "100ms", "--log-level", "debug"]
        if self.profile:
            arguments += ["--simulate", self.profile]
        arguments += flags
        whole = {key: value for key, value in os.environ.items() if not key.startswith("DP_")} | dict(environ or {})
        with self.log.open("ab") as log:
            if not cold and descriptors is None:
                self.process = fork(arguments, whole, log, log)
                return
            command = [sys.executable, "-m", "gpu_plugin", *arguments]
            if descriptors is not None:
                limited = "import os, resource as r, sys; r.setrlimit(r.RLIMIT_NOFILE, 2 * (int(sys.argv[1]),)); "
                limited += "os.execv(sys.argv[2], sys.argv[2:])"
                command = [sys.executable, "-c", limited, str(descriptors), *command]
            self.process = subprocess.Popen(command, stderr=log, stdout=log, env=whole)

    def fault(self, gpu: int, **fault: Any) -> None:
        request(self.state, "fault", gpu=gpu, **fault)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def exit(self, seconds: float = 5) -> int:
        """Wait for the exit and return the status."""
        assert self.process is not None
        return await anyio.to_thread.run_sync(lambda: self.process.wait(seconds))  # type: ignore[union-attr]

    async def asked_where_it_stands(self) -> None:
        """Sends SIGUSR2 again and again from when the process can take one until it has ended, or this is cancelled."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status")
        bit, lines = 1 << (signal.SIGUSR2 - 1), ("SigIgn:", "SigCgt:")
        while not any(
            int(line.split()[1], 16) & bit for line in status.read_text().splitlines() if line.startswith(lines)
        ):
            await anyio.sleep(0.001)
        while self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR2)
            await anyio.sleep(0.002)

    async def stop(self) -> tuple[int, float]:
        """Exit status after SIGTERM, and the seconds it took."""
        began = time.perf_counter()
        self.signal(15)
        return await self.exit(), time.perf_counter() - began

    def kill(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()

    async def said(self, text: str, seconds: float = 10) -> None:
        """Returns once the log holds `text`."""
        await self._holds(self.log, text, seconds)

    async def wrote(self, name: str, text: str, seconds: float = 10) -> None:
        """Returns once a file of the state directory holds `text`."""
        await self._holds(self.state / name, text, seconds)

    async def stored(self, kind: str, text: str, seconds: float = 10) -> None:
        """Returns once the state log holds `text` in its record of this kind, or in an event."""
        with anyio.move_on_after(seconds):
            while text not in str(stored(self.state, kind)):
                await anyio.sleep(0.02)
            return
        raise AssertionError(f"no record of {kind} ever held {text!r}. The log:\n{self.log.read_text()[-3000:]}")

    async def _holds(self, file: Path, text: str, seconds: float) -> None:
        with Inotify() as changes, anyio.move_on_after(seconds):
            changes.add_watch(file.parent.parent, Mask.CREATE)
            while not file.parent.exists():
                await changes.get()
            changes.add_watch(file.parent, Mask.MODIFY | Mask.MOVED_TO | Mask.CREATE)
            while not file.exists() or text not in file.read_text():
                await changes.get()
            return
        raise AssertionError(f"{file.name} never held {text!r}. The log:\n{self.log.read_text()[-3000:]}")


def healthy(kubelet: StandInKubelet, count: int, resource: str = GPU):
    """Return a condition: the plugin's stream is open, and `count` devices are allocatable."""

    def met() -> bool:
        table = kubelet.resources.get(resource)
        return table is not None and table.streams == 1 and table.allocatable == count

    return met


def ids(kubelet: StandInKubelet, resource: str = GPU) -> list[str]:
    """Device ids in the order of the list."""
    return list(kubelet.resources[resource].devices)
