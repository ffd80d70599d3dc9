"""NVIDIA's real libnvidia-ml without a loaded driver: its functions and errors, and calls with the plugin's arguments."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_plugin.devices.nvml_h import Return, Threshold
from gpu_plugin.nvml.driver import PynvmlDriver
from gpu_plugin.nvml.port import EventSet, Field, Handle, NvmlError
from tests.real import archive

NVIDIA = "0x10de"  # PCI vendor
HANDLE, EVENTS = Handle(0x7F00_1234_5000), EventSet(0x7F00_9876_0000)

CALLS = {
    "uuid": (HANDLE,),
    "temperature": (HANDLE,),
    "temperature_threshold": (HANDLE, Threshold.SHUTDOWN),
    "margin_temperature": (HANDLE,),
    "persistence_mode": (HANDLE,),
    "uncorrected_ecc_errors": (HANDLE,),
    "sram_threshold_exceeded": (HANDLE,),
    "remapped_rows": (HANDLE,),
    "retired_pages_pending": (HANDLE,),
    "unrepairable_memory": (HANDLE,),
    "clocks_event_reasons": (HANDLE,),
    "nvlink_states": (HANDLE,),
    "fabric": (HANDLE,),
    "pcie_link": (HANDLE,),
    "pcie_replays": (HANDLE,),
    "total_energy": (HANDLE,),
    "field_values": (HANDLE, (Field(230), Field(165, 17))),
    "supported_event_types": (HANDLE,),
    "event_set": (),
    "register_events": (HANDLE, 8, EVENTS),
}
"""The calls of the port that read a GPU's state, with arguments. A library that is not initialized does not use them."""

YOUNGER = {"margin_temperature", "unrepairable_memory"}
"""The calls for which a library of driver 535 has no function."""


@pytest.fixture
def root(nvidia: Path, tmp_path: Path) -> str:
    """A driver root with the library in it."""
    del nvidia
    return str(archive.debian_root(tmp_path / "root"))


def refusal(driver: PynvmlDriver, call: str, *arguments: object) -> int:
    with pytest.raises(NvmlError) as caught:
        getattr(driver, call)(*arguments)
    return caught.value.code


def test_without_a_driver_it_refuses_to_be_opened_and_answers_nothing(root: str) -> None:
    driver = PynvmlDriver([root])
    assert [refusal(driver, "open") for _ in range(2)] == [Return.DRIVER_NOT_LOADED] * 2
    refused = {call: refusal(driver, call, *arguments) for call, arguments in CALLS.items()}
    assert {call for call, code in refused.items() if code == Return.FUNCTION_NOT_FOUND} == YOUNGER
    assert {call for call, code in refused.items() if code == Return.UNINITIALIZED} == CALLS.keys() - YOUNGER


def test_a_library_of_before_the_newer_question_for_the_temperature_has_the_older_one(root: str) -> None:
    (path,) = Path(root, "usr/lib", archive.multiarch(), "nvidia/current").glob("libnvidia-ml.so.*.*")
    library = ctypes.CDLL(str(path))
    assert [hasattr(library, name) for name in ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")] == [
        False,
        True,
    ]
    assert library.nvmlErrorString is not None


def test_doctor_reports_a_driver_that_is_not_loaded_and_none_that_a_node_without_a_gpu_lacks(root: str) -> None:
    """Run in a process that has not loaded another library."""
    command = [sys.executable, "-m", "gpu_plugin", "doctor", "--driver-root-ctr-path", root, "-o", "json"]
    done = subprocess.run(command, check=False, capture_output=True, timeout=50)
    [library] = [each for each in json.loads(done.stdout)["findings"] if each["check"] == "driver-library"]
    if not any(file.read_text().strip() == NVIDIA for file in Path("/sys/bus/pci/devices").glob("*/vendor")):
        assert library["status"] == "note"
        return
    assert (done.returncode, library["status"]) == (1, "failed")
    assert "driver not loaded (9)" in library["found"]
    assert f"{root}/usr/" in library["found"]
    assert "modprobe nvidia" in library["remedy"]
