"""HGX H100, eight H100 SXM behind four NVSwitches, two sockets, every GPU partitioned into seven."""

from msgspec.structs import replace

from gpu_plugin.simulation.gpu_models import DEV, H100_SXM, MIG_CAPABILITIES, placed
from gpu_plugin.simulation.profile import NodeDescription
from gpu_plugin.simulation.topology import NvSwitch

NODE = NodeDescription(
    gpus=placed(
        replace(H100_SXM, mig=("1g.10gb",) * 7),
        ("GPU-9255637b-d08a-5729-9989-33fd2283a83c", "00000000:1B:00.0", 0),
        ("GPU-0512f6f8-13ac-547d-b3ed-ac9fc5a67ee8", "00000000:43:00.0", 0),
        ("GPU-a9413063-904e-5f0a-8a8e-887b5dfd1ba7", "00000000:52:00.0", 0),
        ("GPU-d1db6715-1519-58c1-8dee-d7d89c1a18a4", "00000000:61:00.0", 0),
        ("GPU-5811e84a-0cf6-5fb7-9488-e4635254054b", "00000000:9D:00.0", 1),
        ("GPU-51679028-aba7-5307-b1f5-8eb0503d1c50", "00000000:C3:00.0", 1),
        ("GPU-ac10176b-c803-58bd-9daa-c355e63aa2b5", "00000000:D1:00.0", 1),
        ("GPU-8f72127a-2a14-5e5c-95fb-99832eb3bac6", "00000000:DF:00.0", 1),
    ),
    nvswitch=NvSwitch(
        links=18, bus_ids=("00000000:05:00.0", "00000000:06:00.0", "00000000:07:00.0", "00000000:08:00.0")
    ),
    dev=(*DEV, *MIG_CAPABILITIES),
)
