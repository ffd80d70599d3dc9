"""Structures that are passed to the library, and numbers of NVML, agree with the recorded nvml.h."""

import ctypes
from collections.abc import Mapping

import pynvml
import pytest

from gpu_plugin.devices import nvml_h
from gpu_plugin.nvml import structures

from . import header

PASSED: Mapping[str, type[ctypes.Structure]] = {
    # ours
    "nvmlUnrepairableMemoryStatus_v1_t": structures.UnrepairableMemory,
    "nvmlTemperature_v1_t": structures.Temperature,
    "nvmlGpuFabricInfo_t": structures.FabricInfo,
    "nvmlGpuFabricInfo_v2_t": structures.FabricInfo2,
    "nvmlGpuFabricInfo_v3_t": structures.FabricInfo3,
    "nvmlGpuFabricClique_v1_t": structures.FabricClique,
    "nvmlGpuFabricInfo_v4_t": structures.FabricInfo4,
    "nvmlFieldValue_t": structures.FieldValue,
    # nvidia-ml-py's, in the functions of its own that the driver calls
    "nvmlPciInfo_t": pynvml.nvmlPciInfo_t,
    "nvmlMemory_t": pynvml.c_nvmlMemory_t,
    "nvmlMemory_v2_t": pynvml.c_nvmlMemory_v2_t,
    "nvmlUtilization_t": pynvml.c_nvmlUtilization_t,
    "nvmlDeviceAttributes_t": pynvml.c_nvmlDeviceAttributes,
    "nvmlMarginTemperature_v1_t": pynvml.c_nvmlMarginTemperature_v1_t,
    "nvmlEccSramErrorStatus_v1_t": pynvml.c_nvmlEccSramErrorStatus_v1_t,
    "nvmlEventData_t": pynvml.c_nvmlEventData_t,
    "nvmlGridLicenseExpiry_t": pynvml.c_nvmlGridLicenseExpiry_t,
    "nvmlGridLicensableFeature_t": pynvml.c_nvmlGridLicensableFeature_v4_t,
    "nvmlGridLicensableFeatures_t": pynvml.c_nvmlGridLicensableFeatures_v4_t,
}
"""Every structure that `driver` passes to the library, by the header's name."""


def test_every_structure_of_the_record_is_passed():
    assert set(PASSED) == set(header.STRUCTURES)


@pytest.mark.parametrize("name", PASSED)
def test_a_structure_lies_as_the_header_has_it(name):
    ours, there = PASSED[name], header.record()["structures"][name]
    assert ctypes.sizeof(ours) == there["size"]
    members = {member[0]: getattr(ours, member[0]) for member in ours._fields_}
    assert {member: [at.offset, at.size] for member, at in members.items()} == {
        member: [offset, size] for member, (offset, size, _) in there["members"].items()
    }


@pytest.mark.parametrize("structure", structures.VERSIONED)
def test_a_structure_has_its_version(structure):
    name = next(name for name, passed in PASSED.items() if passed is structure)
    assert structures.made(structure).version == header.version(name, int(name.split("_v")[1][0]))
    assert set(structures.VERSIONED) == {
        passed for name, passed in PASSED.items() if passed in vars(structures).values() and hasattr(passed, "version")
    }


def test_a_row_of_field_values_is_read_as_the_structure_lies():
    row = structures.FieldValue(230, 7, 1, 2, 3, 4, 0xFF)
    assert structures._ROW.size == header.size("nvmlFieldValue_t")
    assert structures._ROW.unpack(bytes(row)) == (230, 7, 1, 2, 3, 4, (0xFF).to_bytes(8, "little"))


def test_every_number_is_the_headers():
    there = header.record()["constants"]
    assert {name: there.get(name) for name in header.ours()} == header.ours()
    assert there["NVML_DEVICE_MIG_ENABLE"] == nvml_h.FEATURE_ENABLED


def test_every_event_type_is_one_of_all():
    assert sum(nvml_h.EventType) & ~nvml_h.EVENT_TYPES_ALL == 0


def test_the_header_differs_in_nothing_that_matters_from_version_to_version():
    assert {name for differing in header.record()["otherwise_in"].values() for name in differing} <= {
        "NVML_NVLINK_MAX_LINKS"
    }
