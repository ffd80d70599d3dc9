"""DGX-1, eight V100 in a hybrid cube mesh of NVLinks, two sockets."""

from gpu_plugin.simulation.gpu_models import DEV, V100_SXM2, placed
from gpu_plugin.simulation.profile import NodeDescription
from gpu_plugin.simulation.topology import NvLink, Pcie

NODE = NodeDescription(
    gpus=placed(
        V100_SXM2,
        ("GPU-ab959b99-e74c-57b5-a4f0-0eadac7c8028", "00000000:06:00.0", 0),
        ("GPU-a1a486c9-27da-5ff5-9719-12f05108968f", "00000000:07:00.0", 0),
        ("GPU-a42adbb5-3f6a-5280-b66f-1b377cdc3fae", "00000000:0A:00.0", 0),
        ("GPU-5686ce88-8c3d-5cf0-b628-9a68baf8a4e5", "00000000:0B:00.0", 0),
        ("GPU-e4bd6b87-1b00-54b8-8714-93f0a8651e42", "00000000:85:00.0", 1),
        ("GPU-5d07e665-6acc-5f2c-99a4-6ec237e0ad31", "00000000:86:00.0", 1),
        ("GPU-677dc3e8-a6d7-517b-9885-5f66fd12348d", "00000000:89:00.0", 1),
        ("GPU-a91849bf-145a-562a-81f8-c3578b176d28", "00000000:8A:00.0", 1),
    ),
    nvlink=NvLink(
        links=6, pairs="0-1:1 0-2:1 0-3:2 0-4:2 1-2:2 1-3:1 1-5:2 2-3:2 2-6:1 3-7:1 4-5:1 4-6:1 4-7:2 5-6:2 5-7:1 6-7:2"
    ),
    pcie=Pcie(switch=((0, 1), (2, 3), (4, 5), (6, 7)), host_bridge=((0, 1, 2, 3), (4, 5, 6, 7))),
    dev=DEV,
)
