"""MPS with NVIDIA's real control daemon, which runs without a GPU. Only MPS servers need a GPU."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from gpu_plugin.mps.control_program import PROGRAM
from gpu_plugin.simulation import mps_control
from tests.node.daemon import GPU, DaemonProcess, healthy
from tests.node.mps_process import PATIENCE, SHARED, MpsProcess

pytestmark = pytest.mark.anyio

REPLICAS = 4
DEVICES = 8 * REPLICAS


class Real:
    """NVIDIA's control program with an MPS root. It starts a daemon as the mps-control-daemon of NVIDIA's DaemonSet does."""

    def __init__(self, program: Path, root: Path) -> None:
        self.program, self.root = program, root
        self.pipe, self.log = (root / GPU / name for name in ("pipe", "log"))

    @property
    def environ(self) -> dict[str, str]:
        return {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
        }

    def ask(self, *commands: str) -> list[str]:
        """Return the daemon's answer to each command."""
        return [self._ask(command) for command in commands]

    def _ask(self, command: str) -> str:
        """Send a command. Retry if a command of the device plugin came between: it is then refused, or the answer is empty."""
        until = time.monotonic() + PATIENCE
        while True:
            with suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    [self.program],
                    input=f"{command}\n",
                    env=self.environ,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=2,
                )
                replies = done.stdout.strip()
                if not done.returncode and (replies or "percentage" not in command):
                    return replies
            assert time.monotonic() < until, f"{command!r} is not answered"

    def begin(self, how: str) -> subprocess.Popen[bytes]:
        """Start the daemon without sending a command."""
        for made in (self.pipe, self.log):
            made.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen([self.program, how], env={**self.environ, "CUDA_VISIBLE_DEVICES": "0"})

    def start(self, threads: int = 100 // REPLICAS) -> None:
        for made in (self.pipe, self.log):
            made.mkdir(parents=True, exist_ok=True)
        subprocess.run([self.program, "-d"], env=self.environ, check=True, timeout=10)
        for index in range(8):
            self.ask(f"set_default_device_pinned_mem_limit {index} 20389M")
        self.ask(f"set_default_active_thread_percentage {threads}")
        (self.root / GPU / ".started").touch()
        (self.root / ".ready").touch()

    def pids(self) -> list[int]:
        """Return the process ids of all daemons with this pipe directory in their environment, without clients."""
        wanted = f"CUDA_MPS_PIPE_DIRECTORY={self.pipe}\0".encode()
        return [
            int(process.name)
            for process in Path("/proc").iterdir()
            if process.name.isdecimal()
            and wanted in _content(process / "environ")
            and _content(process / "cmdline").endswith((b"\0-d\0", b"\0-f\0"))
        ]

    async def kill(self) -> None:
        """Kill the daemon by its process id. Its files stay."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(PATIENCE):
            while self.pids():
                await anyio.sleep(0.02)


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return b""


@pytest.fixture
async def real(nvidia, directory):
    made = Real(nvidia / "usr/bin" / PROGRAM, directory / "mps")
    yield made
    await made.kill()


@pytest.fixture
def mps(directory, real):
    made = MpsProcess(directory)
    made.config.write_text(SHARED % REPLICAS)
    made.log = directory / "mps.log"
    yield made
    made.kill()


@pytest.fixture
def plugin(directory, mps):
    """Start the device plugin, which uses the control program in the driver root if there is a program."""
    made = DaemonProcess(directory)

    def start(driver_root: Path) -> None:
        made.start(
            "--config-file", str(mps.config), "--mps-root", str(mps.root), "--driver-root-ctr-path", str(driver_root)
        )

    yield start
    made.kill()


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(PATIENCE):
        while not condition():
            await anyio.sleep(0.02)


async def test_the_real_daemon_is_supervised_from_its_limits_to_an_end_without_a_process(
    mps, real, kubelet, plugin, nvidia
):
    plugin(nvidia)
    mps.run("--mps-control-binary", str(real.program))
    await mps.until(lambda: not mps.why(replicas=REPLICAS))
    await kubelet.wait_for(healthy(kubelet, DEVICES), timeout=PATIENCE)
    assert real.ask(
        "get_default_active_thread_percentage", *(f"get_default_device_pinned_mem_limit {n}" for n in (0, 7))
    ) == [
        "25.0",
        "19G",
        "19G",
    ]
    (daemon,) = mps.children()
    os.kill(daemon, signal.SIGKILL)
    await kubelet.wait_for(healthy(kubelet, 0), timeout=PATIENCE)
    await mps.said(f"{PROGRAM} was killed by SIGKILL")
    await kubelet.wait_for(healthy(kubelet, DEVICES), timeout=PATIENCE)
    assert daemon not in mps.children()
    assert real.ask("get_default_active_thread_percentage") == ["25.0"]
    status, seconds = await mps.stop()
    assert (status, seconds < 5) == (0, True)
    assert real.pids() == []


async def test_a_limit_that_the_real_daemon_refuses_is_noticed_though_it_says_nothing(mps, real):
    script = mps.root.with_name(PROGRAM)
    refused = "sed 's/percentage 25/percentage 250/' | "
    script.write_text(f'#!/bin/sh\n[ "$1" = -f ] && exec {real.program} -f\n{refused}{real.program}\n')
    script.chmod(0o755)
    mps.run("--mps-control-binary", str(script))
    await mps.until(lambda: "it gives each client 100.0 % of the threads, not 25 %" in mps.why())
    await mps.stop()
    assert real.pids() == []


async def test_the_daemon_of_nvidias_daemonset_serves_the_devices_while_it_lives(real, kubelet, plugin, nvidia):
    real.start()
    plugin(nvidia)
    await kubelet.wait_for(healthy(kubelet, DEVICES), timeout=PATIENCE)
    await real.kill()
    assert (real.pipe / "control").exists()
    began = anyio.current_time()
    await kubelet.wait_for(healthy(kubelet, 0), timeout=PATIENCE)
    assert anyio.current_time() - began < 10
    real.start()
    await kubelet.wait_for(healthy(kubelet, DEVICES), timeout=PATIENCE)
    real.ask("quit")
    await kubelet.wait_for(healthy(kubelet, 0), timeout=PATIENCE)


async def test_a_real_daemon_with_other_limits_is_a_warning_and_serves_no_device_while_it_hangs(
    real, kubelet, plugin, nvidia, mps
):
    real.start(threads=50)
    plugin(nvidia)
    log = DaemonProcess(real.root.parent)
    await log.said("gives each client 50 % of a GPU's threads, not 25 %")
    await kubelet.wait_for(healthy(kubelet, DEVICES), timeout=PATIENCE)
    (daemon,) = real.pids()
    os.kill(daemon, signal.SIGSTOP)
    (real.root / GPU / ".started").touch()  # the changed file makes the plugin check the daemon at once
    await log.said("has not answered 'get_default_active_thread_percentage' for 5 s", seconds=PATIENCE)
    await kubelet.wait_for(healthy(kubelet, 0), timeout=PATIENCE)
    os.kill(daemon, signal.SIGCONT)
    await kubelet.wait_for(healthy(kubelet, DEVICES), timeout=PATIENCE)


async def test_the_lock_of_the_real_daemon_is_its_word_where_there_is_no_program_to_ask_it(
    real, kubelet, plugin, directory, monkeypatch
):
    monkeypatch.setenv("PATH", str(directory))
    real.start()
    plugin(directory / "no-driver")
    await DaemonProcess(directory).said("its limits are not verified: no nvidia-cuda-mps-control at")
    await kubelet.wait_for(healthy(kubelet, DEVICES), timeout=PATIENCE)
    await real.kill()
    await kubelet.wait_for(healthy(kubelet, 0), timeout=PATIENCE)


async def test_the_stand_in_answers_as_the_real_daemon_does(real, directory):
    stand_in = Real(directory / PROGRAM, directory / "stand-in")
    stand_in.program.write_text(f'#!/bin/sh\nexec {" ".join(mps_control.COMMAND)} "$@"\n')
    stand_in.program.chmod(0o755)
    threads, memory = "default_active_thread_percentage", "default_device_pinned_mem_limit"
    commands = [f"get_{threads}", *(f"set_{threads} {share}" for share in ("250", "0", "abc", "33", "2.08"))]
    commands += [f"get_{threads}", f"get_{memory} 0"]
    commands += [line for limit in ("500M", "1500M") for line in (f"set_{memory} 0 {limit}", f"get_{memory} 0")]
    commands += ["bogus 3", "quit"]
    replies = []
    for daemon in (real, stand_in):
        process = daemon.begin("-f")
        try:
            replies.append(daemon.ask(*commands))
        finally:
            process.kill()
            process.wait()
    assert replies[0] == replies[1]


async def test_nvidias_daemon_is_told_all_its_limits_though_the_device_plugin_waits_for_it(
    real, kubelet, plugin, nvidia
):
    plugin(nvidia)
    for _ in range(3):
        real.start()
        await kubelet.wait_for(healthy(kubelet, DEVICES), timeout=PATIENCE)
        log = (real.log / "control.log").read_text()
        assert log.index("Cmd:set_default_active_thread_percentage") < log.index("Cmd:get_")
        await real.kill()
        (real.log / "control.log").unlink()
        await kubelet.wait_for(healthy(kubelet, 0), timeout=PATIENCE)
