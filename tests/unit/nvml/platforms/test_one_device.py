import logging
from contextlib import asynccontextmanager

import anyio
import pytest
from msgspec.structs import replace

from gpu_plugin.containers.host_view import LinuxHost
from gpu_plugin.devices.device import whole_gpu
from gpu_plugin.devices.node import Gpu
from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.health.observation import EventDelivery, Sample
from gpu_plugin.nvml.monitor import Monitor
from gpu_plugin.nvml.platforms.driver import TegraDriver, WslDriver
from gpu_plugin.nvml.port import NVML_FUNCTIONS, Driver, Handle, NvmlError
from gpu_plugin.nvml.sample import look
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.profile import load
from tests.device_nodes import device

LONG = 10.0


def wsl():
    """Return the open driver for WSL on a Windows host with GPUs."""
    driver = WslDriver(SimulatedDriver(SimulatedNode(load("t4-4"))))
    driver.open()
    return driver


BOTH = pytest.mark.parametrize(("driver", "uuid"), [(wsl(), "all"), (TegraDriver(), "tegra")], ids=["wsl", "tegra"])


class Watching:
    """A monitor on such a driver. `seen` are its observations."""

    def __init__(self, driver: Driver, host: LinuxHost, *, remembered: tuple[Gpu, ...] = ()) -> None:
        self.seen: list[tuple[str, object]] = []
        self._news = anyio.Event()
        self.monitor = Monitor(driver, host, 0.001, LONG, remembered, self._observe, lambda _: None)

    def _observe(self, uuid, observation):
        self.seen.append((uuid, observation))
        news, self._news = self._news, anyio.Event()
        news.set()
        return False

    @asynccontextmanager
    async def running(self):
        async with anyio.create_task_group() as group:
            group.start_soon(self.monitor.run)
            yield
            group.cancel_scope.cancel()

    async def looks(self, count):
        with anyio.fail_after(LONG):
            while len(self.seen) < count:
                await self._news.wait()


@BOTH
def test_there_is_one_device_at_index_0(driver, uuid):
    driver.open()
    assert driver.device_count() == 1
    handle = driver.handle_by_index(0)
    assert driver.handle_by_uuid(uuid) == handle
    assert driver.uuid(handle) == uuid
    assert driver.driver_version() == ""
    for call, argument, code in (
        ("handle_by_index", 1, Return.INVALID_ARGUMENT),
        ("handle_by_uuid", "x", Return.NOT_FOUND),
    ):
        with pytest.raises(NvmlError) as caught:
            getattr(driver, call)(argument)
        assert caught.value.code == code
    driver.close()


ANSWERED = {"open", "close", "driver_version", "device_count", "handle_by_index", "handle_by_uuid", "uuid"}


@BOTH
def test_other_calls_are_not_supported(driver, uuid):
    for call in sorted(NVML_FUNCTIONS.keys() - ANSWERED):
        with pytest.raises(NvmlError) as caught:
            getattr(driver, call)(Handle(1))
        assert caught.value.code == Return.NOT_SUPPORTED, call
        assert caught.value.unsupported, call
        assert caught.value.call == NVML_FUNCTIONS[call]


@BOTH
async def test_the_monitor_serves_it_as_healthy_and_logs_once(driver, uuid, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    watching = Watching(driver, LinuxHost([(str(tmp_path), "")]))
    node = await watching.monitor.open()
    assert node.gpus == (Gpu(uuid=uuid, index=0),)
    async with watching.running():
        await watching.looks(3)
        said = len(caplog.records)
        await watching.looks(30)
    assert {seen for seen, _ in watching.seen} == {uuid}
    told = [sample for _, sample in watching.seen if isinstance(sample, Sample)]
    assert [replace(sample, counting=None, opening=None, asked=None) for sample in told] == [Sample()] * len(told)
    assert [seen for _, seen in watching.seen if not isinstance(seen, Sample)] == [EventDelivery()]
    assert len(caplog.records) == said
    assert [record.getMessage() for record in caplog.records] == [
        "the driver reports no events, health relies on polling: nvmlEventSetCreate: not known on this platform (3)"
    ]


@BOTH
async def test_a_remembered_device_is_the_same_device(driver, uuid, tmp_path):
    watching = Watching(driver, LinuxHost([(str(tmp_path), "")]), remembered=(Gpu(uuid=uuid, index=0),))
    node = await watching.monitor.open()
    watching.monitor.close()
    assert node.gpus == (Gpu(uuid=uuid, index=0),)


@pytest.mark.parametrize(("driver", "nodes"), [(wsl(), ("/dev/dxg",)), (TegraDriver(), ())])
def test_its_device_has_the_nodes_that_nvidias_plugin_gives_it(driver, nodes):
    device = whole_gpu(Gpu(uuid=driver.uuid(Handle(1)), index=0))
    assert (device.nodes, device.numa, device.index) == (nodes, (), "0")


@pytest.mark.parametrize("driver", [wsl(), TegraDriver()])
def test_a_look_finds_no_fault_in_it_and_asks_it_nothing_twice(driver):
    gpu = Gpu(uuid=driver.uuid(Handle(1)), index=0)
    found = look(driver, Handle(1), gpu, opening=1)
    assert found.sample == Sample(counting=1, opening=1)
    assert {"temperature", "energy", "recovery_action", "nvlinks", "fabric", "pcie_width"} <= found.unsupported
    again = look(driver, Handle(1), gpu, opening=1, skip=found.unsupported)
    assert (again.sample, again.unsupported) == (Sample(counting=1, opening=1), frozenset())


def test_the_dxg_device_is_a_device_of_the_host(tmp_path):
    device(tmp_path / "dev/dxg")
    assert "/dev/dxg" in LinuxHost([(str(tmp_path), "")]).device_roots()
