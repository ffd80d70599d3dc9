"""Nodes and the labels that GPU Feature Discovery gave them, as data.

Those under LISTED are of real nodes, as their owners published them (kubectl get node), less what other programs wrote; those
under RULES are the cases of GPU Feature Discovery's own tests (internal/lm, v0.20.0) on made-up hardware. Names are without
their "nvidia.com/".
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpu_plugin.cluster.labels.values import HostFacts, VgpuHost
from gpu_plugin.config.sharing import MPS, SharedResource
from gpu_plugin.devices.node import Engines, Gpu, MigDevice, Node

GRAPHICS, COMPUTE = 0x030000, 0x030200


@dataclass(frozen=True)
class Case:
    """A node, the settings that differ from the defaults, and its labels, or some of them where `some`."""

    name: str
    node: Node
    labels: dict[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    host: HostFacts = field(default_factory=HostFacts)
    some: bool = False


def labels(text: str) -> dict[str, str]:
    """The labels of a text with words key=value."""
    return dict(word.split("=") for word in text.split())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def gpus(count: int, model: str, mib: int, capability: tuple[int, int], **more: Any) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            f"GPU-{model}-{at}",
            at,
            pci_bus_id=f"00000000:{at:02X}:00.0",
            model=model,
            memory_bytes=(mib << 20) + 12345,  # never whole MiB
            compute_capability=capability,
            **more,
        )
        for at in range(count)
    )


def host(machine: str | None, kind: int, vgpu: VgpuHost | None = None) -> HostFacts:
    return HostFacts(machine, {f"00000000:{at:02X}:00.0": kind for at in range(16)}, vgpu)


def time_sliced(name: str, replicas: int, offered_as: str = "") -> SharedResource:
    return SharedResource(f"nvidia.com/{name}", f"nvidia.com/{offered_as or name}", replicas)


HALVES = tuple(MigDevice(f"MIG-{at}", at, at + 1, 0, "2g.12gb", gpu_slices=2, compute_slices=2) for at in range(2))
CLIQUE = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1"
SINGLE, MIXED = {"mig_strategy": "single"}, {"mig_strategy": "mixed"}

LISTED = (
    Case(
        "four L4 of a cloud's machine",
        Node(gpus(4, "NVIDIA L4", 23034, (8, 9)), driver_version="570.148.08", cuda_version=(12, 8)),
        labels("""
            cuda.driver-version.full=570.148.08 cuda.driver-version.major=570 cuda.driver-version.minor=148
            cuda.driver-version.revision=08 cuda.driver.major=570 cuda.driver.minor=148 cuda.driver.rev=08
            cuda.runtime-version.full=12.8 cuda.runtime-version.major=12 cuda.runtime-version.minor=8
            cuda.runtime.major=12 cuda.runtime.minor=8 gpu.compute.major=8 gpu.compute.minor=9 gpu.count=4
            gpu.family=ada-lovelace gpu.machine=g6.12xlarge gpu.memory=23034 gpu.mode=compute gpu.present=true
            gpu.product=NVIDIA-L4 gpu.replicas=1 gpu.sharing-strategy=none mig.capable=false mig.strategy=single
            mps.capable=false vgpu.present=false
        """),
        SINGLE,
        host("g6.12xlarge", COMPUTE),
    ),
    Case(
        "an H100 that could be cut, in a virtual machine",
        Node(gpus(1, "NVIDIA H100 PCIe", 81559, (9, 0), mig_capable=True), driver_version="550.90.07"),
        labels("""
            gpu.compute.major=9 gpu.compute.minor=0 gpu.count=1 gpu.family=hopper gpu.machine=Standard-PC-Q35-ICH9-2009
            gpu.memory=81559 gpu.mode=compute gpu.product=NVIDIA-H100-PCIe gpu.replicas=1 gpu.sharing-strategy=none
            mig.capable=true mig.strategy=single mps.capable=false vgpu.present=false
        """),
        SINGLE,
        host("Standard PC (Q35 + ICH9, 2009)", COMPUTE),
        some=True,
    ),
    Case(
        "a vGPU",
        Node(gpus(1, "GRID A100-40C", 40960, (8, 0)), driver_version="580.126.09", cuda_version=(13, 0)),
        labels("""
            cuda.driver-version.revision=09 cuda.runtime-version.full=13.0 gpu.machine=VMware201 gpu.memory=40960
            gpu.product=GRID-A100-40C vgpu.host-driver-branch=r582_12 vgpu.host-driver-version=580.126.08 vgpu.present=true
        """),
        SINGLE,
        host("VMware20,1", COMPUTE, VgpuHost("580.126.08", "r582_12")),
        some=True,
    ),
    Case(
        "a desktop's GPU, time-sliced",
        Node(gpus(1, "NVIDIA GeForce GTX 1660 Ti", 6144, (7, 5))),
        labels("""
            gpu.count=1 gpu.family=turing gpu.machine=B560M-AORUS-PRO gpu.mode=graphics
            gpu.product=NVIDIA-GeForce-GTX-1660-Ti-SHARED gpu.replicas=6 gpu.sharing-strategy=time-slicing mps.capable=false
        """),
        {"sharing": (time_sliced("gpu", 6),)},
        host("B560M AORUS PRO", GRAPHICS),
        some=True,
    ),
    Case(
        "eight V100",
        Node(gpus(8, "Tesla V100-SXM2-16GB", 16384, (7, 0))),
        labels("gpu.count=8 gpu.family=volta gpu.memory=16384 gpu.product=Tesla-V100-SXM2-16GB"),
        some=True,
    ),
    Case(
        "an A30 in two halves",
        Node(gpus(1, "NVIDIA A30", 24576, (8, 0), mig_capable=True, mig_enabled=True, mig_devices=HALVES)),
        labels("""
            gpu.count=2 gpu.slices.ci=2 gpu.slices.gi=2 gpu.product=NVIDIA-A30-MIG-2g.12gb gpu.replicas=1
            mig.capable=true mig.strategy=single
        """),
        SINGLE,
        some=True,
    ),
    Case(
        "a tray of a GB200 NVL72",
        Node(
            gpus(4, "NVIDIA GB200", 189471, (10, 0), mig_capable=True),
            cliques={f"GPU-NVIDIA GB200-{at}": CLIQUE for at in range(4)},
        ),
        labels(f"gpu.clique={CLIQUE} gpu.family=blackwell gpu.memory=189471 gpu.product=NVIDIA-GB200"),
        some=True,
    ),
)

MODEL = "MOCKMODEL"
NO_ENGINES = Engines()


def whole(at: int = 0, model: str = MODEL) -> Gpu:
    return Gpu(f"GPU-{at}", at, model=model, memory_bytes=300 << 20, compute_capability=(8, 0))


def cut(at: int, *slices: tuple[int, int], model: str = MODEL, engines: Engines = NO_ENGINES) -> Gpu:
    """A GPU in MIG mode, with devices of these slices of GPU and compute instance, each of 100 MiB."""
    devices = tuple(
        MigDevice(
            f"MIG-{at}-{number}",
            number,
            number,
            0,
            f"{gpu}g.100gb",
            gpu == compute,
            100 << 20,
            gpu_slices=gpu,
            compute_slices=compute,
            engines=engines,
        )
        for number, (gpu, compute) in enumerate(slices)
    )
    return replace(whole(at, model), mig_capable=True, mig_enabled=True, mig_devices=devices)


ARCHITECTURE = labels("gpu.compute.major=8 gpu.compute.minor=0 gpu.family=ampere")
ONE = ARCHITECTURE | labels(
    f"gpu.count=1 gpu.replicas=1 gpu.sharing-strategy=none gpu.memory=300 gpu.product={MODEL}",
)
SLICED = labels(
    "memory=100 multiprocessors=0 slices.gi=1 slices.ci=2 "
    "engines.copy=0 engines.decoder=0 engines.encoder=0 engines.jpeg=0 engines.ofa=0"
)
INVALID = ARCHITECTURE | labels(
    f"gpu.count=0 gpu.replicas=0 gpu.memory=0 gpu.product={MODEL}-MIG-INVALID gpu.sharing-strategy= "
    "mig.strategy=single mig.capable=true"
)
SHARED = labels("gpu.replicas=2 gpu.sharing-strategy=time-slicing")
AS_SHARED = SHARED | {"gpu.product": f"{MODEL}-SHARED"}
CUT = {"mig.capable": "true"}
TWICE = {"sharing": (time_sliced("gpu", 2),)}
RENAMED = {"sharing": (time_sliced("gpu", 2, "gpu.shared"),)}
BY_MPS = {"sharing": (SharedResource("nvidia.com/gpu", "nvidia.com/gpu", 4, MPS),)}
ENGINES = Engines(12, 13, 14, 15, 16, 17)


def of_mig(name: str, text: str = "") -> dict[str, str]:
    base = labels(f"count=1 replicas=1 sharing-strategy=none product={MODEL}-MIG-1g.100gb {text}")
    return {f"{name}.{key}": value for key, value in {**SLICED, **base}.items()}


RULES = (
    Case("one GPU", Node((whole(),)), ONE),
    Case("one GPU shared", Node((whole(),)), ONE | AS_SHARED, TWICE),
    Case("two GPUs shared", Node((whole(0), whole(1))), ONE | AS_SHARED | {"gpu.count": "2"}, TWICE),
    Case("what is shared is not there", Node((whole(),)), ONE, {"sharing": (time_sliced("not-gpu", 2),)}),
    Case("shared under another name", Node((whole(),)), ONE | SHARED, RENAMED),
    Case("a GPU in MIG mode is not shared", Node((cut(0),)), ONE | CUT | {"gpu.replicas": "0"}, TWICE),
    Case(
        "of two GPUs in MIG mode both count",
        Node((cut(0), cut(1))),
        ONE | CUT | labels("gpu.count=2 gpu.replicas=0"),
        TWICE,
    ),
    Case(
        "one GPU in MIG mode and one not",
        Node((cut(0), whole(1))),
        ONE | AS_SHARED | CUT | {"gpu.count": "2"},
        TWICE,
    ),
    Case("single without MIG", Node((whole(),)), ONE | {"mig.strategy": "single"}, SINGLE),
    Case(
        "single, one device",
        Node((cut(0, (1, 2)),)),
        ONE | of_mig("gpu") | CUT | {"mig.strategy": "single"},
        SINGLE,
    ),
    Case(
        "single, a device of each of two GPUs",
        Node((cut(0, (1, 2), engines=ENGINES), cut(1, (1, 2)))),
        ONE
        | CUT
        | of_mig("gpu", "count=2 multiprocessors=12")
        | labels(
            "gpu.engines.copy=13 gpu.engines.decoder=14 gpu.engines.encoder=15 gpu.engines.jpeg=16 gpu.engines.ofa=17"
        )
        | {"mig.strategy": "single"},
        SINGLE,
    ),
    Case(
        "single, shared",
        Node((cut(0, (1, 2)),)),
        ONE
        | of_mig("gpu", f"replicas=2 sharing-strategy=time-slicing product={MODEL}-MIG-1g.100gb-SHARED")
        | {"mig.strategy": "single"},
        {**SINGLE, **TWICE},
        some=True,
    ),
    Case(
        "single, shared under another name",
        Node((cut(0, (1, 2)),)),
        of_mig("gpu", "replicas=2 sharing-strategy=time-slicing"),
        {**SINGLE, **RENAMED},
        some=True,
    ),
    Case("single, cut into nothing", Node((cut(0),)), INVALID, SINGLE),
    Case("single, one cut and one cut into nothing", Node((cut(0, (1, 2)), cut(1))), INVALID, SINGLE),
    Case("single, two sizes", Node((cut(0, (1, 2), (3, 4)),)), INVALID, SINGLE),
    Case("single, one not cut", Node((cut(0, (1, 2)), whole(1))), INVALID, SINGLE),
    Case("single, one not cut and one cut into nothing", Node((cut(0, (1, 2)), whole(1), cut(2))), INVALID, SINGLE),
    Case(
        "single, one not cut and the whole ones shared", Node((cut(0, (1, 2)), whole(1))), INVALID, {**SINGLE, **TWICE}
    ),
    Case("mixed without MIG", Node((whole(),)), ONE | {"mig.strategy": "mixed"}, MIXED),
    Case(
        "mixed, two sizes beside a whole GPU",
        Node((cut(0, (1, 2), (3, 3), (3, 3)), whole(1))),
        ONE
        | CUT
        | of_mig("mig-1g.100gb")
        | of_mig("mig-3g.100gb", f"slices.gi=3 slices.ci=3 count=2 product={MODEL}-MIG-3g.100gb")
        | labels("gpu.count=2 mig.strategy=mixed"),
        MIXED,
    ),
    Case(
        "mixed, a size shared",
        Node((cut(0, (1, 2)),)),
        of_mig("mig-1g.100gb", f"replicas=2 sharing-strategy=time-slicing product={MODEL}-MIG-1g.100gb-SHARED"),
        {**MIXED, "sharing": (time_sliced("gpu", 2, "gpu.shared"), time_sliced("mig-1g.100gb", 2))},
        some=True,
    ),
    Case(
        "MPS",
        Node((whole(),)),
        ONE | labels(f"gpu.replicas=4 gpu.sharing-strategy=mps gpu.product={MODEL}-SHARED mps.capable=true"),
        BY_MPS,
    ),
)
