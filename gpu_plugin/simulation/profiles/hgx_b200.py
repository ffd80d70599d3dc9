"""HGX B200, eight B200 SXM behind two NVSwitches, two sockets."""

from gpu_plugin.simulation.gpu_models import B200, DEV, placed
from gpu_plugin.simulation.profile import NodeDescription
from gpu_plugin.simulation.topology import NvSwitch

NODE = NodeDescription(
    # Bus ids as nvidia-smi prints them on a DGX B200, NUMA nodes as `nvidia-smi topo -m` shows them on most such machines
    gpus=placed(
        B200,
        ("GPU-21cc9c07-cc7f-58f4-b3ce-4104d6a91df4", "00000000:1B:00.0", 0),
        ("GPU-f05d04ca-97cb-5182-a4e2-85ec33382d32", "00000000:43:00.0", 0),
        ("GPU-16a374b8-d26f-572d-b718-daa562e23e88", "00000000:52:00.0", 0),
        ("GPU-997c964e-28fd-5eb4-9632-0824da3e3a35", "00000000:61:00.0", 0),
        ("GPU-2c4f594e-0684-545f-9dae-c1ef97ebc59b", "00000000:9D:00.0", 1),
        ("GPU-a39ee8f8-660e-5ff1-997c-26b69275b73a", "00000000:C3:00.0", 1),
        ("GPU-4329db90-c0bb-5873-9264-dcd5925f5433", "00000000:D1:00.0", 1),
        ("GPU-661fd90b-8120-5f98-acaa-c85a5a67fb05", "00000000:DF:00.0", 1),
    ),
    # Switches of this generation are no PCI devices; NVML's name for them is not recorded.
    nvswitch=NvSwitch(links=18, bus_ids=("FFFFFFFF:FF:FF.7",)),
    dev=DEV,
)
