"""Structures of nvml.h that are passed to the library directly, with the layout of the header.

nvidia-ml-py has most structures. Here are those that it lays out differently from the header, has only in newer versions, or
reads one member at a time although a look needs a hundred.
"""

import ctypes
import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gpu_plugin.devices.nvml_h import CLIQUE_UNICAST_POINTER, FABRIC_CLIQUES, FABRIC_UUID_LENGTH, Return, ValueType
from gpu_plugin.health.observation import Fabric
from gpu_plugin.nvml.port import Field, NvmlError


class UnrepairableMemory(ctypes.Structure):
    """nvmlUnrepairableMemoryStatus_v1_t, which has no version in spite of its name (nvml.h 13.1 to 13.5)."""

    _fields_ = (("bUnrepairableMemory", ctypes.c_uint),)


class Temperature(ctypes.Structure):
    """nvmlTemperature_v1_t: °C of a sensor, signed."""

    _fields_ = (("version", ctypes.c_uint), ("sensorType", ctypes.c_uint), ("temperature", ctypes.c_int))


_UUID = ctypes.c_ubyte * FABRIC_UUID_LENGTH


_VERSION = ("version", ctypes.c_uint)
# The first members of all versions. The state is one byte, followed by padding.
_JOINED = (("clusterUuid", _UUID), ("status", ctypes.c_uint), ("cliqueId", ctypes.c_uint), ("state", ctypes.c_ubyte))
_MASK = ("healthMask", ctypes.c_uint)


class FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = _JOINED


class FabricInfo2(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t."""

    _fields_ = (_VERSION, *_JOINED, _MASK)


class FabricInfo3(ctypes.Structure):
    """nvmlGpuFabricInfo_v3_t."""

    _fields_ = (_VERSION, *_JOINED, _MASK, ("healthSummary", ctypes.c_ubyte))


class FabricClique(ctypes.Structure):
    """nvmlGpuFabricClique_v1_t."""

    _fields_ = (("type", ctypes.c_ubyte), ("id", ctypes.c_uint))


class FabricInfo4(ctypes.Structure):
    """nvmlGpuFabricInfo_v4_t. It has no version member; its function's name has the version."""

    _fields_ = (
        ("clusterUuid", _UUID),
        ("status", ctypes.c_uint),
        ("cliques", FabricClique * FABRIC_CLIQUES),
        ("numCliques", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("healthMask", ctypes.c_uint),
        ("healthSummary", ctypes.c_ubyte),
    )


class FieldValue(ctypes.Structure):
    """nvmlFieldValue_t. `value` is the union nvmlValue_t, whose type is `valueType`."""

    _fields_ = (
        ("fieldId", ctypes.c_uint),
        ("scopeId", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latencyUsec", ctypes.c_longlong),
        ("valueType", ctypes.c_uint),
        ("nvmlReturn", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    )


# The version numbers of structures with a member `version`
VERSIONED: Mapping[type[ctypes.Structure], int] = {Temperature: 1, FabricInfo2: 2, FabricInfo3: 3}


def made(structure: type[ctypes.Structure]) -> Any:
    """Return an empty structure with its version member set as by NVML_STRUCT_VERSION: from its number and size."""
    number = VERSIONED.get(structure)
    return structure() if number is None else structure(number << 24 | ctypes.sizeof(structure))


def fabric(info: Any) -> Fabric:
    """Convert any FabricInfo. Of several cliques use the first unicast clique, as older structures do (nvml.h)."""
    cluster = bytes(info.clusterUuid)
    if isinstance(info, FabricInfo4):
        there = info.cliques[: min(info.numCliques, FABRIC_CLIQUES)]
        clique = next((int(each.id) for each in there if each.type == CLIQUE_UNICAST_POINTER), 0)
    else:
        clique = int(info.cliqueId)
    mask, summary = getattr(info, "healthMask", 0), getattr(info, "healthSummary", 0)
    return Fabric(info.state, info.status, mask, summary, cluster.hex() if any(cluster) else "", clique)


_ROW = struct.Struct("@IIqqII8s")  # a whole FieldValue; reading it member by member takes a microsecond for each

_READERS: Mapping[int, struct.Struct] = {
    ValueType.DOUBLE: struct.Struct("@d"),
    ValueType.UNSIGNED_INT: struct.Struct("@I4x"),
    ValueType.UNSIGNED_LONG: struct.Struct("@L"),
    ValueType.UNSIGNED_LONG_LONG: struct.Struct("@Q"),
    ValueType.SIGNED_LONG_LONG: struct.Struct("@q"),
    ValueType.SIGNED_INT: struct.Struct("@i4x"),
    ValueType.UNSIGNED_SHORT: struct.Struct("@H6x"),
}


@lru_cache(maxsize=64)  # all GPUs of a model have the same fields
def _rows(fields: tuple[Field, ...]) -> bytes:
    return bytes((FieldValue * len(fields))(*(FieldValue(field.number, field.scope) for field in fields)))


def asking(fields: tuple[Field, ...]) -> Any:
    """Return an array of FieldValue that requests these fields."""
    return (FieldValue * len(fields)).from_buffer_copy(_rows(fields))


def answers(values: Any, call: str) -> tuple[int | NvmlError, ...]:
    """Return the integers or errors in an array of FieldValue that the function `call` has filled in, one for each field."""
    rows = _ROW.iter_unpack(values)
    return tuple(_answer(call, number, scope, kind, code, value) for number, scope, _, _, kind, code, value in rows)


def _answer(call: str, number: int, scope: int, kind: int, code: int, value: bytes) -> int | NvmlError:
    if code != Return.SUCCESS:
        return NvmlError(code, call, f"field {number} of scope {scope} is refused")
    reader = _READERS.get(kind)
    if reader is None:
        return NvmlError(Return.NOT_SUPPORTED, call, f"field {number} is of the unknown type {kind}")
    (number_read,) = reader.unpack(value)
    if not math.isfinite(number_read):
        return NvmlError(Return.UNKNOWN, call, f"field {number} is {number_read}, which is not a finite number")
    return int(number_read)
