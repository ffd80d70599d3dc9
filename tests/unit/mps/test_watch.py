"""Daemons of another program, here the stand-in, and their state for the device plugin."""

import asyncio
import errno
import os
import subprocess
import threading
from pathlib import Path

import anyio
import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.devices import mps_paths
from gpu_plugin.devices.sharing import MpsShared
from gpu_plugin.mps import directories, foreign, watch
from gpu_plugin.mps.control_program import PROGRAM
from gpu_plugin.mps.limits import GET_THREADS
from gpu_plugin.mps.readiness import StateFile
from gpu_plugin.mps.watch import MpsWatch
from gpu_plugin.simulation import mps_control

from .conftest import GPU, PATIENCE

pytestmark = pytest.mark.anyio

SHARED = MpsShared(GPU, ("GPU-a",), 4)


class Foreign:
    """The MPS root of another program's daemon, and the driver root with the control program."""

    def __init__(self, directory: Path) -> None:
        self.root, self.driver = directory / "mps", directory / "driver"
        self.pipe, self.log = (self.root / GPU / name for name in ("pipe", "log"))
        for made in (self.pipe, self.log, self.driver / "usr/bin"):
            made.mkdir(parents=True)
        self.program = self.driver / "usr/bin" / PROGRAM
        self.program.write_text(f'#!/bin/sh\nexec {" ".join(mps_control.COMMAND)} "$@"\n')
        self.program.chmod(0o755)
        flags = {"mps_root": str(self.root), "driver_root_ctr_path": str(self.driver), "driver_root": "/"}
        self.settings = resolve(flags, {})
        self.process: subprocess.Popen[bytes] | None = None
        self.watch = MpsWatch()

    @property
    def variables(self):
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}

    @property
    def started(self) -> Path:
        return self.root / GPU / mps_paths.STARTED

    async def start(self, threads: int = 25, *, started: bool = True) -> None:
        self.process = subprocess.Popen(  # noqa: ASYNC220
            [self.program, "-f"], env={**os.environ, **self.variables}
        )
        with anyio.fail_after(PATIENCE):
            while f"{threads}." not in self.command(f"set_default_active_thread_percentage {threads}"):
                await anyio.sleep(0.02)
        if started:
            self.started.touch()

    def command(self, text: str) -> str:
        done = subprocess.run(
            [self.program],
            input=f"{text}\n",
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout

    def asked(self) -> int:
        return (self.log / mps_control.LOG).read_text().count(GET_THREADS)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def look(self) -> str:
        return (await self.watch.look(self.settings, [SHARED]))[GPU]

    async def until(self, text: str) -> str:
        """Look until the reason contains `text`, or is empty if `text` is empty."""
        why = None
        with anyio.move_on_after(PATIENCE):
            while True:
                why = await self.look()
                if (text in why) if text else not why:
                    return why
                await anyio.sleep(0.02)
        raise AssertionError(f"it is {why!r}")


@pytest.fixture
def other(short_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{short_path}/nowhere")
    made = Foreign(short_path)
    yield made
    made.kill()


async def test_a_daemon_of_another_program_is_up_while_it_lives_and_another_share_is_a_warning(other, caplog):
    assert "gpu-plugin mps has not run on this node" in await other.look()
    await other.start()
    await other.until("")
    other.kill()
    assert "its MPS daemon is down" in await other.look()  # by the lock, at once
    assert "Cannot find MPS control daemon process" in await other.until("Cannot find")
    assert (other.pipe / mps_paths.CONTROL).exists()
    await other.start(threads=50)
    await other.until("")
    assert caplog.text.count("gives each client 50 % of a GPU's threads, not 25 %") == 1


async def test_nobody_asks_a_daemon_that_may_still_be_told_its_limits(other, monkeypatch):
    await other.start(started=False)
    assert "has not answered yet" in await other.look()
    assert other.asked() == 0
    monkeypatch.setattr(foreign, "SET_UP", 0.0)
    await other.until("")


async def test_a_daemon_that_is_up_is_asked_once_in_many_looks(other):
    await other.start()
    await other.until("")
    before = other.asked()
    for _ in range(20):
        assert await other.look() == ""
    assert other.asked() == before


async def test_a_daemon_that_hangs_holds_up_no_look_and_is_down(other, monkeypatch):
    monkeypatch.setattr(watch, "ANSWER", 0.5)
    monkeypatch.setattr(foreign, "CONFIRM", 0.1)
    monkeypatch.setattr(foreign, "LOOK_AGAIN", 0.1)
    await other.start()
    await other.until("")
    (other.log / mps_control.FAULT).write_text("hang")
    began = anyio.current_time()
    await other.look()
    assert anyio.current_time() - began < PATIENCE / 2
    await other.until("has not answered 'get_default_active_thread_percentage' for 0.5 s")


async def test_without_a_control_program_the_kernels_word_counts_and_that_is_told_once(other, caplog, monkeypatch):
    monkeypatch.setattr(foreign, "SET_UP", 0.0)
    await other.start(started=False)
    other.program.unlink()
    why = await other.until("cannot be queried")
    assert f"no {PROGRAM} at {other.driver}/usr/bin/{PROGRAM}, $PATH" in why
    other.started.touch()
    await other.until("")
    assert await other.look() == ""
    assert caplog.text.count("its limits are not verified") == 1
    other.kill()
    assert "is down" in await other.look()


async def test_where_gpu_plugin_mps_runs_no_other_daemon_counts(other):
    await other.start()
    before = other.asked()
    ours = StateFile(other.root)
    assert ours.lock()
    try:
        assert "gpu-plugin mps runs no daemon for it" in await other.look()
        assert other.asked() == before
    finally:
        ours.unlock()
    await other.until("")


async def test_the_root_is_looked_for_at_the_mount_of_nvidias_manifests(other, monkeypatch):
    await other.start()
    monkeypatch.setattr(directories, "MOUNT", other.root)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == other.root)
    other.settings = resolve({"mps_root": "/run/of/the/host", "driver_root_ctr_path": str(other.driver)}, {})
    await other.until("")


async def test_a_root_that_hangs_is_told_in_time_and_holds_one_thread_until_it_answers(other, monkeypatch):
    reading, written = os.pipe()
    seen = watch._read_state
    monkeypatch.setattr(watch, "PATIENCE", 0.05)
    monkeypatch.setattr(watch, "_read_state", lambda *_: os.read(reading, 1))
    for _ in range(5):
        assert await other.look() == "its MPS daemon's state cannot be read in time; does the disk of --mps-root hang?"
    assert [thread.name for thread in threading.enumerate()].count("mps-readiness") == 1
    monkeypatch.setattr(watch, "_read_state", seen)
    monkeypatch.setattr(watch, "PATIENCE", PATIENCE)
    os.close(written)
    assert "gpu-plugin mps has not run on this node" in await other.look()


async def test_a_root_that_cannot_be_read_is_down_with_the_reason(other):
    other.settings = resolve({"mps_root": f"/run/{'x' * 300}"}, {})
    assert await other.look() == "its MPS daemon's state cannot be read: File name too long; is --mps-root right?"


async def test_a_file_in_the_place_of_a_socket_is_no_daemon(other):
    (other.pipe / mps_paths.CONTROL).touch()
    assert "gpu-plugin mps has not run on this node" in await other.look()


async def test_a_root_whose_own_time_is_up_cannot_be_read(other, monkeypatch):
    """A network file system may do so."""

    def times_out(*_):
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(watch, "_read_state", times_out)
    assert await other.look() == "its MPS daemon's state cannot be read: Connection timed out; is --mps-root right?"


async def test_a_question_that_never_ends_is_not_asked_a_second_time_and_said_once_two_answers_were_due(
    other, monkeypatch
):
    skipped, loop = 0.0, asyncio.get_running_loop()
    monkeypatch.setattr(anyio, "current_time", lambda: loop.time() + skipped)
    began = []
    going, hung = os.pipe()

    def hangs(*_):
        began.append(1)
        os.read(going, 1)

    monkeypatch.setattr(watch, "_answer", hangs)
    await other.start()
    with anyio.fail_after(PATIENCE):
        while not began:
            await other.look()
            await anyio.sleep(0.02)
    skipped = watch.ANSWER
    assert "hangs" not in await other.look()
    skipped = 2 * watch.ANSWER + 0.1
    assert f"{PROGRAM} hangs; no query is possible" in await other.look()
    assert len(began) == 1
    os.close(hung)
