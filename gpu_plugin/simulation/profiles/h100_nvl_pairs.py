"""A server of eight H100 NVL cards, bridged in pairs by NVLink, two sockets."""

from gpu_plugin.simulation.gpu_models import DEV, H100_NVL, placed
from gpu_plugin.simulation.profile import NodeDescription
from gpu_plugin.simulation.topology import NvLink

NODE = NodeDescription(
    # NUMA nodes as `nvidia-smi topo -m` shows them on one such server; bus numbers differ from server to server
    gpus=placed(
        H100_NVL,
        ("GPU-295476d9-1414-5a91-b16b-35e8ccabf7cf", "00000000:01:00.0", 0),
        ("GPU-00eb2662-4f0f-500e-8366-3979d4b345b9", "00000000:21:00.0", 0),
        ("GPU-d70a1437-cb81-5b0c-a88e-35f225f18730", "00000000:41:00.0", 0),
        ("GPU-7c489890-5274-5e2a-9d58-7cedd3263908", "00000000:61:00.0", 0),
        ("GPU-a77b9ba5-a411-5441-93d8-550b7ca954e2", "00000000:81:00.0", 1),
        ("GPU-204bddcf-6c16-571b-aad7-147910f6a236", "00000000:A1:00.0", 1),
        ("GPU-aa50884d-79ce-5769-a865-fff838d4beb7", "00000000:C1:00.0", 1),
        ("GPU-91d82775-d7b7-55eb-91dc-c96f3ce25ee7", "00000000:E1:00.0", 1),
    ),
    nvlink=NvLink(links=12, pairs="0-1:12 2-3:12 4-5:12 6-7:12"),  # three bridges of four links
    # One NUMA node a socket, as AMD's firmware commonly has them; not recorded.
    numa_distances={0: (10, 32), 1: (32, 10)},
    dev=DEV,
)
