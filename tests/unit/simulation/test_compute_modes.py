import threading

import pytest

from gpu_plugin.devices.nvml_h import ComputeMode, Return
from gpu_plugin.nvml.port import NvmlError
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.saved import COMPUTE_MODES_FILE, SimulatedComputeModes

from .opened import make_node


def test_a_mode_that_one_process_sets_is_seen_by_all(tmp_path):
    one, other = SimulatedComputeModes(tmp_path, "boot"), SimulatedComputeModes(tmp_path, "boot")
    assert one.get(3) == ComputeMode.DEFAULT
    one.set(3, ComputeMode.EXCLUSIVE_PROCESS)
    other.set(4, 2)
    assert [one.get(gpu) for gpu in range(6)] == [0, 0, 0, 3, 2, 0]
    assert [other.get(gpu) for gpu in range(6)] == [0, 0, 0, 3, 2, 0]


def test_modes_set_at_once_are_all_kept(tmp_path):
    threads = [threading.Thread(target=SimulatedComputeModes(tmp_path, "boot").set, args=(gpu, 3)) for gpu in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [SimulatedComputeModes(tmp_path, "boot").get(gpu) for gpu in range(8)] == [3] * 8


def test_no_byte_that_is_wrong_and_no_length_that_is_cut_ends_the_reading(tmp_path):
    SimulatedComputeModes(tmp_path, "boot").set(0, 3)
    file = tmp_path / COMPUTE_MODES_FILE
    whole = file.read_bytes()
    spoilt = [whole[:at] + b"\xff" + whole[at + 1 :] for at in range(len(whole))]
    for content in (*spoilt, *(whole[:length] for length in range(len(whole)))):
        file.write_bytes(content)
        assert SimulatedComputeModes(tmp_path, "boot").get(0) == 0


@pytest.mark.parametrize("content", [None, b"{", b""])
def test_a_reboot_or_a_broken_file_makes_every_mode_default(tmp_path, content):
    SimulatedComputeModes(tmp_path, "boot").set(0, 3)
    if content is not None:
        (tmp_path / COMPUTE_MODES_FILE).write_bytes(content)
    modes = SimulatedComputeModes(tmp_path, "boot" if content is not None else "next")
    assert modes.get(0) == 0
    modes.set(1, 3)
    assert (modes.get(0), modes.get(1)) == (0, 3)


def test_without_a_directory_they_are_kept_in_memory():
    modes = SimulatedComputeModes(None, "boot")
    modes.set(0, 3)
    assert (modes.get(0), modes.get(1)) == (3, 0)


def test_the_driver_sets_and_tells_modes_as_nvml_does():
    node = make_node("h200")
    driver = SimulatedDriver(node)
    driver.open()
    handle = driver.handle_by_index(0)
    assert driver.compute_mode(handle) == ComputeMode.DEFAULT
    driver.set_compute_mode(handle, ComputeMode.EXCLUSIVE_PROCESS)
    assert driver.compute_mode(handle) == ComputeMode.EXCLUSIVE_PROCESS
    with pytest.raises(NvmlError) as caught:
        driver.set_compute_mode(handle, 4)
    assert (caught.value.code, caught.value.call) == (Return.INVALID_ARGUMENT, "nvmlDeviceSetComputeMode")
    node.lose(0)
    with pytest.raises(NvmlError) as caught:
        driver.compute_mode(handle)
    assert caught.value.code == Return.GPU_IS_LOST
