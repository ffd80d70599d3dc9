"""`gpu-plugin mps` as its own process on a simulated node, for tests."""

import json
import os
from pathlib import Path

import anyio

from gpu_plugin.mps.control_daemon import MARK
from gpu_plugin.mps.readiness import read, why_down
from gpu_plugin.simulation.saved import COMPUTE_MODES_FILE
from tests.node.daemon import GPU, DaemonProcess
from tests.node.forked import fork

PATIENCE = 30.0
SHARED = "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}\n"


class MpsProcess(DaemonProcess):
    """One `gpu-plugin mps`."""

    def __init__(self, directory, *, profile="hgx-h100"):
        super().__init__(directory, profile=profile)
        self.root = directory / "mps"
        self.config = directory / "config.yaml"
        self.config.write_text(SHARED % 4)

    def run(self, *flags, environ=None, mps_root=True):
        command = ["mps", "--state-dir", str(self.state), "--log-level", "debug"]
        command += ["--config-file", str(self.config)]
        if mps_root:
            command += ["--mps-root", str(self.root)]
        if self.profile:
            command += ["--simulate", self.profile]
        with self.log.open("ab") as log:
            self.process = fork([*command, *flags], {**os.environ, **(environ or {})}, log, log)

    def why(self, **expected):
        return why_down(self.root, read(self.root), GPU, **expected)

    async def until(self, condition, seconds=PATIENCE):
        with anyio.move_on_after(seconds):
            while not condition():
                assert self.process is not None
                assert self.process.poll() is None, self.log.read_text()
                await anyio.sleep(0.02)
            return
        raise AssertionError(f"it never happened. The log:\n{self.log.read_text()[-3000:]}")

    def modes(self):
        """Compute modes by index, but for DEFAULT."""
        try:
            modes = json.loads((self.state / COMPUTE_MODES_FILE).read_bytes())["modes"]
        except FileNotFoundError:
            return {}
        return {int(index): mode for index, mode in modes.items() if mode}

    def children(self):
        """Processes of the daemons under this root."""
        status = self.root.stat()
        value = f"{MARK}={status.st_dev}:{status.st_ino}:".encode()
        found = []
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdecimal() and value in (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:
                continue
        return found
