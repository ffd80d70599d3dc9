# ruff: noqa: N802 - methods are named as the functions they answer for
"""An NVML library: C functions with NVML's own signatures that Python answers.

They are called through untyped pointers like the real functions, so that an argument of a wrong type shows. Signatures and
structures come from the recorded nvml.h (`header`), not from a binding.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu_plugin.devices.nvml_h import Return
from tests.unit.nvml import header
from tests.unit.nvml.header import At

# Handles are wider than 32 bits, like pointers. MIG is the only MIG device of the first GPU.
FIRST, SECOND, MIG, EVENTS = 0x7F00_1234_5000, 0x7F00_1234_6000, 0x7F00_5555_7000, 0x7F00_9876_0000

# The version of the structure that a function expects
VERSIONS = {
    "nvmlDeviceGetMemoryInfo_v2": header.version("nvmlMemory_v2_t", 2),
    "nvmlDeviceGetMarginTemperature": header.version("nvmlMarginTemperature_v1_t", 1),
    "nvmlDeviceGetSramEccErrorStatus": header.version("nvmlEccSramErrorStatus_v1_t", 1),
    "nvmlDeviceGetTemperatureV": header.version("nvmlTemperature_v1_t", 1),
}

# The value that a function writes through its last argument; None: it writes nothing
PLAIN: dict[str, int | None] = {
    "nvmlInitWithFlags": None,
    "nvmlShutdown": None,
    "nvmlDeviceSetComputeMode": None,
    "nvmlEventSetFree": None,
    "nvmlDeviceRegisterEvents": None,
    "nvmlSystemGetCudaDriverVersion_v2": 13010,
    "nvmlDeviceGetCount_v2": 2,
    "nvmlDeviceGetHandleByUUID": FIRST,
    "nvmlDeviceGetHandleByPciBusId_v2": SECOND,
    "nvmlDeviceGetMinorNumber": 5,
    "nvmlDeviceGetArchitecture": 9,
    "nvmlDeviceGetPowerUsage": 345_678,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetMaxMigDeviceCount": 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": MIG,
    "nvmlDeviceGetGpuInstanceId": 13,
    "nvmlDeviceGetComputeInstanceId": 1,
    "nvmlDeviceGetComputeMode": 3,
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetTemperature": 32,
    "nvmlDeviceGetRetiredPagesPendingStatus": 1,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetCurrPcieLinkGeneration": 3,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetPcieReplayCounter": 0xFFFF_FFFE,
    "nvmlDeviceGetSupportedEventTypes": 0x1_0000_FF9F,
    "nvmlDeviceGetTopologyCommonAncestor": 30,
    "nvmlEventSetCreate": EVENTS,
}

_FABRICS = {2: "nvmlGpuFabricInfo_v2_t", 3: "nvmlGpuFabricInfo_v3_t"}


class Held:
    """A function that hangs until `free` is set. `entered` is set when a call is in it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.free = threading.Event()


class FakeLibrary:
    """A library with two GPUs.

    `calls` are the functions called, with the arguments that go in. `refusals` are return codes by function, `missing` are
    functions that the library lacks, `unloaded` are the libraries that were closed. `values` are answers. `fabric` is (state,
    status, health mask, summary), of a cluster with the uuid of these bytes and with these `cliques`, as (type, id);
    `fabric_versions` are the structures that nvmlDeviceGetGpuFabricInfoV accepts. Padding of structures is filled with
    `garbage`. `fields` are values of nvmlDeviceGetFieldValues by id, or by id and scope, as (code, type, a ctypes value).
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.unloaded: list[Any] = []
        self.refusals: dict[str, int] = {}
        self.missing: set[str] = set()
        self.fields: dict[int | tuple[int, int], tuple[int, int, Any]] = {}
        self.event = (SECOND, 8, 79, 0xFFFFFFFF, 0xFFFFFFFF)
        self.active_links = {0: 1, 1: 0}
        self.link_refusals: dict[int, int] = {}
        self.switches = {0}
        self.fabric_versions = {2, 3}
        self.fabric = (3, 0, 0x1A9, 1)
        self.cluster = bytes(range(0xA0, 0xB0))
        self.garbage = 0xA5
        self.virtualization, self.features = 2, (0, 1)
        self.cliques = [(0, 32766), (0, 40000), (1, 7)]
        self.values: dict[str, Any] = {
            "driver_version": b"580.159.04",
            "uuid": b"GPU-92e1c9b6-dd9b-778f-6e34-6f0d728ad189",
            "name": b"NVIDIA H200",
            "bus_id": b"00000000:00:06.0",
            "remote_bus_id": b"00000000:1B:00.0",
            "memory": 150754820096,
            "memory_used": 0x1_2345_6789,
            "mig_memory": 0x1_0000_4E00,
            "energy": 0x1_2345_6789_ABCD,
            "ecc": 0x1_0000_0002,
            "margin": -3,
            "clocks": 0x1_0000_0040,
            "remapped": (1, 2, 1, 0),
            "sram_exceeded": 1,
            "memory_affinity": {0: 1 << 2 | 1 << 63, 15: 1 << 63},
            "temperature": 32,
            "unrepairable": 1,
        }
        self._made: dict[str, Any] = {}
        self._held: dict[str, Held] = {}

    @contextmanager
    def holding(self, name: str) -> Iterator["Held"]:
        """Let calls of this function hang until the context ends."""
        held = self._held[name] = Held()
        try:
            yield held
        finally:
            del self._held[name]
            held.free.set()

    def __getattr__(self, name: str) -> Any:
        if name not in header.FUNCTIONS or name in self.missing:
            raise AttributeError(name)
        if name not in self._made:
            typed = ctypes.CFUNCTYPE(ctypes.c_int, *header.signature(name))(self._function(name))
            untyped = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(typed, ctypes.c_void_p).value or 0)
            self._made[name] = (typed, untyped)
        return self._made[name][1]

    def _function(self, name: str) -> Callable[..., int]:
        answer: Callable[..., int | None] | None = getattr(self, f"_{name}", None)

        def function(*arguments: Any) -> int:
            self.calls.append((name, *(a for a in arguments if a is None or isinstance(a, int | bytes))))
            if held := self._held.get(name):
                held.entered.set()
                held.free.wait()
            if name in self.refusals:
                return self.refusals[name]
            if answer is not None:
                return answer(*arguments) or 0
            if PLAIN[name] is not None:
                arguments[-1][0] = PLAIN[name]
            return 0

        return function

    def _nvmlSystemGetDriverVersion(self, buffer, size):
        _fill(buffer, size, self.values["driver_version"])

    def _nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major[0], minor[0] = 9, 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle[0] = (FIRST, SECOND)[index]

    def _nvmlDeviceGetUUID(self, handle, buffer, size):
        _fill(buffer, size, self.values["uuid"])

    def _nvmlDeviceGetPciInfo_v3(self, handle, info):
        told = At("nvmlPciInfo_t", info)
        told["busIdLegacy"], told["busId"] = b"legacy", self.values["bus_id"]

    def _nvmlDeviceGetName(self, handle, buffer, size):
        _fill(buffer, size, self.values["name"])

    def _nvmlDeviceGetMemoryInfo(self, handle, memory):
        told = At("nvmlMemory_t", memory)
        told["total"], told["used"] = self.values["memory"], self.values["memory_used"] + 1

    def _nvmlDeviceGetMemoryInfo_v2(self, handle, memory):
        told = At("nvmlMemory_v2_t", memory)
        if told["version"] != VERSIONS["nvmlDeviceGetMemoryInfo_v2"]:
            return Return.ARGUMENT_VERSION_MISMATCH
        told["total"], told["reserved"], told["used"] = self.values["memory"], 1, self.values["memory_used"]
        return 0

    def _nvmlDeviceGetUtilizationRates(self, handle, rates):
        told = At("nvmlUtilization_t", rates)
        told["gpu"], told["memory"] = 87, 12

    def _nvmlDeviceGetMigMode(self, handle, current, pending):
        current[0], pending[0] = 0, 1

    def _nvmlDeviceGetVirtualizationMode(self, handle, mode):
        mode[0] = self.virtualization

    def _nvmlDeviceGetGridLicensableFeatures_v4(self, handle, told):
        told = At("nvmlGridLicensableFeatures_t", told)
        told["isGridLicenseSupported"], told["licensableFeaturesCount"] = 1, len(self.features)
        for index, licensed in enumerate(self.features):
            told.nested("gridLicensableFeatures", "nvmlGridLicensableFeature_t", index)["featureState"] = licensed

    def _nvmlDeviceGetAttributes_v2(self, handle, attributes):
        told = At("nvmlDeviceAttributes_t", attributes)
        told["multiprocessorCount"] = 14
        told["sharedCopyEngineCount"], told["sharedDecoderCount"], told["sharedEncoderCount"] = 1, 2, 3
        told["sharedJpegCount"], told["sharedOfaCount"] = 4, 5
        told["gpuInstanceSliceCount"], told["computeInstanceSliceCount"] = 3, 2
        told["memorySizeMB"] = self.values["mig_memory"]

    def _nvmlDeviceGetMemoryAffinity(self, handle, words, nodes, scope):
        assert scope == 0, "NVML_AFFINITY_SCOPE_NODE"
        for at in range(words):
            nodes[at] = self.values["memory_affinity"].get(at, 0)

    def _nvmlDeviceGetTemperatureV(self, handle, temperature):
        told = At("nvmlTemperature_v1_t", temperature)
        if told["version"] != VERSIONS["nvmlDeviceGetTemperatureV"]:
            return Return.ARGUMENT_VERSION_MISMATCH
        if told["sensorType"] != 0:
            return Return.INVALID_ARGUMENT
        told["temperature"] = self.values["temperature"]
        return 0

    def _nvmlDeviceGetTemperatureThreshold(self, handle, kind, celsius):
        celsius[0] = 90 + kind

    def _nvmlDeviceGetMarginTemperature(self, handle, info):
        told = At("nvmlMarginTemperature_v1_t", info)
        if told["version"] != VERSIONS["nvmlDeviceGetMarginTemperature"]:
            return Return.ARGUMENT_VERSION_MISMATCH
        told["marginTemperature"] = self.values["margin"]
        return 0

    def _nvmlDeviceGetTotalEccErrors(self, handle, kind, counter, count):
        count[0] = self.values["ecc"] if (kind, counter) == (1, 0) else 0xBAD

    def _nvmlDeviceGetSramEccErrorStatus(self, handle, status):
        told = At("nvmlEccSramErrorStatus_v1_t", status)
        if told["version"] != VERSIONS["nvmlDeviceGetSramEccErrorStatus"]:
            return Return.ARGUMENT_VERSION_MISMATCH
        told["volatileUncParity"], told["bThresholdExceeded"] = 7, self.values["sram_exceeded"]
        return 0

    def _nvmlDeviceGetRemappedRows(self, handle, correctable, uncorrectable, pending, failure):
        correctable[0], uncorrectable[0], pending[0], failure[0] = self.values["remapped"]

    def _nvmlDeviceGetUnrepairableMemoryFlag_v1(self, handle, status):
        At("nvmlUnrepairableMemoryStatus_v1_t", status)["bUnrepairableMemory"] = self.values["unrepairable"]

    def _nvmlDeviceGetCurrentClocksEventReasons(self, handle, reasons):
        reasons[0] = self.values["clocks"]

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, handle, reasons):
        reasons[0] = self.values["clocks"]

    def _nvmlDeviceGetGpuFabricInfo(self, handle, info):
        self._join("nvmlGpuFabricInfo_t", info)

    def _nvmlDeviceGetGpuFabricInfoV(self, handle, info):
        asked = At("nvmlGpuFabricInfo_v2_t", info)["version"]
        kind = _FABRICS.get(asked >> 24)
        if kind is None or asked >> 24 not in self.fabric_versions or asked != header.version(kind, asked >> 24):
            return Return.ARGUMENT_VERSION_MISMATCH
        told = self._join(kind, info)
        told["healthMask"] = self.fabric[2]
        if asked >> 24 == 3:
            told["healthSummary"] = self.fabric[3]
        return 0

    def _nvmlDeviceGetGpuFabricInfo_v4(self, handle, info):
        told = self._state("nvmlGpuFabricInfo_v4_t", info)
        told["healthMask"], told["healthSummary"] = self.fabric[2:]
        told["numCliques"] = len(self.cliques)
        for at, (kind, number) in enumerate(self.cliques):
            clique = told.nested("cliques", "nvmlGpuFabricClique_v1_t", at)
            clique["type"], clique["id"] = kind, number

    def _state(self, kind, info):
        """Write what all structures have. The bytes behind the state, which is one byte, are garbage."""
        ctypes.memset(info, self.garbage, header.size(kind))
        told = At(kind, info)
        told["state"], told["status"] = self.fabric[:2]
        told["clusterUuid"] = self.cluster
        return told

    def _join(self, kind, info):
        """Write what older structures also have: the first clique of type 0."""
        told = self._state(kind, info)
        told["cliqueId"] = next(number for each, number in self.cliques if each == 0)
        return told

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle, energy):
        energy[0] = self.values["energy"]

    def _nvmlDeviceGetFieldValues(self, handle, count, values):
        for at in range(count):
            address = values.value + at * header.size("nvmlFieldValue_t")
            row = At("nvmlFieldValue_t", address)
            key = (row["fieldId"], row["scopeId"])
            code, kind, value = self.fields.get(key, self.fields.get(key[0], (3, 0, ctypes.c_ulonglong(0))))
            row["timestamp"], row["latencyUsec"] = 1_700_000_000_000_000, -1
            row["nvmlReturn"], row["valueType"] = code, kind
            offset, size, _ = header.record()["structures"]["nvmlFieldValue_t"]["members"]["value"]
            ctypes.memset(address + offset, self.garbage, size)
            ctypes.memmove(address + offset, ctypes.byref(value), ctypes.sizeof(value))

    def _nvmlDeviceGetNvLinkState(self, handle, link, active):
        if link in self.link_refusals or link not in self.active_links:
            return self.link_refusals.get(link, 2)
        active[0] = self.active_links[link]
        return 0

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link, kind):
        kind[0] = 2 if link in self.switches else 0

    def _nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle, link, info):
        At("nvmlPciInfo_t", info)["busId"] = self.values["remote_bus_id"]

    def _nvmlEventSetWait_v2(self, events, data, timeout):
        told = At("nvmlEventData_t", data)
        told["device"], told["eventType"], told["eventData"], *instances = self.event
        told["gpuInstanceId"], told["computeInstanceId"] = instances


def _fill(buffer: Any, size: int, text: bytes) -> None:
    assert len(text) < size
    ctypes.memmove(buffer, text + b"\0", len(text) + 1)
