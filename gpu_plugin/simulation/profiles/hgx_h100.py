"""HGX H100, eight H100 SXM behind four NVSwitches, two sockets, GPUDirect storage and RDMA set up."""

from gpu_plugin.simulation.gpu_models import DEV, H100_SXM, placed
from gpu_plugin.simulation.profile import NodeDescription
from gpu_plugin.simulation.topology import NvSwitch

NODE = NodeDescription(
    gpus=placed(
        H100_SXM,
        ("GPU-0dd872bc-79b8-50d8-b0c2-df8d24062139", "00000000:1B:00.0", 0),
        ("GPU-7a2fb1cb-d370-5e8c-b4e3-2462671b2fcc", "00000000:43:00.0", 0),
        ("GPU-df380dc6-0772-56aa-902f-512dfae67d3f", "00000000:52:00.0", 0),
        ("GPU-4b5ed472-07f5-573c-9ff7-97d564b56a3b", "00000000:61:00.0", 0),
        ("GPU-0014a1e5-c778-515c-bfa1-4ae6554854e5", "00000000:9D:00.0", 1),
        ("GPU-86a4d8c7-4660-5fc3-8b49-e13ea2161bf5", "00000000:C3:00.0", 1),
        ("GPU-8f7caeed-5255-555b-baa5-68c60305911f", "00000000:D1:00.0", 1),
        ("GPU-97df4333-8e9c-521f-832f-3fd02762fe9d", "00000000:DF:00.0", 1),
    ),
    nvswitch=NvSwitch(
        links=18, bus_ids=("00000000:05:00.0", "00000000:06:00.0", "00000000:07:00.0", "00000000:08:00.0")
    ),
    dev=(
        *DEV,
        "/dev/gdrdrv",
        "/dev/nvidia-fs0",
        "/dev/infiniband/rdma_cm",
        *(f"/dev/infiniband/uverbs{number}" for number in range(8)),
    ),
)
