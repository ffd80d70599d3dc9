"""A simulated node with a stand-in for the MPS control program, and a supervisor."""

import os
import subprocess
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from gpu_plugin.config.sharing import MpsLimits
from gpu_plugin.mps.compute_modes import ComputeModes
from gpu_plugin.mps.control_daemon import MARK
from gpu_plugin.mps.limits import GET_THREADS
from gpu_plugin.mps.plan import MpsResource
from gpu_plugin.mps.readiness import State, read, why_down
from gpu_plugin.mps.supervisor import Supervisor, Tempo
from gpu_plugin.nvml.driver_calls import DriverCalls
from gpu_plugin.nvml.traits import probe_gpu
from gpu_plugin.simulation import mps_control
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost
from gpu_plugin.simulation.profile import load
from gpu_plugin.state.directory import StateDirectory

GPU = "nvidia.com/gpu"
OTHER = "nvidia.com/gpu.shared"
QUICK = Tempo(start=10, answer=10, probe=0.05, misses=2, quit=5, first_pause=0.01, longest_pause=0.05, stable=60)
PATIENCE = 30.0


async def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Returns once the condition holds."""
    with anyio.move_on_after(seconds):
        while not condition():
            await anyio.sleep(0.01)
        return
    raise AssertionError("it never came to be")


def marked(root: Path) -> list[int]:
    """Processes of daemons under this root, by their environment; a zombie has no environment."""
    value = f"{MARK}={root.stat().st_dev}:{root.stat().st_ino}:".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and value in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def ready(root: Path, name: str = GPU, **expected: Any) -> str:
    """Why a resource's daemon cannot be used; empty if it can."""
    return why_down(root, read(root), name, **expected)


class Mps:
    """One node's MPS root, its simulated GPUs, and supervisors over them."""

    def __init__(self, directory: Path, profile: str = "hgx-h100") -> None:
        self.root = directory / "mps"
        self.state = directory / "state"
        self.node = SimulatedNode(load(profile), self.state)
        self.driver = SimulatedDriver(self.node)
        self.driver.open()
        self.calls = DriverCalls()
        host = SimulatedHost(self.node)
        self.gpus = [probe_gpu(self.driver, host, index)[1] for index in range(len(self.node.profile.gpus))]
        self.control: Callable[[], tuple[str, ...]] = lambda: mps_control.COMMAND

    def _control(self) -> tuple[str, ...]:
        return self.control()

    def resource(self, *indices: int, name: str = GPU, replicas: int = 4, limits: MpsLimits | None = None):
        return MpsResource(name, tuple(self.gpus[index] for index in indices), replicas, limits or MpsLimits())

    def modes(self) -> ComputeModes:
        return ComputeModes(self.driver, self.calls, StateDirectory(self.root), self.node.boot_id, 5)

    def mode(self, index: int) -> int:
        return self.node.compute_modes.get(index)

    def why(self, name: str = GPU) -> str:
        return ready(self.root, name)

    def state_of(self, name: str = GPU) -> State:
        """The state of a resource's daemon, as the running supervisor wrote it."""
        states = read(self.root)
        assert states is not None
        return states[name]

    def is_ready(self, name: str = GPU) -> bool:
        return not self.why(name)

    def fault(self, fault: str, name: str = GPU) -> None:
        log = self.root / name / "log"
        log.mkdir(parents=True, exist_ok=True)
        (log / mps_control.FAULT).write_text(fault)

    def heal(self, name: str = GPU) -> None:
        (self.root / name / "log" / mps_control.FAULT).unlink()

    def told(self, name: str = GPU) -> list[str]:
        """All commands to the daemons of a resource, without questions."""
        lines = (self.root / name / "log" / mps_control.LOG).read_text().splitlines()
        return [line for line in lines if "Cmd:get_" not in line]

    def client(self, *commands: str, name: str = GPU) -> list[str]:
        """The answers of a resource's daemon to a client."""
        done = subprocess.run(
            self.control(),
            input="".join(f"{command}\n" for command in commands),
            env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(self.root / name / "pipe")},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    def limits(self, devices: int, name: str = GPU) -> list[str]:
        return self.client(
            GET_THREADS, *(f"get_default_device_pinned_mem_limit {ordinal}" for ordinal in range(devices)), name=name
        )

    def asked(self, name: str = GPU) -> int:
        """The number of queries for the threads' percentage that a daemon got."""
        return (self.root / name / "log" / mps_control.LOG).read_text().count(GET_THREADS)

    @asynccontextmanager
    async def supervised(self, *resources: MpsResource, tempo: Tempo = QUICK, shm: Path | None = None):
        """A running supervisor. Its end is orderly, and it leaves no process and no mark."""
        supervisor = Supervisor(self.root, self._control, self.modes(), tempo, shm)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervisor.run)
            supervisor.apply(resources)
            try:
                yield supervisor
            finally:
                tasks.cancel_scope.cancel()
        assert marked(self.root) == []
        assert read(self.root) is None


@pytest.fixture
def mps(short_path):
    made = Mps(short_path)
    yield made
    made.calls.close()
    if made.root.exists():
        for pid in marked(made.root):
            os.kill(pid, 9)
