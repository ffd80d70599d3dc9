"""What a probe of the hardware found: the node's GPUs and how they are linked. Immutable."""

from collections.abc import Mapping

import msgspec


class Thresholds(msgspec.Struct, frozen=True):
    """A GPU's own temperature limits, °C; None where the part does not say."""

    shutdown: int | None = None
    slowdown: int | None = None
    memory_max: int | None = None
    gpu_max: int | None = None


class Engines(msgspec.Struct, frozen=True):
    """How many multiprocessors a MIG device has, and how many engines its GPU instance has of each kind."""

    multiprocessors: int = 0
    copy: int = 0
    decoder: int = 0
    encoder: int = 0
    jpeg: int = 0
    ofa: int = 0


class MigDevice(msgspec.Struct, frozen=True):
    """A MIG device: a compute instance, with the GPU instance that it is part or all of.

    `index` is its MIG index on its GPU; `profile` is NVIDIA's word for its size, such as 1g.10gb, 1g.10gb+me or 1c.3g.40gb;
    `whole` is False where the compute instance is smaller than its GPU instance. `gpu_instance_cap` and
    `compute_instance_cap` are N of /dev/nvidia-caps/nvidia-capN; None where the host does not say. `gpu_slices` and
    `compute_slices` are the sizes of its instances, in sevenths of the GPU.
    """

    uuid: str
    index: int
    gpu_instance: int
    compute_instance: int
    profile: str
    whole: bool = True
    memory_bytes: int | None = None
    gpu_instance_cap: int | None = None
    compute_instance_cap: int | None = None
    gpu_slices: int | None = None
    compute_slices: int | None = None
    engines: Engines | None = None


class Gpu(msgspec.Struct, frozen=True):
    """One piece of hardware. None means that the part, the driver or the host does not say.

    `nvlinks` is how many NVLinks it has, active or not; `fields` are the ids (`nvml_h.FI_*`) that its probe found answered.
    `unreadable` is why the driver could not describe it: such a GPU is listed and never handed out. Its `uuid` is then
    the one remembered from an earlier probe, or a placeholder made of its index. `margins` are its limits relative to
    T.Limit; `remaps_rows` is whether it remaps bad memory rows, `nvswitch` whether its NVLinks lead to switches.
    `mig_devices` are in the order of their index, and only looked at while `mig_enabled`; `mig_capable` is whether it could be
    partitioned, `mig_pending` the MIG mode after its next reset if that is another than now. `compute_capability` is CUDA's,
    major and minor number. `unsettled` names what the driver did not tell for the moment when it was probed, by the names of
    the fields here: it is asked again.
    """

    uuid: str
    index: int
    minor: int | None = None
    pci_bus_id: str = ""
    model: str = ""
    architecture: int | None = None
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    mig_capable: bool = False
    mig_enabled: bool = False
    mig_devices: tuple[MigDevice, ...] = ()
    mig_pending: bool | None = None
    numa_node: int | None = None
    thresholds: Thresholds = Thresholds()
    margins: Thresholds = Thresholds()
    remaps_rows: bool = False
    nvlinks: int = 0
    nvswitch: bool = False
    fields: frozenset[int] = frozenset()
    unsettled: frozenset[str] = frozenset()
    unreadable: str | None = None


class Link(msgspec.Struct, frozen=True):
    """The connection of two GPUs, as far as it works now.

    `nvlinks` is the number of NVLinks between them: direct ones or, where `switched`, those that both have to the NVSwitches
    of one mesh. `ancestor` is nvmlGpuTopologyLevel_t, the closest common PCIe ancestor: 0 one board, 10 one switch, 20 several
    switches, 30 one host bridge, 40 one NUMA node, 50 different ones; what could not be read is the worst. `numa_distance` is
    that of their NUMA nodes as firmware tells it (ACPI SLIT: 10 is one and the same); None where it is not known.
    """

    nvlinks: int = 0
    ancestor: int = 50
    switched: bool = False
    numa_distance: int | None = None


OWN_MESH = "nvswitch"
"""How the name of an NVSwitch mesh begins that is the node's own; others go by their cluster of NVLink domains."""

Pair = tuple[str, str]


class Node(msgspec.Struct, frozen=True):
    """The whole node as probed. `links` has every pair of uuids once, the lower first.

    `cliques` has, by uuid, the NVSwitch mesh that a GPU is part of: one word for all GPUs that reach each other through the
    same switches (`OWN_MESH`); no entry for a GPU that is in none. `device_nodes` are the paths under /dev that exist there,
    and `device_roots` has the root on the host of each that was not found below /.
    `cuda_version` is the newest CUDA that the driver is good for, major and minor number. `absent` are GPUs that the node should
    have (`absent.absent_gpus`).
    """

    gpus: tuple[Gpu, ...] = ()
    links: Mapping[Pair, Link] = msgspec.field(default_factory=dict)
    driver_version: str = ""
    device_nodes: frozenset[str] = frozenset()
    cliques: Mapping[str, str] = msgspec.field(default_factory=dict)
    cuda_version: tuple[int, int] | None = None
    absent: tuple[Gpu, ...] = ()
    device_roots: Mapping[str, str] = {}

    def link(self, one: str, other: str) -> Link:
        """The link of two GPUs by uuid, in either order; the worst there is where nothing is known."""
        return self.links.get((one, other) if one < other else (other, one), Link())
