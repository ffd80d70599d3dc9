"""DGX A100, eight A100 behind six NVSwitches, two AMD sockets of four NUMA nodes each."""

from gpu_plugin.simulation.gpu_models import A100_SXM4_40GB, DEV, placed
from gpu_plugin.simulation.profile import NodeDescription
from gpu_plugin.simulation.topology import NvSwitch, Pcie

NODE = NodeDescription(
    # NUMA nodes as `nvidia-smi topo -m` shows them there
    gpus=placed(
        A100_SXM4_40GB,
        ("GPU-2648fdef-3286-52b2-8aca-5bc7b21602e4", "00000000:07:00.0", 3),
        ("GPU-0577acfc-727f-52b8-8e02-3a6a02bc044b", "00000000:0F:00.0", 3),
        ("GPU-1bdc9354-a5c7-5d18-88e7-4c5a024a5dee", "00000000:47:00.0", 1),
        ("GPU-68a776c6-b2e2-5b12-9637-4761ff5d81c0", "00000000:4E:00.0", 1),
        ("GPU-683dee9b-e211-5e9d-b816-ad1fbe71826a", "00000000:87:00.0", 7),
        ("GPU-81049e44-2cec-5b1a-9312-385c4d48be6f", "00000000:90:00.0", 7),
        ("GPU-d419281e-5a6a-5c6e-8ca0-08225da5da01", "00000000:B7:00.0", 5),
        ("GPU-a341f1fb-7b4f-5f68-9640-ae9f1ac95868", "00000000:BD:00.0", 5),
    ),
    nvswitch=NvSwitch(links=12, bus_ids=tuple(f"00000000:{bus:02X}:00.0" for bus in range(0xC4, 0xCA))),
    pcie=Pcie(switches=((0, 1), (2, 3), (4, 5), (6, 7))),
    # Four NUMA nodes a socket, as AMD's firmware commonly has them; not recorded.
    numa_distances={
        0: (10, 12, 12, 12, 32, 32, 32, 32),
        1: (12, 10, 12, 12, 32, 32, 32, 32),
        2: (12, 12, 10, 12, 32, 32, 32, 32),
        3: (12, 12, 12, 10, 32, 32, 32, 32),
        4: (32, 32, 32, 32, 10, 12, 12, 12),
        5: (32, 32, 32, 32, 12, 10, 12, 12),
        6: (32, 32, 32, 32, 12, 12, 10, 12),
        7: (32, 32, 32, 32, 12, 12, 12, 10),
    },
    dev=DEV,
)
