"""A server of four T4 cards, two for each socket, no NVLink, no MIG."""

from gpu_plugin.simulation.gpu_models import DEV, T4, placed
from gpu_plugin.simulation.profile import NodeDescription

NODE = NodeDescription(
    gpus=placed(
        T4,
        ("GPU-767677dc-dd10-5298-9d13-3eeb22898340", "00000000:3B:00.0", 0),
        ("GPU-8c155fe2-a352-5347-a8e7-4832f196f7d1", "00000000:5E:00.0", 0),
        ("GPU-1fc7ee76-605c-5044-a369-3d4e3dbe4f66", "00000000:AF:00.0", 1),
        ("GPU-e4580c15-7589-5485-8732-161a2f79551c", "00000000:D8:00.0", 1),
    ),
    dev=DEV,
)
