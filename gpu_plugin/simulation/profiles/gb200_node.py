"""One compute tray of a GB200 NVL72, four GPUs and two Grace CPUs, with the NVSwitches in trays of their own."""

from msgspec.structs import replace

from gpu_plugin.simulation.gpu_models import DEV, GB200, placed
from gpu_plugin.simulation.profile import NodeDescription
from gpu_plugin.simulation.topology import NvSwitch

# Bus ids as nvidia-smi prints them
_GPUS = placed(
    GB200,
    ("GPU-502c0e31-ee01-552c-ae4c-7ee1eb60cf19", "00000008:01:00.0", 0),
    ("GPU-dc8cc019-89af-5a78-82f6-e6a8a092e1b4", "00000009:01:00.0", 0),
    ("GPU-554fd340-85c1-5bbf-9439-a74e64509985", "00000018:01:00.0", 1),
    ("GPU-1245d8d6-328d-5831-8a75-c0a8ac642300", "00000019:01:00.0", 1),
)

NODE = NodeDescription(
    # NUMA nodes of the CPU and of the GPU's memory as `nvidia-smi topo -m` prints them
    gpus=tuple(replace(gpu, memory_affinity=(gpu.numa_node,)) for gpu in _GPUS),
    # Outside the node; NVML's name for them there is not recorded.
    nvswitch=NvSwitch(links=18, bus_ids=("FFFFFFFF:FF:FF.7",)),
    # As numactl prints them for such a node, without its other 28 nodes, which are empty places for parts of GPUs
    numa_distances={
        0: (10, 40, 80, 80, 120, 120),
        1: (40, 10, 120, 120, 80, 80),
        2: (80, 120, 10, 40, 40, 40),
        10: (80, 120, 40, 10, 40, 40),
        18: (120, 80, 40, 40, 10, 40),
        26: (120, 80, 40, 40, 40, 10),
    },
    dev=(*DEV, "/dev/nvidia-caps-imex-channels/channel0"),
)
