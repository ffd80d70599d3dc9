"""The result of a probe of the hardware: the node's GPUs and their links. Immutable."""

from collections.abc import Mapping

import msgspec


class Thresholds(msgspec.Struct, frozen=True):
    """A GPU's own temperature limits in °C; None if the part does not report one."""

    shutdown: int | None = None
    slowdown: int | None = None
    memory_max: int | None = None
    gpu_max: int | None = None


class Engines(msgspec.Struct, frozen=True):
    """The number of multiprocessors of a MIG device, and of each kind of engine of its GPU instance."""

    multiprocessors: int = 0
    copy: int = 0
    decoder: int = 0
    encoder: int = 0
    jpeg: int = 0
    ofa: int = 0


class MigDevice(msgspec.Struct, frozen=True):
    """A MIG device: a compute instance, with the GPU instance that it is part or all of.

    `index` is its MIG index on its GPU. `profile` is NVIDIA's name of its size, such as 1g.10gb, 1g.10gb+me or 1c.3g.40gb.
    `whole` is False if the compute instance is smaller than its GPU instance. `gpu_instance_cap` and `compute_instance_cap` are
    N of /dev/nvidia-caps/nvidia-capN, None if the host does not report it. `gpu_slices` and `compute_slices` are the sizes of
    its instances, in sevenths of the GPU.
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
    """A GPU. A value is None if the part, the driver or the host does not report it.

    `nvlinks` is the number of its NVLinks, active or not. `fields` are the field ids (`nvml_h.FI_*`) that the driver answered
    in the probe. `unreadable` is the reason why the driver could not describe the GPU. Such a GPU is listed and never
    allocated; its `uuid` is then that of an earlier probe, or a placeholder made of its index. `margins` are its limits
    relative to T.Limit. `remaps_rows` is whether it remaps bad memory rows, `nvswitch` whether its NVLinks lead to switches.
    `mig_devices` are in the order of their index, and only read while `mig_enabled`. `mig_capable` is whether the GPU supports
    MIG, `mig_pending` the MIG mode after its next reset if it changes then. `compute_capability` is CUDA's, major and minor
    number. `unsettled` has the names of fields that the driver did not report in the probe for a passing reason, and that are
    read again.
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

    `nvlinks` is the number of direct NVLinks between them or, if `switched`, of NVLinks that both have to the NVSwitches of the
    same mesh. `ancestor` is nvmlGpuTopologyLevel_t, the closest common PCIe ancestor: 0 one board, 10 one switch, 20 several
    switches, 30 one host bridge, 40 one NUMA node, 50 different NUMA nodes, also if it could not be read. `numa_distance` is
    the distance of their NUMA nodes in the firmware's table (ACPI SLIT: 10 for the same node), None if it is not known.
    """

    nvlinks: int = 0
    ancestor: int = 50
    switched: bool = False
    numa_distance: int | None = None


OWN_MESH = "nvswitch"
"""Prefix of the name of an NVSwitch mesh of this node alone. Other meshes are named by their cluster of NVLink domains."""

Pair = tuple[str, str]


class Node(msgspec.Struct, frozen=True):
    """The whole node as probed. `links` has every pair of uuids once, the lower first.

    `cliques` has the NVSwitch mesh of a GPU by uuid: all GPUs that reach each other through the same switches have the same
    name (`OWN_MESH`), and a GPU without a mesh has no entry. `device_nodes` are the existing paths under /dev, and
    `device_roots` has the root on the host of each path that was not found below /. `cuda_version` is the newest CUDA that the
    driver supports, major and minor number. `absent` are missing GPUs of the node (`absent.absent_gpus`).
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
        """Return the link of two GPUs by uuid, in either order; the worst link if it is not known."""
        return self.links.get((one, other) if one < other else (other, one), Link())
