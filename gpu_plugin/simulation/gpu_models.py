"""The GPU models of the built-in simulated nodes, and their places on a node.

Values without a comment are from data sheets, or recorded on a real GPU.
"""

from msgspec.structs import replace

from gpu_plugin.devices import nvml_h as nvml
from gpu_plugin.simulation.profile import FabricProfile, GpuProfile, ThresholdsProfile

# Paths under /dev of all nodes, and of nodes whose driver has MIG enabled
DEV = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
MIG_CAPABILITIES = ("/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2")

# Masks of event types
_OLD_EVENTS = 31  # the five old kinds; not recorded
_AMPERE_EVENTS = 287  # the five old kinds and MIG configuration change; not recorded
_HOPPER_EVENTS = 65439  # recorded on an H200 with driver 580.159.04

# Fields of an idle GPU. The fields of a model and their values are not recorded, unless a comment has their source.
_POWER = {nvml.FI_POWER_INSTANT: 0, nvml.FI_POWER_CURRENT_LIMIT: 0}
_NVLINK_CRC = {nvml.FI_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL: 0, nvml.FI_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL: 0}
_VOLTA = {nvml.FI_RETIRED_SBE: 0, nvml.FI_RETIRED_DBE: 0, **_NVLINK_CRC, nvml.FI_MEMORY_TEMP: 33, **_POWER}
_ROWS = (nvml.FI_REMAPPED_COR, nvml.FI_REMAPPED_UNC, nvml.FI_REMAPPED_PENDING, nvml.FI_REMAPPED_FAILURE)
_COUNTERS = (nvml.FI_ECC_SBE_VOL_TOTAL, nvml.FI_TOTAL_ENERGY_CONSUMPTION, nvml.FI_PCIE_REPLAY_COUNTER)
_REMAPPING = {**dict.fromkeys((*_COUNTERS, *_ROWS), 0), **_POWER, nvml.FI_GET_GPU_RECOVERY_ACTION: 0}
_NVLINK = {**_NVLINK_CRC, nvml.FI_NVLINK_GET_STATE: 0}
# °C to T.Limit, as nvidia-smi prints them for an H100
_HOPPER_TLIMITS = {
    nvml.FI_TEMPERATURE_SHUTDOWN_TLIMIT: -8,
    nvml.FI_TEMPERATURE_SLOWDOWN_TLIMIT: -2,
    nvml.FI_TEMPERATURE_MEM_MAX_TLIMIT: 0,
    nvml.FI_TEMPERATURE_GPU_MAX_TLIMIT: 0,
}
_HOPPER_NO_NVLINK = {**_REMAPPING, nvml.FI_PCIE_COUNT_FATAL_ERROR: 0, **_HOPPER_TLIMITS}
_HOPPER = {**_HOPPER_NO_NVLINK, **_NVLINK, nvml.FI_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS: 0}

_VOLTA_THRESHOLDS = ThresholdsProfile(shutdown=90, slowdown=87, memory_max=85, gpu_max=83)  # of a V100-SXM2
_H200_THRESHOLDS = ThresholdsProfile(shutdown=95, slowdown=89, memory_max=95, gpu_max=87)

_NO_FABRIC = FabricProfile()
# Completed, no fault; not recorded.
FABRIC = FabricProfile(state=int(nvml.FabricState.COMPLETED), health_mask=0x1AA, summary=1)

V100_SXM2 = GpuProfile(
    name="Tesla V100-SXM2-32GB",
    architecture=5,
    memory_bytes=34359738368,
    thresholds=_VOLTA_THRESHOLDS,
    event_types=_OLD_EVENTS,
    fields=_VOLTA,
    ecc=True,
    page_retirement=True,
    clocks_event_reasons=1,
    pcie_width=16,
    idle_temperature=35,
    idle_watts=43,
    limit_watts=300,
)

V100_SXM3 = replace(V100_SXM2, name="Tesla V100-SXM3-32GB", idle_watts=50, limit_watts=350)

T4 = replace(
    V100_SXM2,
    name="Tesla T4",
    architecture=6,
    memory_bytes=16106127360,
    thresholds=ThresholdsProfile(shutdown=96, slowdown=93, gpu_max=85),
    fields={nvml.FI_RETIRED_SBE: 0, nvml.FI_RETIRED_DBE: 0, **_POWER},
    idle_temperature=36,
    idle_watts=10,
    limit_watts=70,
)

A100_SXM4_40GB = GpuProfile(
    name="NVIDIA A100-SXM4-40GB",
    architecture=7,
    memory_bytes=42949672960,
    mig_mode=(0, 0),
    mig_profiles="a100-40gb",
    thresholds=ThresholdsProfile(shutdown=92, slowdown=89, memory_max=95, gpu_max=85),
    event_types=_AMPERE_EVENTS,
    fields={**_REMAPPING, **_NVLINK, nvml.FI_MEMORY_TEMP: 36},
    ecc=True,
    sram_status=True,  # not recorded
    row_remapping=True,
    clocks_event_reasons=1,
    pcie_width=16,
    idle_temperature=30,
)

L40S = GpuProfile(
    name="NVIDIA L40S",
    architecture=8,
    memory_bytes=48305799168,
    thresholds=ThresholdsProfile(shutdown=98, slowdown=95, gpu_max=88),  # not recorded: the order of magnitude
    event_types=_OLD_EVENTS,
    fields={
        **_REMAPPING,
        nvml.FI_PCIE_COUNT_FATAL_ERROR: 0,
        # As nvidia-smi prints them for other GPUs of the Ada generation
        nvml.FI_TEMPERATURE_SHUTDOWN_TLIMIT: -5,
        nvml.FI_TEMPERATURE_SLOWDOWN_TLIMIT: -2,
        nvml.FI_TEMPERATURE_GPU_MAX_TLIMIT: 0,
    },
    margin=60,  # not recorded: down to gpu_max
    ecc=True,
    sram_status=True,  # not recorded
    row_remapping=True,
    clocks_event_reasons=1,
    pcie_width=16,
    idle_temperature=28,
    idle_watts=35,
    limit_watts=350,
)

H200 = GpuProfile(
    name="NVIDIA H200",
    architecture=9,
    memory_bytes=150754820096,
    mig_mode=(0, 0),
    mig_profiles="h200-141gb",
    thresholds=_H200_THRESHOLDS,
    event_types=_HOPPER_EVENTS,
    fields=_HOPPER_NO_NVLINK,
    margin=55,
    ecc=True,
    sram_status=True,  # not recorded
    row_remapping=True,
    clocks_event_reasons=1,
    fabric=_NO_FABRIC,
    pcie_width=16,
    idle_temperature=32,
)

# Thresholds and margin of an H200
H100_SXM = replace(
    H200,
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=85520809984,
    mig_profiles="h100-80gb",
    fields={**_HOPPER, nvml.FI_MEMORY_TEMP: 40},  # as nvidia-smi prints it for an idle H100
    unrepairable_memory=True,  # not recorded
    fabric=FABRIC,
    idle_watts=70,
    limit_watts=700,
)

H100_NVL = replace(
    H100_SXM,
    name="NVIDIA H100 NVL",
    memory_bytes=100485038080,  # 95830 MiB, as nvidia-smi prints it
    mig_profiles=None,  # its table of MIG profiles is not known here
    fabric=_NO_FABRIC,  # it has no switches
    idle_temperature=34,
    idle_watts=62,
    limit_watts=400,
)

# T.Limits of an H100
B200 = replace(
    H100_SXM,
    name="NVIDIA B200",
    architecture=10,
    memory_bytes=192265846784,  # 183359 MiB, as nvidia-smi prints it
    mig_profiles="b200-180gb",
    fields={**_HOPPER, nvml.FI_MEMORY_TEMP: 38},
    idle_temperature=29,
    idle_watts=140,
    limit_watts=1000,
)

GB200 = replace(
    B200,
    name="NVIDIA GB200",
    memory_bytes=198674743296,  # 189471 MiB, as nvidia-smi prints it
    mig_profiles=None,  # its table of MIG profiles is not known here
    fields={**_HOPPER, nvml.FI_MEMORY_TEMP: 37},
    # The cluster and its clique are invented.
    fabric=replace(FABRIC, cluster="7c1f0f4a92d84e53b0c66a1d3e5f8b27", clique=32766),
    idle_watts=155,
    limit_watts=1200,
)


def placed(model: GpuProfile, *places: tuple[str, str, int]) -> tuple[GpuProfile, ...]:
    """Return a GPU of this model for each uuid, PCI bus id and NUMA node, with minors in this order.

    Derived uuids are written out in the profiles, since the import of Python's hashes costs 0.6 MiB.
    """
    return tuple(
        replace(model, uuid=uuid, minor=minor, pci_bus_id=bus_id, numa_node=numa_node)
        for minor, (uuid, bus_id, numa_node) in enumerate(places)
    )
