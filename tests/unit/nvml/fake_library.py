# ruff: noqa: N802 - methods are named as the functions they answer for
"""A library as the loader would give it: real C functions with NVML's own signatures, answered in Python.

pynvml calls them through untyped pointers, as it calls the real ones: an argument of the wrong kind shows here.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pynvml

FIRST, SECOND = 0x7F00_1234_5000, 0x7F00_1234_6000
"""Handles of the two GPUs: wider than 32 bits, as pointers are."""

MIG = 0x7F00_5555_7000
"""Handle of the first one's only MIG device."""

EVENTS = 0x7F00_9876_0000

_U = ctypes.c_uint
_UP = ctypes.POINTER(ctypes.c_uint)
_ULL = ctypes.POINTER(ctypes.c_ulonglong)
_HANDLE = ctypes.c_void_p
_HANDLE_P = ctypes.POINTER(ctypes.c_void_p)
_BUFFER = ctypes.POINTER(ctypes.c_char)
_PCI = ctypes.POINTER(pynvml.nvmlPciInfo_t)


class Margin(ctypes.Structure):
    """nvmlMarginTemperature_v1_t as nvml.h has it."""

    _fields_ = (("version", ctypes.c_uint), ("marginTemperature", ctypes.c_int))


class Unrepairable(ctypes.Structure):
    """nvmlUnrepairableMemoryStatus_v1_t as nvml.h has it."""

    _fields_ = (("version", ctypes.c_uint), ("bUnrepairableMemory", ctypes.c_uint))


STRUCTURES = {"margin": 0x1000008, "unrepairable": 0x1000008, "sram": 0x1000068}
"""The versions of structures that the library takes: their size in bytes, and their number in the highest byte."""

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "nvmlInitWithFlags": (_U,),
    "nvmlShutdown": (),
    "nvmlSystemGetDriverVersion": (_BUFFER, _U),
    "nvmlDeviceGetCount_v2": (_UP,),
    "nvmlDeviceGetHandleByIndex_v2": (_U, _HANDLE_P),
    "nvmlDeviceGetHandleByUUID": (ctypes.c_char_p, _HANDLE_P),
    "nvmlDeviceGetHandleByPciBusId_v2": (ctypes.c_char_p, _HANDLE_P),
    "nvmlDeviceGetUUID": (_HANDLE, _BUFFER, _U),
    "nvmlDeviceGetMinorNumber": (_HANDLE, _UP),
    "nvmlDeviceGetPciInfo_v3": (_HANDLE, _PCI),
    "nvmlDeviceGetName": (_HANDLE, _BUFFER, _U),
    "nvmlDeviceGetArchitecture": (_HANDLE, _UP),
    "nvmlDeviceGetMemoryInfo": (_HANDLE, ctypes.POINTER(pynvml.c_nvmlMemory_t)),
    "nvmlDeviceGetMigMode": (_HANDLE, _UP, _UP),
    "nvmlDeviceGetMaxMigDeviceCount": (_HANDLE, _UP),
    "nvmlDeviceGetMigDeviceHandleByIndex": (_HANDLE, _U, _HANDLE_P),
    "nvmlDeviceGetGpuInstanceId": (_HANDLE, _UP),
    "nvmlDeviceGetComputeInstanceId": (_HANDLE, _UP),
    "nvmlDeviceGetAttributes_v2": (_HANDLE, ctypes.POINTER(pynvml.c_nvmlDeviceAttributes)),
    "nvmlDeviceGetComputeMode": (_HANDLE, _UP),
    "nvmlDeviceSetComputeMode": (_HANDLE, _U),
    "nvmlDeviceGetNumaNodeId": (_HANDLE, ctypes.POINTER(ctypes.c_int)),
    "nvmlDeviceGetPersistenceMode": (_HANDLE, _UP),
    "nvmlDeviceGetTemperature": (_HANDLE, _U, _UP),
    "nvmlDeviceGetTemperatureThreshold": (_HANDLE, _U, _UP),
    "nvmlDeviceGetMarginTemperature": (_HANDLE, ctypes.POINTER(Margin)),
    "nvmlDeviceGetTotalEccErrors": (_HANDLE, _U, _U, _ULL),
    "nvmlDeviceGetSramEccErrorStatus": (_HANDLE, ctypes.POINTER(pynvml.c_nvmlEccSramErrorStatus_v1_t)),
    "nvmlDeviceGetRemappedRows": (_HANDLE, _UP, _UP, _UP, _UP),
    "nvmlDeviceGetRetiredPagesPendingStatus": (_HANDLE, _UP),
    "nvmlDeviceGetUnrepairableMemoryFlag_v1": (_HANDLE, ctypes.POINTER(Unrepairable)),
    "nvmlDeviceGetCurrentClocksEventReasons": (_HANDLE, _ULL),
    "nvmlDeviceGetCurrentClocksThrottleReasons": (_HANDLE, _ULL),
    "nvmlDeviceGetGpuFabricInfo": (_HANDLE, ctypes.POINTER(pynvml.c_nvmlGpuFabricInfo_t)),
    "nvmlDeviceGetGpuFabricInfoV": (_HANDLE, ctypes.c_void_p),
    "nvmlDeviceGetGpuFabricInfo_v4": (_HANDLE, ctypes.POINTER(pynvml.c_nvmlGpuFabricInfo_v4_t)),
    "nvmlDeviceGetCurrPcieLinkWidth": (_HANDLE, _UP),
    "nvmlDeviceGetMaxPcieLinkWidth": (_HANDLE, _UP),
    "nvmlDeviceGetPcieReplayCounter": (_HANDLE, _UP),
    "nvmlDeviceGetTotalEnergyConsumption": (_HANDLE, _ULL),
    "nvmlDeviceGetSupportedEventTypes": (_HANDLE, _ULL),
    "nvmlDeviceGetFieldValues": (_HANDLE, ctypes.c_int, ctypes.POINTER(pynvml.c_nvmlFieldValue_t)),
    "nvmlDeviceGetNvLinkState": (_HANDLE, _U, _UP),
    "nvmlDeviceGetNvLinkRemoteDeviceType": (_HANDLE, _U, _UP),
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": (_HANDLE, _U, _PCI),
    "nvmlDeviceGetTopologyCommonAncestor": (_HANDLE, _HANDLE, _UP),
    "nvmlEventSetCreate": (_HANDLE_P,),
    "nvmlEventSetFree": (_HANDLE,),
    "nvmlDeviceRegisterEvents": (_HANDLE, ctypes.c_ulonglong, _HANDLE),
    "nvmlEventSetWait_v2": (_HANDLE, ctypes.POINTER(pynvml.c_nvmlEventData_t), _U),
}
"""NVML's functions as nvml.h declares them; each gives an nvmlReturn_t."""


class Held:
    """A function that hangs: whether a call is in it, and whether it is let out."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.free = threading.Event()


class FakeLibrary:
    """Two GPUs. `calls` are the functions called, each with the arguments that go in; `refusals` their codes by function.

    `values` is what the functions answer. A function in `missing` is not in the library. `fabric_versions` are the versions of
    the structure that nvmlDeviceGetGpuFabricInfoV takes; `fabric` is what it tells, as (state, status, mask, summary), of the
    cluster with the uuid of these bytes and of these `cliques`, as (type, id).
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.unloaded: list[Any] = []
        self.refusals: dict[str, int] = {}
        self.missing: set[str] = set()
        self.fields: dict[int, tuple[int, int, str, float]] = {}
        self.event = (SECOND, 8, 79, 0xFFFFFFFF, 0xFFFFFFFF)
        self.active_links = {0: 1, 1: 0}
        self.link_refusals: dict[int, int] = {}
        self.switches = {0}
        self.fabric_versions = {2, 3}
        self.fabric = (3, 0, 0x1A9, 1)
        self.cluster = bytes(range(0xA0, 0xB0))
        self.cliques = [(0, 32766), (0, 40000), (1, 7)]
        self.values: dict[str, Any] = {
            "driver_version": b"580.159.04",
            "uuid": b"GPU-92e1c9b6-dd9b-778f-6e34-6f0d728ad189",
            "name": b"NVIDIA H200",
            "bus_id": b"00000000:00:06.0",
            "remote_bus_id": b"00000000:1B:00.0",
            "memory": 150754820096,
            "mig_memory": 0x1_0000_4E00,
            "energy": 0x1_2345_6789_ABCD,
            "ecc": 0x1_0000_0002,
            "margin": -3,
            "clocks": 0x1_0000_0040,
            "remapped": (1, 2, 1, 0),
            "sram_exceeded": 1,
            "numa_node": 1,
        }
        self._made: dict[str, Any] = {}
        self._held: dict[str, Held] = {}

    @contextmanager
    def holding(self, name: str) -> Iterator["Held"]:
        """Calls of that function do not come back before this ends."""
        held = self._held[name] = Held()
        try:
            yield held
        finally:
            del self._held[name]
            held.free.set()

    def __getattr__(self, name: str) -> Any:
        if name not in SIGNATURES or name in self.missing:
            raise AttributeError(name)
        if name not in self._made:
            typed = ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURES[name])(self._function(name))
            untyped = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(typed, ctypes.c_void_p).value or 0)
            self._made[name] = (typed, untyped)
        return self._made[name][1]

    def _function(self, name: str) -> Callable[..., int]:
        answer: Callable[..., int | None] = getattr(self, f"_{name}")

        def function(*arguments: Any) -> int:
            self.calls.append((name, *(a for a in arguments if a is None or isinstance(a, int | bytes))))
            if held := self._held.get(name):
                held.entered.set()
                held.free.wait()
            if name in self.refusals:
                return self.refusals[name]
            return answer(*arguments) or 0

        return function

    def _nvmlInitWithFlags(self, flags):
        pass

    def _nvmlShutdown(self):
        pass

    def _nvmlSystemGetDriverVersion(self, buffer, size):
        _fill(buffer, size, self.values["driver_version"])

    def _nvmlDeviceGetCount_v2(self, count):
        count[0] = 2

    def _nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle[0] = (FIRST, SECOND)[index]

    def _nvmlDeviceGetHandleByUUID(self, uuid, handle):
        handle[0] = FIRST

    def _nvmlDeviceGetHandleByPciBusId_v2(self, bus_id, handle):
        handle[0] = SECOND

    def _nvmlDeviceGetUUID(self, handle, buffer, size):
        _fill(buffer, size, self.values["uuid"])

    def _nvmlDeviceGetMinorNumber(self, handle, minor):
        minor[0] = 5

    def _nvmlDeviceGetPciInfo_v3(self, handle, info):
        info[0].busIdLegacy = b"legacy"
        info[0].busId = self.values["bus_id"]

    def _nvmlDeviceGetName(self, handle, buffer, size):
        _fill(buffer, size, self.values["name"])

    def _nvmlDeviceGetArchitecture(self, handle, architecture):
        architecture[0] = 9

    def _nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory[0].total = self.values["memory"]

    def _nvmlDeviceGetMigMode(self, handle, current, pending):
        current[0], pending[0] = 0, 1

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle, count):
        count[0] = 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index, mig):
        mig[0] = MIG

    def _nvmlDeviceGetGpuInstanceId(self, handle, number):
        number[0] = 13

    def _nvmlDeviceGetComputeInstanceId(self, handle, number):
        number[0] = 1

    def _nvmlDeviceGetAttributes_v2(self, handle, attributes):
        attributes[0].multiprocessorCount = 14
        attributes[0].gpuInstanceSliceCount, attributes[0].computeInstanceSliceCount = 3, 2
        attributes[0].memorySizeMB = self.values["mig_memory"]

    def _nvmlDeviceGetComputeMode(self, handle, mode):
        mode[0] = 3

    def _nvmlDeviceSetComputeMode(self, handle, mode):
        pass

    def _nvmlDeviceGetNumaNodeId(self, handle, node):
        node[0] = self.values["numa_node"]

    def _nvmlDeviceGetPersistenceMode(self, handle, mode):
        mode[0] = 1

    def _nvmlDeviceGetTemperature(self, handle, sensor, celsius):
        celsius[0] = 32

    def _nvmlDeviceGetTemperatureThreshold(self, handle, kind, celsius):
        celsius[0] = 90 + kind

    def _nvmlDeviceGetMarginTemperature(self, handle, info):
        if info[0].version != STRUCTURES["margin"]:
            return 25
        info[0].marginTemperature = self.values["margin"]
        return 0

    def _nvmlDeviceGetTotalEccErrors(self, handle, kind, counter, count):
        count[0] = self.values["ecc"] if (kind, counter) == (1, 0) else 0xBAD

    def _nvmlDeviceGetSramEccErrorStatus(self, handle, status):
        if status[0].version != STRUCTURES["sram"]:
            return 25
        status[0].volatileUncParity = 7
        status[0].bThresholdExceeded = self.values["sram_exceeded"]
        return 0

    def _nvmlDeviceGetRemappedRows(self, handle, correctable, uncorrectable, pending, failure):
        correctable[0], uncorrectable[0], pending[0], failure[0] = self.values["remapped"]

    def _nvmlDeviceGetRetiredPagesPendingStatus(self, handle, pending):
        pending[0] = 1

    def _nvmlDeviceGetUnrepairableMemoryFlag_v1(self, handle, status):
        if status[0].version != STRUCTURES["unrepairable"]:
            return 25
        status[0].bUnrepairableMemory = 1
        return 0

    def _nvmlDeviceGetCurrentClocksEventReasons(self, handle, reasons):
        reasons[0] = self.values["clocks"]

    def _nvmlDeviceGetCurrentClocksThrottleReasons(self, handle, reasons):
        reasons[0] = self.values["clocks"]

    def _nvmlDeviceGetGpuFabricInfo(self, handle, info):
        info[0].state, info[0].status = self.fabric[:2]
        self._membership(info[0])

    def _nvmlDeviceGetGpuFabricInfoV(self, handle, address):
        kinds = {2: pynvml.c_nvmlGpuFabricInfo_v2_t, 3: pynvml.c_nvmlGpuFabricInfo_v3_t}
        asked = ctypes.cast(address, _UP)[0]
        kind = kinds.get(asked >> 24)
        if kind is None or asked >> 24 not in self.fabric_versions or asked & 0xFFFFFF != ctypes.sizeof(kind):
            return 25
        info = ctypes.cast(address, ctypes.POINTER(kind))
        info[0].state, info[0].status, info[0].healthMask = self.fabric[:3]
        if asked >> 24 == 3:
            info[0].healthSummary = self.fabric[3]
        self._membership(info[0])
        return 0

    def _nvmlDeviceGetGpuFabricInfo_v4(self, handle, info):
        info[0].state, info[0].status, info[0].healthMask, info[0].healthSummary = self.fabric
        info[0].clusterUuid[:] = self.cluster
        info[0].numCliques = len(self.cliques)
        for at, (kind, number) in enumerate(self.cliques):
            info[0].cliques[at].type, info[0].cliques[at].id = kind, number

    def _membership(self, info):
        """What older structures say: of all cliques the first one of type 0."""
        info.clusterUuid[:] = self.cluster
        info.cliqueId = next(number for kind, number in self.cliques if kind == 0)

    def _nvmlDeviceGetCurrPcieLinkWidth(self, handle, width):
        width[0] = 8

    def _nvmlDeviceGetMaxPcieLinkWidth(self, handle, width):
        width[0] = 16

    def _nvmlDeviceGetPcieReplayCounter(self, handle, replays):
        replays[0] = 0xFFFF_FFFE

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle, energy):
        energy[0] = self.values["energy"]

    def _nvmlDeviceGetSupportedEventTypes(self, handle, mask):
        mask[0] = 0x1_0000_FF9F

    def _nvmlDeviceGetFieldValues(self, handle, count, values):
        for at in range(count):
            code, kind, member, value = self.fields.get(values[at].fieldId, (3, 0, "ullVal", 0))
            values[at].nvmlReturn = code
            values[at].valueType = kind
            setattr(values[at].value, member, value)

    def _nvmlDeviceGetNvLinkState(self, handle, link, active):
        if link in self.link_refusals or link not in self.active_links:
            return self.link_refusals.get(link, 2)
        active[0] = self.active_links[link]
        return 0

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link, kind):
        kind[0] = 2 if link in self.switches else 0

    def _nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle, link, info):
        info[0].busId = self.values["remote_bus_id"]

    def _nvmlDeviceGetTopologyCommonAncestor(self, one, other, level):
        level[0] = 30

    def _nvmlEventSetCreate(self, events):
        events[0] = EVENTS

    def _nvmlEventSetFree(self, events):
        pass

    def _nvmlDeviceRegisterEvents(self, handle, mask, events):
        pass

    def _nvmlEventSetWait_v2(self, events, data, timeout):
        handle, kind, number, gpu_instance, compute_instance = self.event
        ctypes.cast(data, _HANDLE_P)[0] = handle  # the first member
        data[0].eventType, data[0].eventData = kind, number
        data[0].gpuInstanceId, data[0].computeInstanceId = gpu_instance, compute_instance


def _fill(buffer: Any, size: int, text: bytes) -> None:
    assert len(text) < size
    ctypes.memmove(buffer, text + b"\0", len(text) + 1)
