"""The recorded nvml.h (`record_nvml_h`): its names for numbers that the package uses, its structures and its functions."""

import ctypes
import functools
import json
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from gpu_plugin.devices import nvml_h

# Prefixes of the members of an enumeration in the header
PREFIXES: Mapping[type[IntEnum], str] = {
    nvml_h.Return: "NVML_ERROR_",
    nvml_h.ValueType: "NVML_VALUE_TYPE_",
    nvml_h.Threshold: "NVML_TEMPERATURE_THRESHOLD_",
    nvml_h.ComputeMode: "NVML_COMPUTEMODE_",
    nvml_h.TopologyLevel: "NVML_TOPOLOGY_",
    nvml_h.Architecture: "NVML_DEVICE_ARCH_",
    nvml_h.RecoveryAction: "NVML_GPU_RECOVERY_ACTION_",
    nvml_h.FabricState: "NVML_GPU_FABRIC_STATE_",
    nvml_h.FabricSummary: "NVML_GPU_FABRIC_HEALTH_SUMMARY_",
    nvml_h.FabricCondition: "NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_",
    nvml_h.FabricConfiguration: "NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_",
}

EVENT_TYPES: Mapping[str, str] = {
    "SINGLE_BIT_ECC": "nvmlEventTypeSingleBitEccError",
    "DOUBLE_BIT_ECC": "nvmlEventTypeDoubleBitEccError",
    "XID_CRITICAL": "nvmlEventTypeXidCriticalError",
    "MIG_CONFIG_CHANGE": "nvmlEventMigConfigChange",
    "SINGLE_BIT_ECC_STORM": "nvmlEventTypeSingleBitEccErrorStorm",
    "DRAM_RETIREMENT": "nvmlEventTypeDramRetirementEvent",
    "DRAM_RETIREMENT_FAILURE": "nvmlEventTypeDramRetirementFailure",
    "NON_FATAL_POISON": "nvmlEventTypeNonFatalPoisonError",
    "FATAL_POISON": "nvmlEventTypeFatalPoisonError",
    "GPU_UNAVAILABLE": "nvmlEventTypeGpuUnavailableError",
    "GPU_RECOVERY_ACTION": "nvmlEventTypeGpuRecoveryAction",
}

# Other constants, without the field ids (FI_*)
NAMES: Mapping[str, str] = {
    "EVENT_TYPES_ALL": "nvmlEventTypeAll",
    "MAX_NVLINKS": "NVML_NVLINK_MAX_LINKS",
    "FABRIC_TRUE": "NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE",
    "FABRIC_FALSE": "NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_FALSE",
    "FABRIC_CONDITION_MASK": "NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_DEGRADED_BW",
    "FABRIC_CONFIGURATION_SHIFT": "NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION",
    "FABRIC_CONFIGURATION_MASK": "NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION",
    "FABRIC_UUID_LENGTH": "NVML_GPU_FABRIC_UUID_LEN",
    "FABRIC_CLIQUES": "NVML_GPU_FABRIC_CLIQUE_MAX",
    "CLIQUE_UNICAST_POINTER": "NVML_GPU_FABRIC_CLIQUE_TYPE_UNICAST_POINTER",
    "CLOCKS_SW_POWER_CAP": "nvmlClocksThrottleReasonSwPowerCap",
    "CLOCKS_HW_SLOWDOWN": "nvmlClocksThrottleReasonHwSlowdown",
    "CLOCKS_SW_THERMAL_SLOWDOWN": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "CLOCKS_HW_THERMAL_SLOWDOWN": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "CLOCKS_HW_POWER_BRAKE_SLOWDOWN": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
    "MEMORY_ERROR_UNCORRECTED": "NVML_MEMORY_ERROR_TYPE_UNCORRECTED",
    "ECC_VOLATILE": "NVML_VOLATILE_ECC",
    "TEMPERATURE_GPU": "NVML_TEMPERATURE_GPU",
    "NVLINK_REMOTE_SWITCH": "NVML_NVLINK_DEVICE_TYPE_SWITCH",
    "NVLINK_STATE_INACTIVE": "NVML_NVLINK_STATE_INACTIVE",
    "AFFINITY_SCOPE_NODE": "NVML_AFFINITY_SCOPE_NODE",
    "FEATURE_ENABLED": "NVML_FEATURE_ENABLED",
    "VIRTUALIZATION_VGPU": "NVML_GPU_VIRTUALIZATION_MODE_VGPU",
}

OURS = frozenset({"ALL_INSTANCES"})  # the header has no name for 0xFFFFFFFF as an id of instances


def ours() -> dict[str, int]:
    """Return the numbers of `devices.nvml_h` by their names in the header."""
    found = {_in_header(member): int(member) for kind in PREFIXES for member in kind}
    found |= {EVENT_TYPES[member.name]: int(member) for member in nvml_h.EventType if member.name}
    for name, value in vars(nvml_h).items():
        if type(value) is int and name not in OURS:
            found[f"NVML_FI_DEV_{name[3:]}" if name.startswith("FI_") else NAMES[name]] = value
    return found


def constants() -> list[str]:
    """Return the names of the recorded numbers."""
    return [*ours(), "NVML_DEVICE_MIG_ENABLE"]


def _in_header(member: IntEnum) -> str:
    prefix = PREFIXES[type(member)]
    return "NVML_SUCCESS" if member is nvml_h.Return.SUCCESS else f"{prefix}{member.name}"


@functools.cache
def record() -> Mapping[str, Any]:
    """Return the record. To record another structure or function, add its name to the file first."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "nvml_h.json").read_text(encoding="ascii"))
    return found


STRUCTURES, FUNCTIONS = tuple(record()["structures"]), tuple(record()["functions"])


class Address(ctypes.c_void_p):
    """The address of a structure. A handle is a plain pointer."""


class At:
    """A structure in memory, with its members at the offsets of the header."""

    def __init__(self, structure: str, address: Address | int) -> None:
        self._structure = structure
        self._address = address if isinstance(address, int) else address.value or 0

    def __getitem__(self, member: str) -> Any:
        place, kind = self._place(member)
        return bytes(place) if kind in ("bytes", "text") else place.value

    def __setitem__(self, member: str, value: Any) -> None:
        place, kind = self._place(member)
        if kind in ("bytes", "text"):
            assert len(value) + (kind == "text") <= len(place)
            ctypes.memmove(place, value.ljust(len(place), b"\0"), len(place))
        else:
            place.value = value

    def nested(self, member: str, structure: str, index: int) -> "At":
        """Return an element of an array of structures."""
        offset, size, _ = record()["structures"][self._structure]["members"][member]
        each = record()["structures"][structure]["size"]
        assert (index + 1) * each <= size
        return At(structure, self._address + offset + index * each)

    def _place(self, member: str) -> tuple[Any, str]:
        offset, size, kind = record()["structures"][self._structure]["members"][member]
        if kind in ("bytes", "text"):
            return (ctypes.c_char * size).from_address(self._address + offset), kind
        return _TYPES[kind if kind != "other" else "pointer", size].from_address(self._address + offset), kind


_TYPES: Mapping[tuple[str, int], Any] = {
    ("unsigned", 1): ctypes.c_uint8,
    ("unsigned", 2): ctypes.c_uint16,
    ("unsigned", 4): ctypes.c_uint32,
    ("unsigned", 8): ctypes.c_uint64,
    ("signed", 4): ctypes.c_int32,
    ("signed", 8): ctypes.c_int64,
    ("pointer", 8): ctypes.c_void_p,
}


def size(structure: str) -> int:
    """Return the size of a structure in bytes."""
    found: int = record()["structures"][structure]["size"]
    return found


def version(structure: str, number: int) -> int:
    """Return NVML_STRUCT_VERSION."""
    return number << 24 | size(structure)


# Types of arguments that are unsigned integers in C
ENUMERATIONS = frozenset(
    {
        "nvmlAffinityScope_t",
        "nvmlBrandType_t",
        "nvmlComputeMode_t",
        "nvmlDeviceArchitecture_t",
        "nvmlEccCounterType_t",
        "nvmlEnableState_t",
        "nvmlGpuTopologyLevel_t",
        "nvmlGpuVirtualizationMode_t",
        "nvmlIntNvLinkDeviceType_t",
        "nvmlMemoryErrorType_t",
        "nvmlTemperatureSensors_t",
        "nvmlTemperatureThresholds_t",
    }
)

_ARGUMENTS: Mapping[str, Any] = {
    "unsigned int": ctypes.c_uint,
    "int": ctypes.c_int,
    "unsigned long long": ctypes.c_ulonglong,
    "unsigned int*": ctypes.POINTER(ctypes.c_uint),
    "int*": ctypes.POINTER(ctypes.c_int),
    "unsigned long*": ctypes.POINTER(ctypes.c_ulong),
    "unsigned long long*": ctypes.POINTER(ctypes.c_ulonglong),
    "const char*": ctypes.c_char_p,
    "char*": ctypes.POINTER(ctypes.c_char),
    "nvmlDevice_t": ctypes.c_void_p,
    "nvmlEventSet_t": ctypes.c_void_p,
    "nvmlDevice_t*": ctypes.POINTER(ctypes.c_void_p),
    "nvmlEventSet_t*": ctypes.POINTER(ctypes.c_void_p),
}


def signature(function: str) -> tuple[Any, ...]:
    """Return the types of a function's arguments: `Address` for a structure, an integer for an enumeration."""
    found = []
    for argument in record()["functions"][function]:
        plain = argument.rstrip("*")
        if argument in _ARGUMENTS:
            found.append(_ARGUMENTS[argument])
        elif plain in ENUMERATIONS:
            found.append(_ARGUMENTS["unsigned int" + argument[len(plain) :]])
        else:
            assert argument.endswith("*"), argument
            found.append(Address)
    return tuple(found)
