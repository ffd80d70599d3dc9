"""DGX-2, sixteen V100 behind twelve NVSwitches, two sockets."""

from gpu_plugin.simulation.gpu_models import DEV, V100_SXM3, placed
from gpu_plugin.simulation.profile import NodeDescription
from gpu_plugin.simulation.topology import NvSwitch, Pcie

NODE = NodeDescription(
    gpus=placed(
        V100_SXM3,
        ("GPU-5e0eecf8-e802-54c4-8726-9577096be740", "00000000:34:00.0", 0),
        ("GPU-e2a836aa-4502-526f-89ed-19e8ca7bea75", "00000000:36:00.0", 0),
        ("GPU-3de66527-d7d2-5dd0-ab5a-c3eb3c4bcd19", "00000000:39:00.0", 0),
        ("GPU-5e774542-675d-5be6-8e4e-24cd8446b9e0", "00000000:3B:00.0", 0),
        ("GPU-e00ea239-0ee0-5d0e-a177-70500273fcb8", "00000000:57:00.0", 0),
        ("GPU-4f69a9b0-f93f-52d5-85a6-39240e443418", "00000000:59:00.0", 0),
        ("GPU-870bf2f6-5205-5da8-8aaa-1eb6db783248", "00000000:5C:00.0", 0),
        ("GPU-2e264288-77fa-5b14-91fb-6f7ff4201592", "00000000:5E:00.0", 0),
        ("GPU-253dd641-9c21-548b-a10d-42bad63c2969", "00000000:B7:00.0", 1),
        ("GPU-98c05ba9-e146-5c81-ad6b-9d9b18c099da", "00000000:B9:00.0", 1),
        ("GPU-a5b4be56-d352-5d6e-b514-d8272cfe97b6", "00000000:BC:00.0", 1),
        ("GPU-c9a47d2d-bbee-513f-be0f-dff572ed185f", "00000000:BE:00.0", 1),
        ("GPU-64c7f964-7009-5bcb-ac64-16a5d5a70d81", "00000000:E0:00.0", 1),
        ("GPU-90cbdb96-834a-5308-813d-820847b5061c", "00000000:E2:00.0", 1),
        ("GPU-75ac43b4-9c5f-5e56-96d1-86a6082c0981", "00000000:E5:00.0", 1),
        ("GPU-df4401bc-d426-52ee-8407-594a1f75c1ba", "00000000:E7:00.0", 1),
    ),
    # Six switches on each of two baseboards. It makes no difference which board's six a link has here.
    nvswitch=NvSwitch(links=6, bus_ids=tuple(f"00000000:{bus:02X}:00.0" for bus in range(0x05, 0x0B))),
    pcie=Pcie(
        switch=((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)),
        switches=((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)),
    ),
    dev=DEV,
)
