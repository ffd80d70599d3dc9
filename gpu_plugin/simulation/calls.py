"""The calls of a simulated driver by the NVML function that each stands for, and how they refuse."""

from typing import TypeVar

from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.port import NvmlError

NVML_FUNCTIONS = {
    "open": "nvmlInit_v2",
    "close": "nvmlShutdown",
    "driver_version": "nvmlSystemGetDriverVersion",
    "cuda_version": "nvmlSystemGetCudaDriverVersion_v2",
    "device_count": "nvmlDeviceGetCount_v2",
    "handle_by_index": "nvmlDeviceGetHandleByIndex_v2",
    "handle_by_uuid": "nvmlDeviceGetHandleByUUID",
    "handle_by_pci_bus_id": "nvmlDeviceGetHandleByPciBusId_v2",
    "uuid": "nvmlDeviceGetUUID",
    "minor_number": "nvmlDeviceGetMinorNumber",
    "pci_bus_id": "nvmlDeviceGetPciInfo_v3",
    "name": "nvmlDeviceGetName",
    "architecture": "nvmlDeviceGetArchitecture",
    "compute_capability": "nvmlDeviceGetCudaComputeCapability",
    "memory_total": "nvmlDeviceGetMemoryInfo",
    "memory_used": "nvmlDeviceGetMemoryInfo",
    "utilization": "nvmlDeviceGetUtilizationRates",
    "power_usage": "nvmlDeviceGetPowerUsage",
    "power_limit": "nvmlDeviceGetEnforcedPowerLimit",
    "mig_mode": "nvmlDeviceGetMigMode",
    "max_mig_devices": "nvmlDeviceGetMaxMigDeviceCount",
    "mig_handle": "nvmlDeviceGetMigDeviceHandleByIndex",
    "gpu_instance_id": "nvmlDeviceGetGpuInstanceId",
    "compute_instance_id": "nvmlDeviceGetComputeInstanceId",
    "mig_attributes": "nvmlDeviceGetAttributes_v2",
    "numa_node": "nvmlDeviceGetNumaNodeId",
    "compute_mode": "nvmlDeviceGetComputeMode",
    "set_compute_mode": "nvmlDeviceSetComputeMode",
    "persistence_mode": "nvmlDeviceGetPersistenceMode",
    "temperature": "nvmlDeviceGetTemperature",
    "temperature_threshold": "nvmlDeviceGetTemperatureThreshold",
    "margin_temperature": "nvmlDeviceGetMarginTemperature",
    "uncorrected_ecc_errors": "nvmlDeviceGetTotalEccErrors",
    "sram_threshold_exceeded": "nvmlDeviceGetSramEccErrorStatus",
    "remapped_rows": "nvmlDeviceGetRemappedRows",
    "retired_pages_pending": "nvmlDeviceGetRetiredPagesPendingStatus",
    "unrepairable_memory": "nvmlDeviceGetUnrepairableMemoryFlag_v1",
    "clocks_event_reasons": "nvmlDeviceGetCurrentClocksEventReasons",
    "nvlink_states": "nvmlDeviceGetNvLinkState",
    "nvlink_to_switch": "nvmlDeviceGetNvLinkRemoteDeviceType",
    "fabric": "nvmlDeviceGetGpuFabricInfoV",
    "pcie_link": "nvmlDeviceGetCurrPcieLinkWidth",
    "pcie_replays": "nvmlDeviceGetPcieReplayCounter",
    "total_energy": "nvmlDeviceGetTotalEnergyConsumption",
    "supported_event_types": "nvmlDeviceGetSupportedEventTypes",
    "field_values": "nvmlDeviceGetFieldValues",
    "nvlink_remote_bus_id": "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "common_ancestor": "nvmlDeviceGetTopologyCommonAncestor",
    "event_set": "nvmlEventSetCreate",
    "free_event_set": "nvmlEventSetFree",
    "register_events": "nvmlDeviceRegisterEvents",
    "wait": "nvmlEventSetWait_v2",
}
"""The port's calls and the NVML function that an error of each names."""

_Value = TypeVar("_Value")


def refused(call: str, code: int) -> NvmlError:
    """The error of a call that fails with this nvmlReturn_t."""
    return NvmlError(code, NVML_FUNCTIONS[call])


def supported(call: str, value: _Value | None) -> _Value:
    """The value; None is raised as NOT_SUPPORTED."""
    if value is None:
        raise refused(call, Return.NOT_SUPPORTED)
    return value
