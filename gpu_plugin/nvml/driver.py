"""The real driver: implements `port.Driver` with pynvml, which only this module imports, and libnvidia-ml.so.1.

pynvml does not declare argument types to ctypes, so an argument of the wrong type could crash the process. This module
constructs all arguments.
"""

import _ctypes
import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from gpu_plugin.containers.cdi.host_files import LIBRARY_DIRECTORIES, WSL_LIBRARIES, Kind
from gpu_plugin.containers.driver_root.loader import loader_directories
from gpu_plugin.containers.driver_root.safe import judge
from gpu_plugin.containers.driver_root.tree import Tree
from gpu_plugin.devices.node import Engines
from gpu_plugin.devices.nvml_h import (
    AFFINITY_SCOPE_NODE,
    ECC_VOLATILE,
    MAX_NVLINKS,
    MEMORY_ERROR_UNCORRECTED,
    NVLINK_REMOTE_SWITCH,
    TEMPERATURE_GPU,
    UNSUPPORTED,
    VIRTUALIZATION_VGPU,
    Return,
    Threshold,
)
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml import port, structures
from gpu_plugin.nvml.plausible import flag
from gpu_plugin.nvml.port import Event, EventSet, Field, Handle, MigAttributes, NvmlError, PcieLink, RemappedRows

log = logging.getLogger(__name__)

SONAME = "libnvidia-ml.so.1"

NODE_SET_WORDS = 16  # of 64 bits: Linux has at most 1,024 NUMA nodes (CONFIG_NODES_SHIFT)


def candidates(roots: Sequence[str]) -> list[tuple[str, str]]:
    """Return paths at which the library may be, best first, each with the root directory that it is below. Blocks.

    Paths below the given roots come first, except below the real root. Then come, without a root, the bare name and WSL's own
    path, which the loader may not search. Below each root WSL's directory comes first: if a Linux driver's library is
    installed too, that library finds no GPU.
    """
    other = dict.fromkeys(root.rstrip("/") for root in roots)
    found = [
        (root, f"{root}/{directory}/{SONAME}")
        for root in other
        if root
        for directory in dict.fromkeys((WSL_LIBRARIES, *LIBRARY_DIRECTORIES, *loader_directories(Tree(root))))
    ]
    return [*found, ("", SONAME), ("", f"/{WSL_LIBRARIES}/{SONAME}")]


def load(roots: Sequence[str]) -> ctypes.CDLL:
    """Load the library from the first root below which it is, else from the loader's own directories.

    Raises:
        NvmlError: LIBRARY_NOT_FOUND, with the files that could not be loaded, the reasons, and the searched directories.
    """
    searched: dict[str, list[str]] = {}
    unfit: list[str] = []
    for root, candidate in candidates(roots):
        path = candidate
        if "/" in candidate:
            directory = candidate.removeprefix(root).removesuffix(f"/{SONAME}")
            searched.setdefault(root or "/", []).append(directory.strip("/"))
            seen = judge(root, candidate.removeprefix(root)).seen
            if seen.kind is Kind.MISSING:
                continue
            path = f"{root}{seen.target}"
            fault = seen.fault or (root and judge("", root, (Kind.DIRECTORY,)).seen.fault)
            if fault:  # an unsafe file's code would run with this process's rights
                unfit.append(f"{path} ({fault})")
                continue
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            unfit.append(f"{path} ({error})")
    below = "; ".join(f"below {root}: {', '.join(directories)}" for root, directories in searched.items())
    raise NvmlError(
        Return.LIBRARY_NOT_FOUND,
        "dlopen",
        f"no {SONAME} that can be loaded: {', '.join(unfit)}; searched {below}",
    )


def unload(loaded: ctypes.CDLL) -> None:
    """Unload the library. The caller ensures that no call into it is under way or follows."""
    _ctypes.dlclose(loaded._handle)  # noqa: SLF001 - ctypes has no call that closes a library, nor a public handle


class Calls:
    """The number of calls into the library that are under way on all threads. While there are any, do not unload the library.

    While `lock` is held, no call can begin.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0

    def __enter__(self) -> None:
        with self.lock:
            self.calls += 1

    def __exit__(self, *_raised: object) -> None:
        with self.lock:
            self.calls -= 1


T = TypeVar("T")

# The functions that return fabric information, each with its structure, newest first
_FABRIC: tuple[tuple[str, type[ctypes.Structure]], ...] = (
    ("nvmlDeviceGetGpuFabricInfo_v4", structures.FabricInfo4),
    ("nvmlDeviceGetGpuFabricInfoV", structures.FabricInfo3),
    ("nvmlDeviceGetGpuFabricInfoV", structures.FabricInfo2),
    ("nvmlDeviceGetGpuFabricInfo", structures.FabricInfo),
)

# The function that returns the reasons for reduced clocks: its current name, then its name in older libraries
_CLOCKS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")

# Codes with which a library refuses functions, and versions of structures, that are newer than the library.
_LATER = frozenset({Return.FUNCTION_NOT_FOUND, Return.ARGUMENT_VERSION_MISMATCH})

# pynvml keeps one library for the whole process, so calls into it are counted for the whole process too.
_in_use = Calls()


class PynvmlDriver(port.Driver):
    """NVML through nvidia-ml-py. Safe from any thread, as NVML is. `port.Driver` describes the results of the calls."""

    def __init__(self, roots: Sequence[str] = ()) -> None:
        """Store the directories below which to search for the library before the loader's own directories."""
        self._roots = tuple(roots)
        self._nvml: ModuleType | None = None
        self._ways: dict[str, int] = {}

    def open(self) -> None:
        """Load the library as it is on disk now, unless it is in use already, and initialise it."""
        import pynvml  # noqa: PLC0415 - 9 ms and 3 MiB that a simulated node does not pay

        with _in_use.lock:
            # A library may be left whose initialisation or shutdown failed, and an upgrade may have replaced its file.
            _unload(pynvml)
            if pynvml.nvmlLib is None:
                pynvml.nvmlLib = load(self._roots)
        self._nvml = pynvml
        self._ways = {}
        self._call("nvmlInit")

    def close(self) -> None:
        """Call nvmlShutdown. Unload the library if nothing in the process uses it any more and no call is under way."""
        if self._nvml is not None:
            self._call("nvmlShutdown")
            with _in_use.lock:
                _unload(self._nvml)

    def driver_version(self) -> str:
        return str(self._call("nvmlSystemGetDriverVersion"))

    def cuda_version(self) -> tuple[int, int]:
        version = int(self._call("nvmlSystemGetCudaDriverVersion_v2"))
        return version // 1000, version % 1000 // 10  # NVML_CUDA_DRIVER_VERSION_MAJOR and _MINOR

    def device_count(self) -> int:
        return int(self._call("nvmlDeviceGetCount"))

    def handle_by_index(self, index: int) -> Handle:
        return _address(self._call("nvmlDeviceGetHandleByIndex", index))

    def handle_by_uuid(self, uuid: str) -> Handle:
        return _address(self._call("nvmlDeviceGetHandleByUUID", uuid))

    def handle_by_pci_bus_id(self, bus_id: str) -> Handle:
        return _address(self._call("nvmlDeviceGetHandleByPciBusId", bus_id))

    def pci_bus_id(self, handle: Handle) -> str:
        return self._bus_id("nvmlDeviceGetPciInfo", handle)

    def memory_total(self, handle: Handle) -> int:
        return int(self.ask("nvmlDeviceGetMemoryInfo", handle).total)

    def utilization(self, handle: Handle) -> int:
        return int(self.ask("nvmlDeviceGetUtilizationRates", handle).gpu)

    def memory_used(self, handle: Handle) -> int:
        name = "nvmlDeviceGetMemoryInfo"
        return self._newest(
            "memory_used",
            _LATER,
            lambda: int(self.ask(name, handle, self._lib.nvmlMemory_v2).used),
            lambda: int(self.ask(name, handle).used),
        )

    def vgpu_licensed(self, handle: Handle) -> bool:
        # A whole GPU has licensable features too, and needs no license for CUDA.
        if self.ask("nvmlDeviceGetVirtualizationMode", handle) != VIRTUALIZATION_VGPU:
            raise NvmlError(Return.NOT_SUPPORTED, "nvmlDeviceGetVirtualizationMode", "the GPU is not a vGPU")
        found = self.ask("nvmlDeviceGetGridLicensableFeatures_v4", handle)
        return any(feature.featureState for feature in found.gridLicensableFeatures[: found.licensableFeaturesCount])

    def mig_handle(self, handle: Handle, index: int) -> Handle:
        return _address(self.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index))

    def mig_attributes(self, handle: Handle) -> MigAttributes:
        found = self.ask("nvmlDeviceGetAttributes_v2", handle)
        engines = Engines(
            found.multiprocessorCount,
            found.sharedCopyEngineCount,
            found.sharedDecoderCount,
            found.sharedEncoderCount,
            found.sharedJpegCount,
            found.sharedOfaCount,
        )
        return MigAttributes(found.gpuInstanceSliceCount, found.computeInstanceSliceCount, found.memorySizeMB, engines)

    def set_compute_mode(self, handle: Handle, mode: int) -> None:
        self.ask("nvmlDeviceSetComputeMode", handle, mode)

    def temperature(self, handle: Handle) -> int:
        def newer() -> int:
            values = structures.made(structures.Temperature)
            values.sensorType = TEMPERATURE_GPU
            self._fill("nvmlDeviceGetTemperatureV", handle, values)
            return int(values.temperature)

        def older() -> int:
            return int(self.ask("nvmlDeviceGetTemperature", handle, TEMPERATURE_GPU))

        return self._newest("temperature", _LATER, newer, older)

    def temperature_threshold(self, handle: Handle, kind: Threshold) -> int:
        return int(self.ask("nvmlDeviceGetTemperatureThreshold", handle, int(kind)))

    def memory_affinity(self, handle: Handle) -> frozenset[int]:
        words = self.ask("nvmlDeviceGetMemoryAffinity", handle, NODE_SET_WORDS, AFFINITY_SCOPE_NODE)
        return frozenset(64 * at + bit for at, word in enumerate(words) for bit in range(64) if word >> bit & 1)

    def uncorrected_ecc_errors(self, handle: Handle) -> int:
        return int(self.ask("nvmlDeviceGetTotalEccErrors", handle, MEMORY_ERROR_UNCORRECTED, ECC_VOLATILE))

    def sram_threshold_exceeded(self, handle: Handle) -> bool | None:
        status = self._lib.c_nvmlEccSramErrorStatus_v1_t()
        self.ask("nvmlDeviceGetSramEccErrorStatus", handle, ctypes.byref(status))
        return flag(status.bThresholdExceeded)

    def remapped_rows(self, handle: Handle) -> RemappedRows:
        found = self.ask("nvmlDeviceGetRemappedRows", handle)
        correctable, uncorrectable, pending, failure = found
        return RemappedRows(correctable, uncorrectable, flag(pending), flag(failure))

    def unrepairable_memory(self, handle: Handle) -> bool | None:
        status = structures.made(structures.UnrepairableMemory)
        self._fill("nvmlDeviceGetUnrepairableMemoryFlag_v1", handle, status)
        return flag(status.bUnrepairableMemory)

    def clocks_event_reasons(self, handle: Handle) -> int:
        return self._newest("clocks", _LATER, *(lambda name=name: int(self.ask(name, handle)) for name in _CLOCKS))

    def nvlink_states(self, handle: Handle) -> tuple[bool, ...]:
        states: list[bool] = []
        for link in range(MAX_NVLINKS):
            try:
                active = flag(self.ask("nvmlDeviceGetNvLinkState", handle, link))
                if active is None:
                    raise NvmlError(Return.UNKNOWN, "nvmlDeviceGetNvLinkState", f"the state of link {link} is all ones")
                states.append(active)
            except NvmlError as error:
                if link and (error.unsupported or error.code == Return.INVALID_ARGUMENT):
                    break  # the GPU has no link of this or a higher number
                raise
        return tuple(states)

    def nvlink_to_switch(self, handle: Handle, link: int) -> bool:
        return bool(self.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == NVLINK_REMOTE_SWITCH)

    def fabric(self, handle: Handle) -> Fabric:
        def by(function: str, structure: type[ctypes.Structure]) -> Fabric:
            values = structures.made(structure)
            self._fill(function, handle, values)
            return structures.fabric(values)

        refused = UNSUPPORTED | {Return.INVALID_ARGUMENT}
        return self._newest("fabric", refused, *(partial(by, *way) for way in _FABRIC))

    def pcie_link(self, handle: Handle) -> PcieLink:
        width = self.ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
        return PcieLink(int(width), int(self.ask("nvmlDeviceGetMaxPcieLinkWidth", handle)))

    def field_values(self, handle: Handle, fields: tuple[Field, ...]) -> tuple[int | NvmlError, ...]:
        values = structures.asking(fields)
        self._straight("nvmlDeviceGetFieldValues", ctypes.c_void_p(handle), len(fields), values)
        return structures.answers(values, "nvmlDeviceGetFieldValues")

    def nvlink_remote_bus_id(self, handle: Handle, link: int) -> str | None:
        if not self.ask("nvmlDeviceGetNvLinkState", handle, link):
            return None
        try:
            return self._bus_id("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        except NvmlError as error:
            if error.code in (Return.NOT_SUPPORTED, Return.INVALID_ARGUMENT):
                return ""  # the link exists: nvmlDeviceGetNvLinkState has just answered
            raise

    def common_ancestor(self, one: Handle, other: Handle) -> int:
        return int(self.ask("nvmlDeviceGetTopologyCommonAncestor", one, self._device(other)))

    def event_set(self) -> EventSet:
        return EventSet(_value(self._call("nvmlEventSetCreate")))

    def free_event_set(self, events: EventSet) -> None:
        self._call("nvmlEventSetFree", self._events(events))

    def register_events(self, handle: Handle, mask: int, events: EventSet) -> None:
        self.ask("nvmlDeviceRegisterEvents", handle, mask, self._events(events))

    def wait(self, events: EventSet, timeout_ms: int) -> Event:
        data = self._call("nvmlEventSetWait_v2", self._events(events), timeout_ms)
        return Event(_address(data.device), data.eventType, data.eventData, data.gpuInstanceId, data.computeInstanceId)

    @property
    def _lib(self) -> ModuleType:
        if self._nvml is None:
            raise NvmlError(Return.UNINITIALIZED, "open")
        return self._nvml

    def _device(self, handle: Handle) -> Any:
        return ctypes.cast(ctypes.c_void_p(handle), self._lib.c_nvmlDevice_t)

    def _events(self, events: EventSet) -> Any:
        return ctypes.cast(ctypes.c_void_p(events), self._lib.c_nvmlEventSet_t)

    def _bus_id(self, name: str, handle: Handle, *arguments: Any) -> str:
        info = self.ask(name, handle, *arguments)
        try:
            return str(info.busId)  # pynvml decodes the text when the attribute is read
        except UnicodeDecodeError as error:
            raise _no_text(name, error) from None

    def _newest(self, what: str, refused: frozenset[int], *ways: Callable[[], T]) -> T:
        """Return the result of the first of these ways, newest first, that does not fail with a code in `refused`.

        The way that worked is used first from then on: it depends on the version of the library, not on the GPU.
        """
        way = self._ways.get(what, 0)
        while True:
            try:
                answer = ways[way]()
            except NvmlError as error:
                if error.code not in refused or way + 1 == len(ways):
                    raise
                way += 1
            else:
                self._ways[what] = way
                return answer

    def _fill(self, name: str, handle: Handle, into: ctypes.Structure) -> None:
        self._straight(name, ctypes.c_void_p(handle), ctypes.byref(into))

    def _straight(self, name: str, *arguments: Any) -> None:
        """Call the library directly if pynvml has no suitable structure or function."""
        lib = self._lib
        with _in_use:
            if lib.nvmlLib is None:
                raise NvmlError(Return.UNINITIALIZED, name)
            function = getattr(lib.nvmlLib, name, None)
            if function is None:
                raise NvmlError(Return.FUNCTION_NOT_FOUND, name)
            code = function(*arguments)
        if code != Return.SUCCESS:
            raise NvmlError(code, name)

    def ask(self, name: str, handle: Handle, *arguments: Any) -> Any:
        """Call pynvml's function of this name for a GPU."""
        return self._call(name, self._device(handle), *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call pynvml's function of this name and convert its errors to NvmlError."""
        lib = self._lib
        function = getattr(lib, name, None)
        if function is None:  # pynvml is older than the library
            raise NvmlError(Return.FUNCTION_NOT_FOUND, name, "nvidia-ml-py is too old for it")
        with _in_use:
            try:
                return function(*arguments)
            except lib.NVMLError as error:
                raise NvmlError(error.value, name) from None
            except UnicodeDecodeError as error:  # seen on drivers with faults: bytes that are not text
                raise _no_text(name, error) from None


def _unload(nvml: Any) -> None:
    """Unload the library unless it is in use. The caller holds `_in_use.lock`."""
    if nvml._nvmlLib_refcount or _in_use.calls or nvml.nvmlLib is None:  # noqa: SLF001 - pynvml has no public count of users
        return
    loaded, nvml.nvmlLib = nvml.nvmlLib, None
    nvml._nvmlGetFunctionPointer_cache = {}  # noqa: SLF001 - addresses within the library
    unload(loaded)


def _address(pointer: Any) -> Handle:
    return Handle(_value(pointer))


def _value(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _no_text(name: str, error: UnicodeDecodeError) -> NvmlError:
    return NvmlError(Return.UNKNOWN, name, f"answered with bytes that are not text: {error}")
