"""A server of eight L40S cards in pairs under PCIe switches, two sockets, no NVLink, no MIG."""

from gpu_plugin.simulation.gpu_models import DEV, L40S, placed
from gpu_plugin.simulation.profile import NodeDescription
from gpu_plugin.simulation.topology import Pcie

NODE = NodeDescription(
    # The slots of one maker; bus numbers differ from server to server
    gpus=placed(
        L40S,
        ("GPU-bf95f9b5-6ce4-51ad-a083-b43ea98da569", "00000000:16:00.0", 0),
        ("GPU-24cb7e8b-0329-5892-98a9-7d126ee6118a", "00000000:17:00.0", 0),
        ("GPU-c1aef7f0-c7b6-55a2-bbb7-8ad263f57097", "00000000:49:00.0", 0),
        ("GPU-22be2273-53d6-5af3-9dd8-09f26dbda9df", "00000000:4A:00.0", 0),
        ("GPU-8ff199b5-6172-595c-9abc-e79969f5ea25", "00000000:96:00.0", 1),
        ("GPU-02ef5c88-ae99-56fd-8da2-59aabcbfe8fb", "00000000:97:00.0", 1),
        ("GPU-d84f7aba-9903-5874-9d66-8e3e475fd460", "00000000:C9:00.0", 1),
        ("GPU-21373d86-ea93-5a21-8878-0f5bf632cacb", "00000000:CA:00.0", 1),
    ),
    pcie=Pcie(switch=((0, 1), (2, 3), (4, 5), (6, 7))),
    dev=DEV,
)
