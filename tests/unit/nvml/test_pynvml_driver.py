import dataclasses
import inspect

import pynvml
import pytest

from gpu_plugin.nvml import library as loader
from gpu_plugin.nvml import port
from gpu_plugin.nvml.driver import PynvmlDriver
from gpu_plugin.nvml.port import Event, EventSet, Handle, MigAttributes, NvmlError, Return, Threshold

from .fake_library import EVENTS, FIRST, MIG, SECOND, FakeLibrary

UUID = "GPU-92e1c9b6-dd9b-778f-6e34-6f0d728ad189"
MASK = 0x1_0000_0008
H, M, E = Handle(FIRST), Handle(MIG), EventSet(EVENTS)

# Each call of the port: its arguments, its answer, and what arrives in the library for it.
CALLS = [
    ("driver_version", (), "580.159.04", [("nvmlSystemGetDriverVersion", 80)]),
    ("device_count", (), 2, [("nvmlDeviceGetCount_v2",)]),
    ("handle_by_index", (1,), SECOND, [("nvmlDeviceGetHandleByIndex_v2", 1)]),
    ("handle_by_uuid", (UUID,), FIRST, [("nvmlDeviceGetHandleByUUID", UUID.encode())]),
    ("uuid", (H,), UUID, [("nvmlDeviceGetUUID", FIRST, 96)]),
    ("minor_number", (H,), 5, [("nvmlDeviceGetMinorNumber", FIRST)]),
    ("pci_bus_id", (H,), "00000000:00:06.0", [("nvmlDeviceGetPciInfo_v3", FIRST)]),
    ("name", (H,), "NVIDIA H200", [("nvmlDeviceGetName", FIRST, 96)]),
    ("architecture", (H,), 9, [("nvmlDeviceGetArchitecture", FIRST)]),
    ("memory_total", (H,), 150754820096, [("nvmlDeviceGetMemoryInfo", FIRST)]),
    ("mig_mode", (H,), (0, 1), [("nvmlDeviceGetMigMode", FIRST)]),
    ("max_mig_devices", (H,), 7, [("nvmlDeviceGetMaxMigDeviceCount", FIRST)]),
    ("mig_handle", (H, 6), MIG, [("nvmlDeviceGetMigDeviceHandleByIndex", FIRST, 6)]),
    ("gpu_instance_id", (M,), 13, [("nvmlDeviceGetGpuInstanceId", MIG)]),
    ("compute_instance_id", (M,), 1, [("nvmlDeviceGetComputeInstanceId", MIG)]),
    ("mig_attributes", (M,), MigAttributes(3, 2, 0x1_0000_4E00), [("nvmlDeviceGetAttributes_v2", MIG)]),
    ("compute_mode", (H,), 3, [("nvmlDeviceGetComputeMode", FIRST)]),
    ("set_compute_mode", (H, 3), None, [("nvmlDeviceSetComputeMode", FIRST, 3)]),
    ("numa_node", (H,), 1, [("nvmlDeviceGetNumaNodeId", FIRST)]),
    ("temperature", (H,), 32, [("nvmlDeviceGetTemperature", FIRST, 0)]),
    ("temperature_threshold", (H, Threshold.SHUTDOWN), 90, [("nvmlDeviceGetTemperatureThreshold", FIRST, 0)]),
    ("temperature_threshold", (H, Threshold.GPU_MAX), 93, [("nvmlDeviceGetTemperatureThreshold", FIRST, 3)]),
    ("total_energy", (H,), 0x1_2345_6789_ABCD, [("nvmlDeviceGetTotalEnergyConsumption", FIRST)]),
    ("supported_event_types", (H,), 0x1_0000_FF9F, [("nvmlDeviceGetSupportedEventTypes", FIRST)]),
    ("field_values", (H, (230, 82)), (None, None), [("nvmlDeviceGetFieldValues", FIRST, 2)]),
    (
        "nvlink_remote_bus_id",
        (H, 0),
        "00000000:1B:00.0",
        [("nvmlDeviceGetNvLinkState", FIRST, 0), ("nvmlDeviceGetNvLinkRemotePciInfo_v2", FIRST, 0)],
    ),
    ("common_ancestor", (H, Handle(SECOND)), 30, [("nvmlDeviceGetTopologyCommonAncestor", FIRST, SECOND)]),
    ("event_set", (), EVENTS, [("nvmlEventSetCreate",)]),
    ("free_event_set", (E,), None, [("nvmlEventSetFree", EVENTS)]),
    ("register_events", (H, MASK, E), None, [("nvmlDeviceRegisterEvents", FIRST, MASK, EVENTS)]),
    ("wait", (E, 1000), Event(Handle(SECOND), 8, 79), [("nvmlEventSetWait_v2", EVENTS, 1000)]),
]
NAMES = [f"{call[0]}-{number}" for number, call in enumerate(CALLS)]


@pytest.fixture
def library(monkeypatch):
    """The fake in pynvml's place for the library, with nothing left of earlier ones."""
    fake = FakeLibrary()
    monkeypatch.setattr(pynvml, "nvmlLib", fake)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    return fake


@pytest.fixture
def driver(library):
    real: port.Driver = PynvmlDriver()
    real.open()
    library.calls.clear()
    return real


def refusal(call, *arguments):
    with pytest.raises(NvmlError) as caught:
        call(*arguments)
    return caught.value


def plain(value):
    return type(value) in (int, str, type(None)) or (type(value) is tuple and all(plain(item) for item in value))


def test_the_table_here_has_the_whole_port():
    assert {call[0] for call in CALLS} | {"open", "close"} == {name for name in vars(port.Driver) if name[0] != "_"}


@pytest.mark.parametrize(("call", "arguments", "answer", "arrived"), CALLS, ids=NAMES)
def test_a_call_reaches_its_function_and_gives_plain_values(driver, library, call, arguments, answer, arrived):
    got = getattr(driver, call)(*arguments)
    assert got == answer
    assert isinstance(got, Event | MigAttributes) or plain(got)
    assert not isinstance(got, MigAttributes) or plain(dataclasses.astuple(got))
    assert library.calls == arrived


@pytest.mark.parametrize(("call", "arguments", "answer", "arrived"), CALLS, ids=NAMES)
def test_a_refusal_has_the_code_and_the_function(driver, library, call, arguments, answer, arrived):
    function = arrived[0][0]
    library.refusals[function] = Return.GPU_IS_LOST
    error = refusal(getattr(driver, call), *arguments)
    assert error.code == Return.GPU_IS_LOST
    assert not error.unsupported
    assert function.startswith(error.call)
    assert "gpu is lost (15)" in str(error)


@pytest.mark.parametrize(("call", "arguments", "answer", "arrived"), CALLS, ids=NAMES)
def test_a_function_that_the_library_lacks_is_unsupported(driver, library, call, arguments, answer, arrived):
    library.missing.add(arrived[-1][0])
    error = refusal(getattr(driver, call), *arguments)
    assert error.code == Return.FUNCTION_NOT_FOUND
    assert error.unsupported


@pytest.mark.parametrize(("call", "arguments", "answer", "arrived"), CALLS, ids=NAMES)
def test_before_open_nothing_reaches_the_library(library, call, arguments, answer, arrived):
    assert refusal(getattr(PynvmlDriver(), call), *arguments).code == Return.UNINITIALIZED
    assert library.calls == []


@pytest.mark.parametrize("code", [2, 3, 4, 6, 10, 16, 999, 4711])
def test_every_code_is_passed_on_also_one_without_a_name(driver, library, code):
    library.refusals["nvmlDeviceGetCount_v2"] = code
    error = refusal(driver.device_count)
    assert error.code == code
    assert str(error).endswith(f"({code})")


def test_open_and_close_pair_up(library):
    driver = PynvmlDriver()
    driver.open()
    driver.close()
    assert library.calls == [("nvmlInitWithFlags", 0), ("nvmlShutdown",)]


def test_close_before_open_does_nothing(library):
    PynvmlDriver().close()
    assert library.calls == []


def test_a_driver_that_is_not_loaded_refuses_to_open(library):
    library.refusals["nvmlInitWithFlags"] = Return.DRIVER_NOT_LOADED
    assert refusal(PynvmlDriver().open).code == Return.DRIVER_NOT_LOADED


def test_a_library_too_old_to_be_opened_is_said_so(library):
    library.missing.add("nvmlInitWithFlags")
    assert refusal(PynvmlDriver().open).code == Return.FUNCTION_NOT_FOUND


def test_open_loads_the_library_once_from_the_given_roots(library, monkeypatch):
    asked = []

    def load(roots):
        asked.append(roots)
        return library

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(loader, "load", load)
    driver = PynvmlDriver(["/driver-root", "/"])
    driver.open()
    driver.open()
    assert asked == [("/driver-root", "/")]
    assert library.calls == [("nvmlInitWithFlags", 0)] * 2


def test_a_library_that_appears_later_is_found_by_the_next_open(library, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    answers = iter([NvmlError(Return.LIBRARY_NOT_FOUND, "dlopen"), library])

    def load(roots):
        answer = next(answers)
        if isinstance(answer, NvmlError):
            raise answer
        return answer

    monkeypatch.setattr(loader, "load", load)
    driver = PynvmlDriver()
    assert refusal(driver.open).code == Return.LIBRARY_NOT_FOUND
    assert refusal(driver.device_count).code == Return.UNINITIALIZED
    driver.open()
    assert driver.device_count() == 2


def test_the_device_of_an_event_is_the_handle_of_its_gpu(driver, library):
    handles = [driver.handle_by_index(index) for index in range(2)]
    event = driver.wait(driver.event_set(), 10)
    assert handles.index(event.handle) == 1
    assert event == Event(handles[1], 8, 79, port.ALL_INSTANCES, port.ALL_INSTANCES)
    library.event = (FIRST, 0x4000, 0xFFFF_FFFF_FFFF, 3, 1)
    assert driver.wait(E, 10) == Event(handles[0], 0x4000, 0xFFFF_FFFF_FFFF, 3, 1)


def test_an_event_of_no_device_has_no_handle(driver, library):
    library.event = (None, 8, 79, 0, 0)
    assert driver.wait(E, 10).handle == 0


def test_a_wait_in_which_nothing_came_is_a_timeout(driver, library):
    library.refusals["nvmlEventSetWait_v2"] = 10
    error = refusal(driver.wait, E, 10)
    assert error.code == Return.TIMEOUT
    assert not error.unsupported


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("driver_version", "driver_version"),
        ("uuid", "uuid"),
        ("name", "name"),
        ("pci_bus_id", "bus_id"),
        ("nvlink_remote_bus_id", "remote_bus_id"),
    ],
)
def test_bytes_that_are_no_text_are_a_refusal(driver, library, call, value):
    library.values[value] = b"\xff\xfe\xff"
    arguments = {"driver_version": (), "nvlink_remote_bus_id": (H, 0)}.get(call, (H,))
    error = refusal(getattr(driver, call), *arguments)
    assert error.code == Return.UNKNOWN
    assert error.call.startswith("nvml")
    assert "no text" in error.text


def test_a_name_in_utf8_is_text(driver, library):
    library.values["name"] = "Ω GPU".encode()
    assert driver.name(H) == "Ω GPU"


@pytest.mark.parametrize(
    ("kind", "member", "value", "read"),
    [
        (pynvml.NVML_VALUE_TYPE_DOUBLE, "dVal", 12.75, 12),
        (pynvml.NVML_VALUE_TYPE_DOUBLE, "dVal", float("nan"), None),
        (pynvml.NVML_VALUE_TYPE_DOUBLE, "dVal", float("inf"), None),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "uiVal", 0xFFFFFFFF, 0xFFFFFFFF),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG, "ulVal", 1 << 63, 1 << 63),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, "ullVal", (1 << 64) - 1, (1 << 64) - 1),
        (pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG, "sllVal", -(1 << 40), -(1 << 40)),
        (pynvml.NVML_VALUE_TYPE_SIGNED_INT, "siVal", -7, -7),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT, "usVal", 65535, 65535),
        (pynvml.NVML_VALUE_TYPE_COUNT, "ullVal", 1, None),
    ],
)
def test_a_field_is_read_as_its_type_says(driver, library, kind, member, value, read):
    library.fields[230] = (0, kind, member, value)
    assert driver.field_values(H, (230,)) == (read,)


def test_a_refused_field_leaves_the_others_alone(driver, library):
    library.fields = {1: (0, 1, "uiVal", 11), 2: (3, 1, "uiVal", 22), 3: (0, 4, "sllVal", -33)}
    assert driver.field_values(H, (3, 2, 1)) == (-33, None, 11)


def test_a_link_that_is_down_has_no_far_end(driver, library):
    assert driver.nvlink_remote_bus_id(H, 1) is None
    assert library.calls == [("nvmlDeviceGetNvLinkState", FIRST, 1)]


def test_a_negative_numa_node_is_passed_on_as_such(driver, library):
    library.values["numa_node"] = -1
    assert driver.numa_node(H) == -1


def test_its_calls_are_declared_as_the_port_declares_them():
    for name in {call[0] for call in CALLS}:
        assert inspect.signature(getattr(PynvmlDriver, name)) == inspect.signature(getattr(port.Driver, name))
