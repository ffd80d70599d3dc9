"""DGX A100 with four whole and four partitioned GPUs, among them parts of a GPU instance and media engines."""

from msgspec.structs import replace

from gpu_plugin.simulation.gpu_models import A100_SXM4_40GB, MIG_CAPABILITIES, placed
from gpu_plugin.simulation.profiles import dgx_a100

_GPUS = placed(
    A100_SXM4_40GB,
    ("GPU-25915dad-43a9-5022-9110-8434d74aec81", "00000000:07:00.0", 3),
    ("GPU-e19667b0-3d01-51f2-9e54-8a744749768b", "00000000:0F:00.0", 3),
    ("GPU-54f8ea1b-b305-54fe-a021-e366d79d58b0", "00000000:47:00.0", 1),
    ("GPU-49e3ccc8-6e5c-5cde-a2a8-9ec55fa9a853", "00000000:4E:00.0", 1),
    ("GPU-41b77e3d-0de4-5027-a8f7-08a6055d0806", "00000000:87:00.0", 7),
    ("GPU-0655ee9b-344b-52c9-93be-9902f497f09d", "00000000:90:00.0", 7),
    ("GPU-e83926e8-7b36-5cfb-948c-7d749789d385", "00000000:B7:00.0", 5),
    ("GPU-de69d340-2733-50e4-bfe7-2f7be5ad5722", "00000000:BD:00.0", 5),
)

_PARTITIONS = (
    ("1g.5gb",) * 7,
    ("3g.20gb", "3g.20gb"),
    ("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb+me"),
    ("1c.3g.20gb", "2c.3g.20gb", "3g.20gb"),
)

NODE = replace(
    dgx_a100.NODE,
    gpus=(*_GPUS[:4], *(replace(gpu, mig=mig) for gpu, mig in zip(_GPUS[4:], _PARTITIONS, strict=True))),
    dev=(*dgx_a100.NODE.dev, *MIG_CAPABILITIES),
)
