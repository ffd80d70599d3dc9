"""An invented chassis of sixteen GPUs like V100, four in each PCIe switch group, whose NVLinks differ from group to group."""

from gpu_plugin.simulation.gpu_models import DEV, V100_SXM2, placed
from gpu_plugin.simulation.profile import NodeDescription
from gpu_plugin.simulation.topology import NvLink, Pcie

# The machine does not exist, and no value is recorded.
NODE = NodeDescription(
    gpus=placed(
        V100_SXM2,
        ("GPU-650fac1b-617c-5f82-8073-388dd4c090f9", "00000000:07:00.0", 0),
        ("GPU-935bfff8-73f6-5539-ad6e-b8e3bd560d9b", "00000000:08:00.0", 0),
        ("GPU-52edad5a-4835-50aa-b824-69d31f86d2e0", "00000000:0B:00.0", 0),
        ("GPU-60c0d1b1-0f1b-54ba-bc6e-e3a4a578b122", "00000000:0C:00.0", 0),
        ("GPU-a111860b-f6c1-50a1-b9ba-2a8e4470b7fa", "00000000:27:00.0", 0),
        ("GPU-3f66302c-b895-5fa6-8777-82e756a3717f", "00000000:28:00.0", 0),
        ("GPU-bed08944-4bea-539a-9033-dabf01b170f6", "00000000:2B:00.0", 0),
        ("GPU-f9533b75-1955-52a9-a7ee-0e09665a8dd9", "00000000:2C:00.0", 0),
        ("GPU-31b4c540-1e52-54c9-a373-e3304f3b990d", "00000000:87:00.0", 1),
        ("GPU-dab0e20b-329b-575c-9fd7-13a3e5c48063", "00000000:88:00.0", 1),
        ("GPU-9f7d5551-64c3-55b9-8eb3-8d258ec4840e", "00000000:8B:00.0", 1),
        ("GPU-5d90ddf9-977a-5ea7-91f8-5d8031870dc2", "00000000:8C:00.0", 1),
        ("GPU-d9b00ba0-b918-5877-86f4-7941a16d08c7", "00000000:A7:00.0", 1),
        ("GPU-9bb64b44-5a23-535d-b3db-8bc954096df7", "00000000:A8:00.0", 1),
        ("GPU-55679baa-14dd-59fb-a561-e4d82e1068e9", "00000000:AB:00.0", 1),
        ("GPU-4cf14b11-3cfa-5c46-8223-28c63c285dc1", "00000000:AC:00.0", 1),
    ),
    # A full quad; two pairs and the link between them; a chain and a lone GPU; a ring; and a link of the first and last group.
    nvlink=NvLink(
        links=7,
        pairs="0-1:2 0-2:2 0-3:2 1-2:2 1-3:2 2-3:2 4-5:4 6-7:4 5-6:1 8-9:2 9-10:1 12-13:1 13-14:1 14-15:1 12-15:1 3-12:1",
    ),
    pcie=Pcie(
        switch=((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)),
        switches=((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)),
    ),
    dev=DEV,
)
