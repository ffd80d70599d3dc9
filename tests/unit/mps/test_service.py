import logging
import os
import signal
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.sharing import MPS, SharedResource
from gpu_plugin.daemon import mps_service
from gpu_plugin.daemon.config_source import ConfigSource
from gpu_plugin.daemon.configuration import Configuration
from gpu_plugin.daemon.mps_service import UNCHANGEABLE, MpsService
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.mps import directories
from gpu_plugin.nvml.opening_remedies import opening_remedy
from gpu_plugin.runtime.signals import Signals
from gpu_plugin.simulation import mps_control
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.host import SimulatedHost

from .conftest import GPU, QUICK, marked, ready, until


@pytest.fixture
def hasty(monkeypatch):
    """Search for GPUs again soon."""
    monkeypatch.setattr(mps_service, "FIRST_RETRY", 0.02)
    monkeypatch.setattr(mps_service, "LONGEST_RETRY", 0.05)
    monkeypatch.setattr(mps_service, "PROBE_PATIENCE", 0.3)


@pytest.fixture
def settings(mps):
    return replace(resolve({}, {}), mps_root=str(mps.root), sharing=(by_mps(4),), nvml_timeout=5.0)


def by_mps(replicas, name=GPU):
    return SharedResource(name, name, replicas, MPS)


class Running:
    """A service in this process. At SIGHUP it reads `settings`."""

    def __init__(self, mps, settings):
        self.settings = settings
        self.status: int | None = None
        self.driver = SimulatedDriver(mps.node)
        configuration = Configuration(settings, ConfigSource(settings), self.read, UNCHANGEABLE)
        self.service = MpsService(
            configuration, self.driver, SimulatedHost(mps.node), lambda: mps_control.COMMAND, QUICK
        )

    def read(self, _):
        if isinstance(self.settings, Exception):
            raise self.settings
        return self.settings

    def driver_modes(self):
        return [self.driver.compute_mode(self.driver.handle_by_index(index)) for index in range(8)]

    def reload(self, settings):
        self.settings = settings
        os.kill(os.getpid(), signal.SIGHUP)

    async def run(self):
        self.status = await self.service.run(Signals())


@asynccontextmanager
async def serving(mps, settings):
    """Run a service, stop it at the end, and check that it leaves nothing."""
    running = Running(mps, settings)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        try:
            yield running
        finally:
            if running.status is None:
                os.kill(os.getpid(), signal.SIGTERM)
    assert running.status == 0
    assert marked(mps.root) == []
    assert [mps.mode(index) for index in range(len(mps.gpus))] == [0] * len(mps.gpus)


async def test_no_driver_ends_it_where_the_operator_wants_that(mps, settings, caplog):
    caplog.set_level(logging.INFO)  # an earlier test may have set another level
    mps.node.refuse("open", Return.DRIVER_NOT_LOADED)
    running = Running(mps, settings)
    await running.run()
    assert running.status == 1
    what, to_do, _ = [record.message for record in caplog.records][-3:]
    assert what.startswith("no MPS daemon can be run: the NVIDIA driver cannot be used: nvmlInit_v2")
    assert opening_remedy(Return.DRIVER_NOT_LOADED) in what
    assert to_do.endswith("or run it with --fail-on-init-error=false")


async def test_a_driver_that_comes_late_is_found(mps, settings, caplog, hasty):
    caplog.set_level(logging.DEBUG)
    mps.node.refuse("open", Return.DRIVER_NOT_LOADED, times=4)
    async with serving(mps, replace(settings, fail_on_init_error=False)):
        await until(mps.is_ready)
    said = [record.levelname for record in caplog.records if "cannot be used" in record.message]
    assert said == ["WARNING", "DEBUG", "DEBUG", "DEBUG"]


async def test_after_a_plan_that_stands_the_first_look_again_is_soon(mps, settings, caplog, hasty, monkeypatch):
    monkeypatch.setattr(mps_service, "LONGEST_RETRY", 10.0)
    caplog.set_level(logging.DEBUG)
    told = "looking again in"
    mps.node.refuse("open", Return.DRIVER_NOT_LOADED, times=4)
    settings = replace(settings, fail_on_init_error=False)
    async with serving(mps, settings) as running:
        await until(mps.is_ready)
        caplog.clear()
        for index in range(8):
            mps.node.lose(index)
        running.reload(replace(settings, sharing=(by_mps(2),)))
        await until(lambda: told in caplog.text)
        first = next(record.args[1] for record in caplog.records if told in record.msg)
        assert first <= 0.02
        for index in range(8):
            mps.node.heal(index)
        await until(lambda: "8 GPUs, 2 clients each" in caplog.text)


async def test_a_driver_that_hangs_is_waited_for_with_one_call(mps, settings, caplog, monkeypatch, hasty):
    running = Running(mps, replace(settings, fail_on_init_error=False, nvml_timeout=0.1))
    opened, gate, begun = running.driver.open, threading.Event(), []

    def hang():
        begun.append("open")
        assert gate.wait(60)
        opened()

    monkeypatch.setattr(running.driver, "open", hang)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await until(lambda: "no answer for 0.1 s; looking again" in caplog.text)
        gate.set()
        await until(mps.is_ready)
        os.kill(os.getpid(), signal.SIGTERM)
    assert begun == ["open"]
    assert running.status == 0


async def test_a_lost_gpu_is_left_out_and_the_others_are_shared(mps, settings, caplog):
    mps.node.lose(3)
    async with serving(mps, settings):
        await until(mps.is_ready)
        assert mps.told()[0] == f"Start, devices {','.join(gpu.uuid for gpu in mps.gpus if gpu.index != 3)}"
        mps.node.heal(3)
    assert "is left out of its MPS daemon" in caplog.text


async def test_a_node_whose_gpus_are_all_lost_is_looked_at_until_one_is_back(mps, settings, hasty):
    for index in range(8):
        mps.node.lose(index)
    async with serving(mps, replace(settings, fail_on_init_error=False)) as running:
        await until(lambda: running.driver.calls["close"] >= 2)
        for index in range(8):
            mps.node.heal(index)
        await until(mps.is_ready)


async def test_a_gpu_that_hangs_holds_up_no_other(mps, settings, hasty):
    mps.node.hang(2, 3600)
    async with serving(mps, settings):
        await until(mps.is_ready)
        assert mps.gpus[2].uuid not in mps.told()[0]
        mps.node.heal(2)


async def test_sharing_by_mps_needs_a_root(mps, settings, caplog):
    running = Running(mps, replace(settings, mps_root=""))
    await running.run()
    assert running.status == 2
    assert f"{GPU} is shared by MPS: set --mps-root" in caplog.text


async def test_without_a_root_and_without_mps_it_idles(mps, settings, caplog):
    caplog.set_level(logging.INFO)
    running = Running(mps, replace(settings, mps_root="", sharing=()))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await until(lambda: "nothing to do until the configuration changes" in caplog.text)
        os.kill(os.getpid(), signal.SIGTERM)
    assert running.status == 0
    assert not mps.root.exists()


async def test_a_root_that_cannot_be_made_is_told(mps, settings, caplog):
    mps.root.touch()
    running = Running(mps, settings)
    await running.run()
    assert running.status == 1
    assert f"the directory {mps.root} cannot be made" in caplog.text
    mps.root.unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state_dir": "/elsewhere"}, "--state-dir cannot change while the process runs"),
        ({"simulate": "t4-4"}, "--simulate cannot change"),
    ],
)
async def test_what_cannot_change_in_a_running_process_changes_nothing(mps, settings, caplog, change, said):
    async with serving(mps, settings) as running:
        await until(mps.is_ready)
        processes = marked(mps.root)
        running.reload(replace(settings, **change))
        await until(lambda: said in caplog.text)
        assert marked(mps.root) == processes


async def test_where_only_nvidias_mount_has_the_root_the_daemons_are_run_there(mps, settings, monkeypatch, caplog):
    mps.root.mkdir()
    monkeypatch.setattr(directories, "MOUNT", mps.root)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == mps.root)
    async with serving(mps, replace(settings, mps_root=f"{mps.root}-of-the-host")):
        await until(mps.is_ready)
    assert not Path(f"{mps.root}-of-the-host").exists()
    assert f"/dev/shm of this process is not {mps.root}/shm" in caplog.text


@pytest.mark.parametrize("root", ["", "other"])
async def test_daemons_leave_a_root_that_is_not_wanted_any_more(mps, settings, root):
    elsewhere = mps.root.with_name(root) if root else None
    async with serving(mps, settings) as running:
        await until(mps.is_ready)
        changed = replace(settings, mps_root=str(elsewhere or ""), sharing=settings.sharing if root else ())
        running.reload(changed)
        await until(lambda: not marked(mps.root) and not mps.is_ready())
        if elsewhere is not None:
            await until(lambda: not ready(elsewhere, GPU))
        else:
            await until(lambda: set(running.driver_modes()) == {0})
        running.reload(settings)
        await until(mps.is_ready)
        if elsewhere is not None:
            assert marked(elsewhere) == []


async def test_the_driver_is_not_closed_under_a_compute_mode_call_that_hangs(mps, settings, hasty, monkeypatch):
    free, held = threading.Event(), threading.Event()
    closed_under = []

    class Holding(SimulatedDriver):
        inside = 0

        def set_compute_mode(self, handle, mode):
            self.inside += 1
            held.set()
            assert free.wait(20)
            super().set_compute_mode(handle, mode)
            self.inside -= 1

        def close(self):
            closed_under.append(self.inside)
            super().close()

    monkeypatch.setattr("mps.test_service.SimulatedDriver", Holding)
    async with serving(mps, replace(settings, nvml_timeout=0.2)) as running:
        await until(held.is_set)
        for gpu in range(8):
            mps.node.lose(gpu)
        asked = running.driver.calls["device_count"]
        running.reload(settings)
        await until(lambda: running.driver.calls["device_count"] > asked + 2)
        assert closed_under == []
        free.set()
        for gpu in range(8):
            mps.node.heal(gpu)
        await until(lambda: not running.service._calls.under_way)
    assert not any(closed_under)
