import ctypes
import math
import threading

import msgspec
import pynvml
import pytest

from gpu_plugin.devices.node import Engines
from gpu_plugin.devices.nvml_h import ALL_INSTANCES, MAX_NVLINKS, Return, Threshold, ValueType
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml import driver as loader
from gpu_plugin.nvml import port
from gpu_plugin.nvml.driver import PynvmlDriver
from gpu_plugin.nvml.port import Event, EventSet, Field, Handle, MigAttributes, NvmlError, PcieLink, RemappedRows

from . import header
from .fake_library import EVENTS, FIRST, MIG, SECOND, VERSIONS, FakeLibrary

UUID = "GPU-92e1c9b6-dd9b-778f-6e34-6f0d728ad189"
BUS_ID = "00000000:00:06.0"
MASK = 0x1_0000_0008
LONG = 10.0
CLUSTER = "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf"
H, M, E = Handle(FIRST), Handle(MIG), EventSet(EVENTS)

# Each call of the port: its arguments, its answer, and the calls that reach the library
CALLS = [
    ("driver_version", (), "580.159.04", [("nvmlSystemGetDriverVersion", 80)]),
    ("cuda_version", (), (13, 1), [("nvmlSystemGetCudaDriverVersion_v2",)]),
    ("device_count", (), 2, [("nvmlDeviceGetCount_v2",)]),
    ("handle_by_index", (1,), SECOND, [("nvmlDeviceGetHandleByIndex_v2", 1)]),
    ("handle_by_uuid", (UUID,), FIRST, [("nvmlDeviceGetHandleByUUID", UUID.encode())]),
    ("handle_by_pci_bus_id", (BUS_ID,), SECOND, [("nvmlDeviceGetHandleByPciBusId_v2", BUS_ID.encode())]),
    ("uuid", (H,), UUID, [("nvmlDeviceGetUUID", FIRST, 96)]),
    ("minor_number", (H,), 5, [("nvmlDeviceGetMinorNumber", FIRST)]),
    ("pci_bus_id", (H,), "00000000:00:06.0", [("nvmlDeviceGetPciInfo_v3", FIRST)]),
    ("name", (H,), "NVIDIA H200", [("nvmlDeviceGetName", FIRST, 96)]),
    ("architecture", (H,), 9, [("nvmlDeviceGetArchitecture", FIRST)]),
    ("compute_capability", (H,), (9, 0), [("nvmlDeviceGetCudaComputeCapability", FIRST)]),
    ("memory_total", (H,), 150754820096, [("nvmlDeviceGetMemoryInfo", FIRST)]),
    ("memory_used", (H,), 0x1_2345_6789, [("nvmlDeviceGetMemoryInfo_v2", FIRST)]),
    ("utilization", (H,), 87, [("nvmlDeviceGetUtilizationRates", FIRST)]),
    ("power_usage", (H,), 345_678, [("nvmlDeviceGetPowerUsage", FIRST)]),
    ("power_limit", (H,), 700_000, [("nvmlDeviceGetEnforcedPowerLimit", FIRST)]),
    ("mig_mode", (H,), (0, 1), [("nvmlDeviceGetMigMode", FIRST)]),
    ("max_mig_devices", (H,), 7, [("nvmlDeviceGetMaxMigDeviceCount", FIRST)]),
    ("mig_handle", (H, 6), MIG, [("nvmlDeviceGetMigDeviceHandleByIndex", FIRST, 6)]),
    ("gpu_instance_id", (M,), 13, [("nvmlDeviceGetGpuInstanceId", MIG)]),
    ("compute_instance_id", (M,), 1, [("nvmlDeviceGetComputeInstanceId", MIG)]),
    (
        "mig_attributes",
        (M,),
        MigAttributes(3, 2, 0x1_0000_4E00, Engines(14, 1, 2, 3, 4, 5)),
        [("nvmlDeviceGetAttributes_v2", MIG)],
    ),
    ("compute_mode", (H,), 3, [("nvmlDeviceGetComputeMode", FIRST)]),
    ("set_compute_mode", (H, 3), None, [("nvmlDeviceSetComputeMode", FIRST, 3)]),
    ("memory_affinity", (H,), frozenset({2, 63, 1023}), [("nvmlDeviceGetMemoryAffinity", FIRST, 16, 0)]),
    ("persistence_mode", (H,), True, [("nvmlDeviceGetPersistenceMode", FIRST)]),
    ("temperature", (H,), 32, [("nvmlDeviceGetTemperatureV", FIRST)]),
    ("temperature_threshold", (H, Threshold.SHUTDOWN), 90, [("nvmlDeviceGetTemperatureThreshold", FIRST, 0)]),
    ("temperature_threshold", (H, Threshold.GPU_MAX), 93, [("nvmlDeviceGetTemperatureThreshold", FIRST, 3)]),
    ("margin_temperature", (H,), -3, [("nvmlDeviceGetMarginTemperature", FIRST)]),
    ("uncorrected_ecc_errors", (H,), 0x1_0000_0002, [("nvmlDeviceGetTotalEccErrors", FIRST, 1, 0)]),
    ("sram_threshold_exceeded", (H,), True, [("nvmlDeviceGetSramEccErrorStatus", FIRST)]),
    ("remapped_rows", (H,), RemappedRows(1, 2, pending=True), [("nvmlDeviceGetRemappedRows", FIRST)]),
    ("retired_pages_pending", (H,), True, [("nvmlDeviceGetRetiredPagesPendingStatus", FIRST)]),
    ("unrepairable_memory", (H,), True, [("nvmlDeviceGetUnrepairableMemoryFlag_v1", FIRST)]),
    ("clocks_event_reasons", (H,), 0x1_0000_0040, [("nvmlDeviceGetCurrentClocksEventReasons", FIRST)]),
    ("nvlink_states", (H,), (True, False), [("nvmlDeviceGetNvLinkState", FIRST, link) for link in range(3)]),
    ("nvlink_to_switch", (H, 0), True, [("nvmlDeviceGetNvLinkRemoteDeviceType", FIRST, 0)]),
    ("fabric", (H,), Fabric(3, 0, 0x1A9, 1, CLUSTER, 32766), [("nvmlDeviceGetGpuFabricInfo_v4", FIRST)]),
    (
        "pcie_link",
        (H,),
        PcieLink(8, 16),
        [("nvmlDeviceGetCurrPcieLinkWidth", FIRST), ("nvmlDeviceGetMaxPcieLinkWidth", FIRST)],
    ),
    ("pcie_generation", (H,), 3, [("nvmlDeviceGetCurrPcieLinkGeneration", FIRST)]),
    ("pcie_max_generation", (H,), 5, [("nvmlDeviceGetMaxPcieLinkGeneration", FIRST)]),
    ("pcie_replays", (H,), 0xFFFF_FFFE, [("nvmlDeviceGetPcieReplayCounter", FIRST)]),
    (
        "vgpu_licensed",
        (H,),
        True,
        [("nvmlDeviceGetVirtualizationMode", FIRST), ("nvmlDeviceGetGridLicensableFeatures_v4", FIRST)],
    ),
    ("total_energy", (H,), 0x1_2345_6789_ABCD, [("nvmlDeviceGetTotalEnergyConsumption", FIRST)]),
    ("supported_event_types", (H,), 0x1_0000_FF9F, [("nvmlDeviceGetSupportedEventTypes", FIRST)]),
    ("field_values", (H, (Field(230), Field(165, 17))), (5, 2), [("nvmlDeviceGetFieldValues", FIRST, 2)]),
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
# The older functions of a call, for a library without the newest
OLDER = {
    "fabric": {"nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo"},
    "clocks_event_reasons": {"nvmlDeviceGetCurrentClocksThrottleReasons"},
    "temperature": {"nvmlDeviceGetTemperature"},
    "memory_used": {"nvmlDeviceGetMemoryInfo"},
}


@pytest.fixture
def library(monkeypatch):
    """Let the loader find the fake library. `unloaded` are the libraries that were closed."""
    fake = FakeLibrary()
    fake.fields = {230: (0, 1, ctypes.c_uint(5)), (165, 17): (0, 1, ctypes.c_uint(2))}
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    monkeypatch.setattr(loader, "load", lambda roots: fake)
    monkeypatch.setattr(loader, "unload", fake.unloaded.append)
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
    if isinstance(value, msgspec.Struct):
        return all(plain(item) for item in msgspec.structs.astuple(value))
    return type(value) in (int, str, bool, type(None)) or (
        isinstance(value, tuple | frozenset) and all(plain(item) for item in value)
    )


def test_the_table_here_has_the_whole_port():
    assert {call[0] for call in CALLS} | {"open", "close"} == port.NVML_FUNCTIONS.keys()


@pytest.mark.parametrize(("call", "arguments", "answer", "arrived"), CALLS, ids=NAMES)
def test_a_call_reaches_its_function_and_gives_plain_values(driver, library, call, arguments, answer, arrived):
    got = getattr(driver, call)(*arguments)
    assert got == answer
    assert plain(got)
    assert type(got) is type(answer)
    assert library.calls == arrived


@pytest.mark.parametrize(("call", "arguments", "answer", "arrived"), CALLS, ids=NAMES)
def test_a_refusal_has_the_code_and_the_function_and_before_open_nothing_reaches_the_library(
    driver, library, call, arguments, answer, arrived
):
    assert refusal(getattr(PynvmlDriver(), call), *arguments).code == Return.UNINITIALIZED
    assert library.calls == []
    function = arrived[0][0]
    library.refusals[function] = Return.GPU_IS_LOST
    error = refusal(getattr(driver, call), *arguments)
    assert error.code == Return.GPU_IS_LOST
    assert not error.unsupported
    assert function.startswith(error.call)
    assert "gpu is lost (15)" in str(error)


@pytest.mark.parametrize(("call", "arguments", "answer", "arrived"), CALLS, ids=NAMES)
def test_a_function_that_the_library_lacks_is_unsupported(driver, library, call, arguments, answer, arrived):
    library.missing |= {arrived[-1][0], *OLDER.get(call, ())}
    error = refusal(getattr(driver, call), *arguments)
    assert error.code == Return.FUNCTION_NOT_FOUND
    assert error.unsupported


@pytest.mark.parametrize("code", [2, 3, 4, 6, 10, 16, 999, 4711])
def test_every_code_is_passed_on_also_one_without_a_name(driver, library, code):
    library.refusals["nvmlDeviceGetCount_v2"] = code
    error = refusal(driver.device_count)
    assert error.code == code
    assert str(error).endswith(f"({code})")


def test_nothing_reaches_the_library_before_open_and_after_close(library):
    driver = PynvmlDriver()
    driver.close()
    assert library.calls == []
    driver.open()
    driver.close()
    assert library.calls == [("nvmlInitWithFlags", 0), ("nvmlShutdown",)]
    for call in (driver.uuid, driver.temperature, driver.fabric, driver.unrepairable_memory):
        assert refusal(call, H).code == Return.UNINITIALIZED
    assert len(library.calls) == 2


def test_a_library_that_is_too_old_or_without_a_driver_refuses_to_open(library):
    library.refusals["nvmlInitWithFlags"] = Return.DRIVER_NOT_LOADED
    assert refusal(PynvmlDriver().open).code == Return.DRIVER_NOT_LOADED
    library.missing.add("nvmlInitWithFlags")
    assert refusal(PynvmlDriver().open).code == Return.FUNCTION_NOT_FOUND


class Shelf:
    """The libraries on disk, one for each call of the loader. `asked` are the roots of each call."""

    def __init__(self, monkeypatch, *libraries):
        self.asked = []
        self._left = list(libraries)
        monkeypatch.setattr(loader, "load", self._load)

    def _load(self, roots):
        self.asked.append(roots)
        found = self._left.pop(0)
        if isinstance(found, NvmlError):
            raise found
        return found


def test_open_loads_the_library_once_from_the_given_roots(library, monkeypatch):
    shelf = Shelf(monkeypatch, library)
    driver = PynvmlDriver(["/driver-root", "/"])
    driver.open()
    driver.open()
    assert shelf.asked == [("/driver-root", "/")]
    assert library.calls == [("nvmlInitWithFlags", 0)] * 2


def test_a_library_that_appears_later_is_found_by_the_next_open(library, monkeypatch):
    Shelf(monkeypatch, NvmlError(Return.LIBRARY_NOT_FOUND, "dlopen"), library)
    driver = PynvmlDriver()
    assert refusal(driver.open).code == Return.LIBRARY_NOT_FOUND
    assert refusal(driver.device_count).code == Return.UNINITIALIZED
    driver.open()
    assert driver.device_count() == 2


def test_after_the_last_close_the_next_open_takes_what_lies_on_disk_then(library, monkeypatch):
    upgraded = FakeLibrary()
    upgraded.values["driver_version"] = b"590.44.01"
    Shelf(monkeypatch, library, upgraded)
    driver = PynvmlDriver()
    driver.open()
    driver.open()
    driver.close()
    assert library.unloaded == []
    assert driver.driver_version() == "580.159.04"
    driver.close()
    assert library.unloaded == [library]
    driver.open()
    assert driver.driver_version() == "590.44.01"
    assert library.calls[-1] == ("nvmlShutdown",), "nothing reaches a library that was given back"


def test_two_drivers_of_one_process_share_the_library_until_both_are_closed(library):
    one, other = PynvmlDriver(), PynvmlDriver()
    one.open()
    other.open()
    one.close()
    assert library.unloaded == []
    assert other.device_count() == 2
    other.close()
    assert library.unloaded == [library]


def test_a_library_of_another_version_is_loaded_again_by_the_next_open(library, monkeypatch):
    upgraded = FakeLibrary()
    Shelf(monkeypatch, library, upgraded)
    library.refusals["nvmlInitWithFlags"] = Return.LIB_RM_VERSION_MISMATCH
    driver = PynvmlDriver()
    assert refusal(driver.open).code == Return.LIB_RM_VERSION_MISMATCH
    driver.open()
    assert library.unloaded == [library]
    assert driver.device_count() == 2
    assert upgraded.unloaded == []


def test_a_close_that_fails_leaves_the_library_in_use(driver, library):
    library.refusals["nvmlShutdown"] = Return.UNKNOWN
    assert refusal(driver.close).code == Return.UNKNOWN
    assert library.unloaded == []
    assert driver.device_count() == 2


def test_a_library_in_which_a_call_hangs_keeps_its_code_until_the_call_is_out_of_it(library, monkeypatch):
    upgraded = FakeLibrary()
    Shelf(monkeypatch, library, upgraded)
    driver = PynvmlDriver()
    driver.open()
    with library.holding("nvmlDeviceGetTemperatureV") as held:
        hung = threading.Thread(target=driver.temperature, args=(H,))
        hung.start()
        assert held.entered.wait(LONG)
        driver.close()
        driver.open()
        assert library.unloaded == []
        assert driver.device_count() == 2, "the library that is still there serves on"
        driver.close()
    hung.join(LONG)
    assert not hung.is_alive()
    driver.open()
    assert library.unloaded == [library]
    driver.close()
    assert library.unloaded + upgraded.unloaded == [library, upgraded]


def test_no_call_begins_while_the_library_is_unloaded(library, monkeypatch):
    asked, answered = threading.Event(), []
    driver = PynvmlDriver()
    driver.open()

    def ask():
        asked.set()
        answered.append(refusal(driver.device_count).code)

    late = threading.Thread(target=ask)

    def unload(loaded):
        late.start()
        assert asked.wait(LONG)
        late.join(0.05)  # it cannot get on, however long it is given
        assert late.is_alive()
        assert answered == []
        library.unloaded.append(loaded)

    monkeypatch.setattr(loader, "unload", unload)
    driver.close()
    late.join(LONG)
    assert not late.is_alive()
    assert answered == [Return.UNINITIALIZED]


@pytest.mark.parametrize(
    ("mode", "features", "licensed"),
    [(2, (), False), (2, (0,), False), (2, (0, 0, 1), True), (0, (0,), None), (1, (0,), None), (3, (0,), None)],
)
def test_only_a_vgpu_needs_a_license(driver, library, mode, features, licensed):
    library.virtualization, library.features = mode, features
    if licensed is None:
        assert refusal(driver.vgpu_licensed, H).code == Return.NOT_SUPPORTED
    else:
        assert driver.vgpu_licensed(H) is licensed


@pytest.mark.parametrize(
    ("event", "received"),
    [
        ((SECOND, 8, 79, ALL_INSTANCES, ALL_INSTANCES), Event(Handle(SECOND), 8, 79, ALL_INSTANCES, ALL_INSTANCES)),
        ((FIRST, 0x4000, 0xFFFF_FFFF_FFFF, 3, 1), Event(H, 0x4000, 0xFFFF_FFFF_FFFF, 3, 1)),
        ((None, 8, 79, 0, 0), Event(Handle(0), 8, 79, 0, 0)),
    ],
)
def test_an_event_has_the_handle_of_its_gpu_and_a_wait_without_an_event_is_a_timeout(driver, library, event, received):
    library.event = event
    assert driver.wait(E, 10) == received
    library.refusals["nvmlEventSetWait_v2"] = 10
    error = refusal(driver.wait, E, 10)
    assert (error.code, error.unsupported) == (Return.TIMEOUT, False)


@pytest.mark.parametrize(
    ("call", "arguments", "value"),
    [
        ("driver_version", (), "driver_version"),
        ("uuid", (H,), "uuid"),
        ("name", (H,), "name"),
        ("pci_bus_id", (H,), "bus_id"),
        ("nvlink_remote_bus_id", (H, 0), "remote_bus_id"),
    ],
)
def test_text_is_utf8_and_other_bytes_are_a_refusal(driver, library, call, arguments, value):
    library.values[value] = "Ω".encode()
    assert getattr(driver, call)(*arguments) == "Ω"
    library.values[value] = b"\xff\xfe\xff"
    error = refusal(getattr(driver, call), *arguments)
    assert error.code == Return.UNKNOWN
    assert error.call.startswith("nvml")


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (ValueType.DOUBLE, ctypes.c_double(12.75), 12),
        (ValueType.DOUBLE, ctypes.c_double(math.nan), None),
        (ValueType.DOUBLE, ctypes.c_double(math.inf), None),
        (ValueType.UNSIGNED_INT, ctypes.c_uint(0xFFFFFFFF), 0xFFFFFFFF),
        (ValueType.UNSIGNED_LONG, ctypes.c_ulong(1 << 63), 1 << 63),
        (ValueType.UNSIGNED_LONG_LONG, ctypes.c_ulonglong((1 << 64) - 1), (1 << 64) - 1),
        (ValueType.SIGNED_LONG_LONG, ctypes.c_longlong(-(1 << 40)), -(1 << 40)),
        (ValueType.SIGNED_INT, ctypes.c_int(-7), -7),
        (ValueType.UNSIGNED_SHORT, ctypes.c_ushort(65535), 65535),
        (7, ctypes.c_ulonglong(1), None),
    ],
)
def test_a_field_is_read_as_its_type_says(driver, library, kind, value, read):
    library.fields[230] = (0, kind, value)
    (got,) = driver.field_values(H, (Field(230),))
    assert got == read if read is not None else isinstance(got, NvmlError)


@pytest.mark.parametrize("code", [Return.NOT_SUPPORTED, Return.UNKNOWN, Return.GPU_IS_LOST])
def test_a_refused_field_has_its_error_and_the_others_their_values(driver, library, code):
    library.fields = {1: (0, 1, ctypes.c_uint(11)), 2: (code, 1, ctypes.c_uint(22)), 3: (0, 4, ctypes.c_longlong(-33))}
    one, two, three = driver.field_values(H, (Field(3), Field(2), Field(1)))
    assert (one, three) == (-33, 11)
    assert isinstance(two, NvmlError)
    assert (two.code, two.call) == (code, "nvmlDeviceGetFieldValues")
    assert "field 2 of scope 0" in str(two)


def test_a_field_of_a_link_is_asked_for_by_the_link(driver, library):
    library.fields = {(38, link): (0, 3, ctypes.c_ulonglong(100 + link)) for link in range(18)}
    assert driver.field_values(H, tuple(Field(38, link) for link in range(18))) == tuple(range(100, 118))
    assert len(library.calls) == 1


def test_there_are_as_many_links_as_the_driver_knows(driver, library):
    library.active_links = dict.fromkeys(range(18), 1)
    library.active_links[5] = 0
    assert driver.nvlink_states(H) == (*[True] * 5, False, *[True] * 12)
    library.active_links = dict.fromkeys(range(100), 1)
    assert len(driver.nvlink_states(H)) == MAX_NVLINKS


@pytest.mark.parametrize(
    ("link", "code", "states"),
    [
        *[(0, code, None) for code in (Return.NOT_SUPPORTED, Return.FUNCTION_NOT_FOUND, Return.GPU_IS_LOST)],
        (0, Return.UNKNOWN, None),
        (1, Return.UNKNOWN, None),
        (1, Return.NOT_SUPPORTED, (True,)),
    ],
)
def test_a_refused_link_ends_the_links_if_it_is_not_supported_and_not_the_first(driver, library, link, code, states):
    library.link_refusals[link] = code
    if states is None:
        assert refusal(driver.nvlink_states, H).code == code
    else:
        assert driver.nvlink_states(H) == states


def test_a_link_to_another_gpu_leads_to_no_switch(driver, library):
    library.switches = set()
    assert driver.nvlink_to_switch(H, 0) is False


FABRIC = Fabric(state=2, status=0, health_mask=0x2AA, summary=3, cluster=CLUSTER, clique=32766)
V4, V, V1 = ("nvmlDeviceGetGpuFabricInfo_v4", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo")


@pytest.mark.parametrize(
    ("missing", "versions", "told", "asked"),
    [
        (set(), {2, 3}, FABRIC, [V4]),
        ({V4}, {2, 3}, FABRIC, [V]),
        ({V4}, {2}, msgspec.structs.replace(FABRIC, summary=0), [V, V]),
        ({V4, V}, set(), msgspec.structs.replace(FABRIC, summary=0, health_mask=0), [V1]),
        ({V4}, set(), msgspec.structs.replace(FABRIC, summary=0, health_mask=0), [V, V, V1]),
    ],
)
def test_the_fabric_is_asked_for_as_new_as_the_library_knows_it(driver, library, missing, versions, told, asked):
    library.missing, library.fabric_versions = missing, versions
    library.fabric = (FABRIC.state, FABRIC.status, FABRIC.health_mask, FABRIC.summary)
    assert driver.fabric(H) == told
    assert [call[0] for call in library.calls] == asked
    library.calls.clear()
    assert driver.fabric(H) == told
    assert [call[0] for call in library.calls] == asked[-1:], "what was answered once is asked for at once"


@pytest.mark.parametrize("code", [Return.NOT_SUPPORTED, Return.INVALID_ARGUMENT])
def test_a_driver_that_does_not_know_the_newest_structure_is_asked_with_older_ones(driver, library, code):
    library.refusals[V4] = code
    told = msgspec.structs.replace(Fabric(*library.fabric), cluster=CLUSTER, clique=32766)
    assert driver.fabric(H) == told
    library.refusals[V] = code
    assert driver.fabric(H) == msgspec.structs.replace(told, health_mask=0, summary=0)
    library.refusals[V1] = code
    assert refusal(driver.fabric, H).code == code


OLDEST_FIRST: list[set[str]] = [{V4, V}, {V4}, set()]


@pytest.mark.parametrize("missing", OLDEST_FIRST)
@pytest.mark.parametrize(("cluster", "expected"), [(bytes(16), ""), (bytes([*[0] * 15, 1]), "0" * 31 + "1")])
def test_a_cluster_uuid_of_zeros_is_none(driver, library, missing, cluster, expected):
    library.missing, library.cluster, library.cliques = missing, cluster, [(0, 0)]
    found = driver.fabric(H)
    assert (found.cluster, found.clique) == (expected, 0)


@pytest.mark.parametrize(
    ("cliques", "clique"),
    [
        ([(0, 0xFFFF_FFFE)], 0xFFFF_FFFE),
        ([(1, 7), (0, 3), (0, 2)], 3),
        ([(1, 7), (2, 8)], 0),  # no clique whose GPUs reach each other's memory
        ([], 0),
        ([(1, 7)] * 63 + [(0, 5)], 5),
    ],
)
def test_of_several_cliques_the_first_that_reaches_memory_counts(driver, library, cliques, clique):
    library.cliques = cliques
    assert driver.fabric(H).clique == clique


def test_more_cliques_than_there_is_room_for_are_no_way_out_of_it(driver, library, monkeypatch):
    library.cliques = [(1, 7)] * 64
    real = library._nvmlDeviceGetGpuFabricInfo_v4

    def boast(handle, info):
        real(handle, info)
        header.At("nvmlGpuFabricInfo_v4_t", info)["numCliques"] = 0xFFFF_FFFF

    monkeypatch.setattr(library, "_nvmlDeviceGetGpuFabricInfo_v4", boast)
    assert driver.fabric(H).clique == 0


def test_an_older_structure_is_no_way_round_a_lost_gpu(driver, library):
    library.refusals[V4] = Return.GPU_IS_LOST
    assert refusal(driver.fabric, H).code == Return.GPU_IS_LOST
    assert [call[0] for call in library.calls] == [V4]


def test_another_library_is_asked_for_its_newest_structure(driver, library, monkeypatch):
    library.missing = {V4}
    driver.fabric(H)
    driver.close()
    library.missing = set()
    driver.open()
    library.calls.clear()
    driver.fabric(H)
    assert [call[0] for call in library.calls] == [V4]


@pytest.mark.parametrize(
    ("call", "newest", "older", "answer"),
    [
        (
            "clocks_event_reasons",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            0x1_0000_0040,
        ),
        ("temperature", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", 32),
    ],
)
def test_an_older_library_is_asked_by_the_older_function_until_another_is_loaded(
    driver, library, call, newest, older, answer
):
    library.values["temperature"] = -40
    library.missing = {newest}
    assert [getattr(driver, call)(H), getattr(driver, call)(H)] == [answer] * 2
    assert [each[0] for each in library.calls][-2:] == [older] * 2
    driver.close()
    library.missing = set()
    driver.open()
    assert getattr(driver, call)(H) == (-40 if call == "temperature" else answer)


@pytest.mark.parametrize("code", [Return.GPU_IS_LOST, Return.UNKNOWN, Return.NOT_SUPPORTED, Return.INVALID_ARGUMENT])
def test_no_other_refusal_of_a_temperature_is_the_librarys_age(driver, library, code):
    library.refusals["nvmlDeviceGetTemperatureV"] = code
    assert refusal(driver.temperature, H).code == code
    del library.refusals["nvmlDeviceGetTemperatureV"]
    assert driver.temperature(H) == 32


def test_what_pynvml_is_too_old_for_is_asked_of_the_library_itself(driver, library, monkeypatch):
    for name in ("c_nvmlGpuFabricInfo_v4_t", "nvmlDeviceGetGpuFabricInfo_v4", "nvmlDeviceGetUnrepairableMemoryFlag_v1"):
        monkeypatch.delattr(pynvml, name, raising=False)  # older releases that pyproject.toml allows lack it
    assert driver.fabric(H).clique == 32766
    assert driver.unrepairable_memory(H)


@pytest.mark.parametrize(
    ("call", "function"),
    [
        ("margin_temperature", "nvmlDeviceGetMarginTemperature"),
        ("sram_threshold_exceeded", "nvmlDeviceGetSramEccErrorStatus"),
    ],
)
def test_a_structure_of_another_version_is_one_that_the_driver_never_answers(driver, monkeypatch, call, function):
    monkeypatch.setitem(VERSIONS, function, 0x9000008)
    error = refusal(getattr(driver, call), H)
    assert error.code == Return.ARGUMENT_VERSION_MISMATCH
    assert error.unsupported


@pytest.mark.parametrize(
    ("sram", "rows", "exceeded", "remapped"),
    [
        (0, (0, 0, 0, 0), False, RemappedRows()),
        (2**32 - 1, (1, 2, 2**32 - 1, 2**32 - 1), None, RemappedRows(1, 2, None, None)),
    ],
)
def test_flags_are_false_at_0_and_unknown_if_all_bits_are_set(driver, library, sram, rows, exceeded, remapped):
    library.values |= {"sram_exceeded": sram, "remapped": rows, "unrepairable": 0}
    assert driver.sram_threshold_exceeded(H) is exceeded
    assert driver.remapped_rows(H) == remapped
    assert driver.unrepairable_memory(H) is False


@pytest.mark.parametrize(
    ("code", "remote"),
    [
        (Return.NOT_SUPPORTED, ""),
        (Return.INVALID_ARGUMENT, ""),
        *[(code, None) for code in (Return.GPU_IS_LOST, Return.NO_PERMISSION, Return.UNKNOWN)],
    ],
)
def test_the_remote_end_of_a_link_is_none_if_it_is_down_and_empty_if_it_is_not_known(driver, library, code, remote):
    assert driver.nvlink_remote_bus_id(H, 1) is None
    assert library.calls == [("nvmlDeviceGetNvLinkState", FIRST, 1)]
    library.refusals["nvmlDeviceGetNvLinkRemotePciInfo_v2"] = code
    if remote is None:
        assert refusal(driver.nvlink_remote_bus_id, H, 0).code == code
    else:
        assert driver.nvlink_remote_bus_id(H, 0) == remote
        assert refusal(driver.nvlink_remote_bus_id, H, 2).code == Return.INVALID_ARGUMENT
    assert driver.nvlink_to_switch(H, 0)
