"""The numbers of nvml.h that this plugin uses, in any package: return codes, event types, field ids, enumerations.

Names are those of the header, without the prefix that all names of a kind share. Enumerations of the header, and masks that
messages name, are enums here. Field ids are plain numbers, as in the header.
"""

from enum import IntEnum, IntFlag

ALL_INSTANCES = 0xFFFFFFFF  # GPU or compute instance id of an event of the whole GPU (recorded on an H200)

# More links than any GPU has (NVML_NVLINK_MAX_LINKS); a driver ends the count with INVALID_ARGUMENT or NOT_SUPPORTED.
MAX_NVLINKS = 36


class Return(IntEnum):
    """nvmlReturn_t."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


UNSUPPORTED = frozenset(
    {Return.NOT_SUPPORTED, Return.NO_PERMISSION, Return.FUNCTION_NOT_FOUND, Return.ARGUMENT_VERSION_MISMATCH}
)
"""Codes of requests that this part or driver never supports. They are stored at the first answer, and are never a fault."""


class ValueType(IntEnum):
    """nvmlValueType_t: which member of nvmlValue_t holds a field's value."""

    DOUBLE = 0
    UNSIGNED_INT = 1
    UNSIGNED_LONG = 2
    UNSIGNED_LONG_LONG = 3
    SIGNED_LONG_LONG = 4
    SIGNED_INT = 5
    UNSIGNED_SHORT = 6


class Threshold(IntEnum):
    """nvmlTemperatureThresholds_t: the kinds that are read, in degrees Celsius."""

    SHUTDOWN = 0
    SLOWDOWN = 1
    MEM_MAX = 2
    GPU_MAX = 3


class ComputeMode(IntEnum):
    """nvmlComputeMode_t: whether only one process may use the GPU."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class EventType(IntFlag):
    """nvmlEventType* bits that concern health."""

    SINGLE_BIT_ECC = 0x1
    DOUBLE_BIT_ECC = 0x2
    XID_CRITICAL = 0x8
    MIG_CONFIG_CHANGE = 0x100
    SINGLE_BIT_ECC_STORM = 0x200
    DRAM_RETIREMENT = 0x400
    DRAM_RETIREMENT_FAILURE = 0x800
    NON_FATAL_POISON = 0x1000
    FATAL_POISON = 0x2000
    GPU_UNAVAILABLE = 0x4000
    GPU_RECOVERY_ACTION = 0x8000


EVENT_TYPES_ALL = 0xFF9F  # nvmlEventTypeAll: any other bit is no event type
VIRTUALIZATION_VGPU = 2  # NVML_GPU_VIRTUALIZATION_MODE_VGPU: the GPU is a vGPU, in its virtual machine


class TopologyLevel(IntEnum):
    """nvmlGpuTopologyLevel_t: the closest common ancestor of two GPUs on PCIe; smaller is closer."""

    INTERNAL = 0
    SINGLE = 10
    MULTIPLE = 20
    HOSTBRIDGE = 30
    NODE = 40
    SYSTEM = 50


class Architecture(IntEnum):
    """nvmlDeviceArchitecture_t, NVML_DEVICE_ARCH_*: the architectures that the plugin distinguishes."""

    VOLTA = 5
    HOPPER = 9


class RecoveryAction(IntEnum):
    """nvmlDeviceGpuRecoveryAction_t, NVML_GPU_RECOVERY_ACTION_*: the value of `FI_GET_GPU_RECOVERY_ACTION`."""

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    """Memory sharing between nodes fails; the GPU itself works."""
    BUS_RESET = 6
    SYSTEM_REBOOT = 7


class FabricState(IntEnum):
    """nvmlGpuFabricState_t, an unsigned char: the progress of a GPU in joining its NVLink fabric."""

    NOT_SUPPORTED = 0
    NOT_STARTED = 1
    IN_PROGRESS = 2
    COMPLETED = 3
    """It has joined, or failed to join: the status has the result."""


class FabricSummary(IntEnum):
    """NVML_GPU_FABRIC_HEALTH_SUMMARY_*."""

    NOT_SUPPORTED = 0
    HEALTHY = 1
    UNHEALTHY = 2
    LIMITED_CAPACITY = 3


class FabricCondition(IntEnum):
    """The shifts of NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_* of conditions two bits wide: 0 not supported, 1 true, 2 false."""

    DEGRADED_BW = 0
    ROUTE_RECOVERY = 2
    ROUTE_UNHEALTHY = 4
    ACCESS_TIMEOUT_RECOVERY = 6
    PARTITION_ASSIGNED = 12


FABRIC_TRUE = 1  # NVML_GPU_FABRIC_HEALTH_MASK_*_TRUE
FABRIC_FALSE = 2  # NVML_GPU_FABRIC_HEALTH_MASK_*_FALSE
FABRIC_CONDITION_MASK = 0x3  # NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_* of these conditions

FABRIC_CONFIGURATION_SHIFT = 8  # NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION
FABRIC_CONFIGURATION_MASK = 0xF  # NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_INCORRECT_CONFIGURATION: a `FabricConfiguration`


class FabricConfiguration(IntEnum):
    """NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_*: the error in the configuration."""

    NOT_SUPPORTED = 0
    NONE = 1
    INCORRECT_SYSGUID = 2
    INCORRECT_CHASSIS_SN = 3
    NO_PARTITION = 4
    INSUFFICIENT_NVLINKS = 5
    INCOMPATIBLE_GPU_FW = 6
    INVALID_LOCATION = 7
    GPU_STATE_INVALID = 8


CLIQUE_UNICAST_POINTER = 0  # NVML_GPU_FABRIC_CLIQUE_TYPE_UNICAST_POINTER: GPUs that reach each other's memory

# Only the last two count for health: HwSlowdown alone shows neither cause nor extent, and SwPowerCap is normal for a busy GPU.
CLOCKS_SW_POWER_CAP = 0x4  # nvmlClocksEventReasonSwPowerCap
CLOCKS_HW_SLOWDOWN = 0x8  # nvmlClocksThrottleReasonHwSlowdown
CLOCKS_SW_THERMAL_SLOWDOWN = 0x20  # nvmlClocksEventReasonSwThermalSlowdown
CLOCKS_HW_THERMAL_SLOWDOWN = 0x40  # nvmlClocksThrottleReasonHwThermalSlowdown
CLOCKS_HW_POWER_BRAKE_SLOWDOWN = 0x80  # nvmlClocksThrottleReasonHwPowerBrakeSlowdown

AFFINITY_SCOPE_NODE = 0  # nvmlAffinityScope_t: the NUMA node, rather than the socket

MEMORY_ERROR_UNCORRECTED = 1  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED
ECC_VOLATILE = 0  # NVML_VOLATILE_ECC

TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU, of nvmlTemperatureSensors_t
NVLINK_REMOTE_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH

NVLINK_STATE_INACTIVE = 0  # NVML_NVLINK_STATE_INACTIVE: a link that sleeps, or that carries no traffic yet, is active
FABRIC_UUID_LENGTH = 16  # bytes, NVML_GPU_FABRIC_UUID_LEN
FABRIC_CLIQUES = 64  # NVML_GPU_FABRIC_CLIQUE_MAX
FEATURE_ENABLED = 1  # NVML_FEATURE_ENABLED, and NVML_DEVICE_MIG_ENABLE

# Field ids: NVML_FI_DEV_*, for nvmlDeviceGetFieldValues.
FI_ECC_SBE_VOL_TOTAL = 3  # single-bit errors, which ECC corrected, since the driver was last loaded or the GPU reset
FI_RETIRED_SBE = 29  # pages retired for single-bit errors
FI_RETIRED_DBE = 30  # pages retired for double-bit errors
FI_RETIRED_PENDING = 31
FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = 38  # CRC errors of flits; the link goes into scopeId
FI_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL = 45  # CRC errors of data; the link goes into scopeId
FI_MEMORY_TEMP = 82  # °C
FI_TOTAL_ENERGY_CONSUMPTION = 83  # mJ since the driver was last loaded
FI_PCIE_REPLAY_COUNTER = 94
FI_REMAPPED_COR = 142  # rows remapped for correctable errors in the life of the part
FI_REMAPPED_UNC = 143  # rows remapped for uncorrectable errors in the life of the part
FI_REMAPPED_PENDING = 144
FI_REMAPPED_FAILURE = 145
FI_NVLINK_GET_STATE = 165  # whether a link is active; the link goes into scopeId
FI_PCIE_COUNT_FATAL_ERROR = 180
FI_POWER_INSTANT = 186  # power draw now, mW
FI_POWER_CURRENT_LIMIT = 190  # power limit in force, mW
FI_TEMPERATURE_SHUTDOWN_TLIMIT = 193  # °C relative to T.Limit, signed, as the three below
FI_TEMPERATURE_SLOWDOWN_TLIMIT = 194
FI_TEMPERATURE_MEM_MAX_TLIMIT = 195
FI_TEMPERATURE_GPU_MAX_TLIMIT = 196
FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS = 214  # recoveries of a link that failed; the link goes into scopeId
FI_GET_GPU_RECOVERY_ACTION = 230  # a `RecoveryAction`
