import logging
import threading

import anyio
import pytest

from gpu_plugin.config.resolve import resolve
from gpu_plugin.daemon.hardware import hardware_for
from gpu_plugin.devices.nvml_h import Return, Threshold
from gpu_plugin.nvml.monitor import Monitor
from gpu_plugin.nvml.opening_remedies import opening_remedy
from gpu_plugin.nvml.platforms import driver as driver_module
from gpu_plugin.nvml.platforms.driver import PlatformDriver
from gpu_plugin.nvml.port import NVML_FUNCTIONS, Driver, Field, NvmlError
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.host import SimulatedHost

from .conftest import driver_threads
from .nvml_library import nvml_library

LONG = 10.0


@pytest.fixture
def nvml(node):
    return SimulatedDriver(node)


def put(root, *paths):
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def tegra(root):
    put(root, "etc/nv_tegra_release")


def windows(root):
    put(root, "usr/lib/wsl/lib/libdxcore.so", "dev/dxg")


def platform(nvml, root, strategy="auto", machine="x86_64"):
    return PlatformDriver(nvml, [str(root)], strategy, machine)


def uuids(driver: Driver) -> list[str]:
    return [driver.uuid(driver.handle_by_index(index)) for index in range(driver.device_count())]


def test_nvml_is_opened_once_and_closed_once(node, nvml, tmp_path):
    driver = platform(nvml, tmp_path)
    driver.open()
    assert uuids(driver) == [gpu.uuid for gpu in node.profile.gpus]
    assert nvml.calls["open"] == nvml._opened == 1
    driver.close()
    assert nvml._opened == 0


def test_wsl_asks_nvml_for_the_count_of_gpus_and_leaves_it_closed(nvml, tmp_path):
    windows(tmp_path)
    driver = platform(nvml, tmp_path, machine="aarch64")
    driver.open()
    assert uuids(driver) == ["all"]
    assert nvml.calls == {"open": 1, "device_count": 1, "close": 1}
    driver.close()
    assert nvml._opened == 0


def test_wsl_without_an_nvidia_library_has_no_gpu_and_names_the_remedy(node, nvml, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    windows(tmp_path)
    driver = platform(nvml, tmp_path)
    driver.open()
    node.refuse("open", Return.LIBRARY_NOT_FOUND, times=1)
    with pytest.raises(NvmlError, match=r"driver of the Windows host.*/usr/lib/wsl at the same path") as caught:
        driver.open()
    assert caught.value.code == Return.LIBRARY_NOT_FOUND
    assert driver.device_count() == 0  # and not the number of the last time
    driver.open()
    assert uuids(driver) == ["all"]
    assert [record.getMessage() for record in caplog.records] == [
        f"this node's platform is wsl: {tmp_path}/usr/lib/wsl/lib/libdxcore.so and {tmp_path}/dev/dxg exist"
    ]


@pytest.mark.parametrize(("call", "opened"), [("open", 0), ("device_count", 1)])
def test_wsl_without_a_library_that_works_has_no_gpu(node, nvml, tmp_path, call, opened):
    windows(tmp_path)
    node.refuse(call, Return.NOT_SUPPORTED)
    driver = platform(nvml, tmp_path)
    with pytest.raises(NvmlError) as caught:
        driver.open()
    assert (caught.value.code, caught.value.text) == (Return.NOT_SUPPORTED, "not supported")
    assert (driver.device_count(), nvml.calls["close"], nvml._opened) == (0, opened, 0)


@pytest.mark.parametrize(("count", "devices"), [(0, 0), (1, 1), (3, 1)])
def test_wsl_has_one_device_if_nvml_counts_any_gpu(nvml, tmp_path, count, devices):
    class Counting(SimulatedDriver):
        def device_count(self):
            return count

    windows(tmp_path)
    nvml.__class__ = Counting
    driver = platform(nvml, tmp_path)
    driver.open()
    assert driver.device_count() == devices


@pytest.mark.parametrize(
    ("code", "found"), [(Return.LIBRARY_NOT_FOUND, 1), (None, 8), (Return.DRIVER_NOT_LOADED, Return.DRIVER_NOT_LOADED)]
)
def test_files_of_tegra_count_if_there_is_no_library(node, nvml, tmp_path, code, found):
    tegra(tmp_path)
    if code is not None:
        node.refuse("open", code)
    driver = platform(nvml, tmp_path)
    if isinstance(found, Return):
        with pytest.raises(NvmlError) as caught:
            driver.open()
        assert caught.value.code == found
        return
    driver.open()
    assert len(uuids(driver)) == found
    assert (uuids(driver) == ["tegra"]) is (found == 1)
    driver.close()


@pytest.mark.parametrize(("strategy", "found"), [("tegra", ["tegra"]), ("nvml", 8)])
def test_the_operator_may_decide(nvml, tmp_path, strategy, found):
    tegra(tmp_path)
    driver = platform(nvml, tmp_path, strategy)
    driver.open()
    assert uuids(driver) == found if isinstance(found, list) else len(uuids(driver)) == found
    assert bool(nvml.calls["open"]) is (strategy == "nvml")
    driver.close()


def test_the_settings_choose_the_driver_roots(tmp_path, monkeypatch):
    asked = {"driver_root_ctr_path": str(tmp_path), "driver_root": str(tmp_path)}
    windows(tmp_path)
    (tmp_path / "usr/lib/wsl/lib/libnvidia-ml.so.1").write_bytes(nvml_library(gpus=3))
    driver = hardware_for(resolve(asked, {})).driver
    driver.open()
    assert uuids(driver) == ["all"]
    driver.close()


def called(nvml, name):
    """NVML's GPU 5 has this name."""
    real = type(nvml).name

    class Named(SimulatedDriver):
        def name(self, handle):
            said = real(self, handle)
            return name if handle == self.handle_by_index(5) else said

    nvml.__class__ = Named
    return nvml


@pytest.mark.parametrize("name", ["Orin (nvgpu)", "NVIDIA Thor"])
def test_an_integrated_gpu_makes_a_tegra_and_nvml_is_left_closed(nvml, tmp_path, name):
    driver = platform(called(nvml, name), tmp_path, machine="aarch64")
    driver.open()
    assert uuids(driver) == ["tegra"]
    assert nvml.calls["open"] == 1
    assert nvml._opened == 0


def test_names_are_not_read_on_a_machine_without_integrated_gpus(nvml, tmp_path):
    platform(called(nvml, "NVIDIA Thor"), tmp_path).open()
    assert nvml.calls["name"] == nvml.calls["handle_by_index"] == 0
    assert nvml._opened == 1


def test_gpus_that_do_not_report_a_name_are_left_out(node, nvml, tmp_path):
    node.lose(1)
    driver = platform(called(nvml, "NVIDIA Thor"), tmp_path, machine="aarch64")
    driver.open()
    assert uuids(driver) == ["tegra"]
    node.refuse("name", Return.UNKNOWN)
    driver.open()
    assert driver.device_count() == 8


def test_a_gpu_that_hangs_does_not_keep_the_others_from_being_found(node, nvml, tmp_path, monkeypatch):
    monkeypatch.setattr(driver_module, "NAMES_PATIENCE", 0.05)
    node.hang(3, 3600)
    try:
        driver = platform(nvml, tmp_path, machine="aarch64")
        driver.open()
        assert driver.device_count() == 8
        assert any(thread.is_alive() for thread in driver_threads())  # the call that hangs keeps only its thread
    finally:
        node.heal(3)


def test_the_names_are_asked_all_at_once(nvml, tmp_path):
    together = threading.Barrier(8, timeout=LONG)

    class Meeting(SimulatedDriver):
        def name(self, handle):
            together.wait()  # returns once all eight calls wait
            return super().name(handle)

    nvml.__class__ = Meeting
    driver = platform(nvml, tmp_path, machine="aarch64")
    driver.open()
    assert not together.broken
    assert driver.device_count() == 8


def test_the_driver_stays_open_if_gpus_cannot_be_counted(node, nvml, tmp_path):
    node.refuse("device_count", Return.UNKNOWN)
    driver = platform(nvml, tmp_path, machine="aarch64")
    driver.open()
    with pytest.raises(NvmlError):
        driver.device_count()
    driver.close()
    assert nvml._opened == 0


def test_the_platform_is_chosen_again_at_each_open(node, nvml, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    node.refuse("open", Return.LIBRARY_NOT_FOUND, times=5)  # each open without another platform tries it twice
    driver = platform(nvml, tmp_path)
    with pytest.raises(NvmlError) as caught:
        driver.open()
    assert caught.value.code == Return.LIBRARY_NOT_FOUND
    tegra(tmp_path)
    for _ in range(3):
        driver.open()
        assert uuids(driver) == ["tegra"]
    driver.open()  # the library has come
    assert len(uuids(driver)) == 8
    driver.close()
    windows(tmp_path)
    driver.open()
    assert uuids(driver) == ["all"]
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(": ")[0] for line in said] == [
        f"this node's platform is {at}" for at in ("tegra", "nvml", "wsl")
    ]


async def test_the_monitor_waits_for_a_library_as_for_any_driver(node, nvml, tmp_path):
    node.refuse("open", Return.LIBRARY_NOT_FOUND, times=2)
    monitor = Monitor(
        platform(nvml, tmp_path), SimulatedHost(node), 1, LONG, (), lambda *_: False, lambda _: None
    )  # fmt: skip
    with pytest.raises(NvmlError):
        await monitor.open()
    with anyio.fail_after(LONG):
        found = await monitor.open()
    monitor.close()
    assert len(found.gpus) == 8


def test_every_call_reaches_the_driver_with_its_arguments(node, nvml, tmp_path):
    driver = platform(nvml, tmp_path)
    driver.open()
    uuid = node.profile.gpus[2].uuid
    handle = driver.handle_by_uuid(uuid)
    for ask in (
        lambda at: at.temperature_threshold(handle, Threshold.SHUTDOWN),
        lambda at: at.temperature_threshold(handle, kind=Threshold.SLOWDOWN),
        lambda at: at.common_ancestor(handle, at.handle_by_index(7)),
        lambda at: at.field_values(handle, fields=(Field(230), Field(82))),
        lambda at: at.handle_by_pci_bus_id(node.profile.gpus[5].pci_bus_id),
        lambda at: at.nvlink_to_switch(handle, link=3),
        lambda at: at.fabric(handle),
        lambda at: at.pcie_link(handle),
        lambda at: at.driver_version(),
    ):
        assert ask(driver) == ask(nvml)
    driver.close()


def test_it_has_every_call_of_the_port(nvml, tmp_path):
    assert len(NVML_FUNCTIONS) > 25
    assert NVML_FUNCTIONS.keys() <= vars(PlatformDriver).keys()


def test_the_strategy_tegra_is_refused_on_another_machine(nvml, tmp_path):
    with pytest.raises(NvmlError, match="not a Tegra system") as caught:
        platform(nvml, tmp_path, "tegra").open()
    assert opening_remedy(caught.value.code) == "set --device-discovery-strategy to auto or nvml"
    for machine, root in (("aarch64", tmp_path), ("x86_64", tmp_path / "with-files")):
        if root is not tmp_path:
            tegra(root)
        driver = platform(nvml, root, "tegra", machine)
        driver.open()
        assert uuids(driver) == ["tegra"]


@pytest.mark.parametrize("strategy", ["auto", "nvml"])
def test_wsl_without_its_library_names_the_directory_to_mount(node, nvml, tmp_path, strategy):
    put(tmp_path, "dev/dxg")
    node.refuse("open", Return.LIBRARY_NOT_FOUND)
    with pytest.raises(NvmlError, match="mount its directory /usr/lib/wsl"):
        platform(nvml, tmp_path, strategy).open()
    (tmp_path / "dev/dxg").unlink()
    with pytest.raises(NvmlError) as caught:
        platform(nvml, tmp_path, strategy).open()
    assert "wsl" not in str(caught.value)
