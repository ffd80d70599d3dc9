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
    """A MIG device: a compute instance, with the GPU instance that it is part or all of."""

    uuid: str
    index: int  # its MIG index on its GPU
    gpu_instance: int
    compute_instance: int
    profile: str  # NVIDIA's name of its size, such as 1g.10gb, 1g.10gb+me or 1c.3g.40gb
    whole: bool = True  # False if the compute instance is smaller than its GPU instance
    memory_bytes: int | None = None
    gpu_instance_cap: int | None = None  # N of /dev/nvidia-caps/nvidia-capN; None if the host does not report it
    compute_instance_cap: int | None = None  # the same
    gpu_slices: int | None = None  # size of the GPU instance, in sevenths of the GPU
    compute_slices: int | None = None  # size of the compute instance, in sevenths of the GPU
    engines: Engines | None = None


class Gpu(msgspec.Struct, frozen=True):
    """A GPU. A value is None if the part, the driver or the host does not report it."""

    uuid: str
    index: int
    minor: int | None = None
    pci_bus_id: str = ""
    model: str = ""
    architecture: int | None = None
    compute_capability: tuple[int, int] | None = None  # CUDA's, major and minor number
    memory_bytes: int | None = None
    mig_capable: bool = False
    mig_enabled: bool = False
    mig_devices: tuple[MigDevice, ...] = ()  # by index, and only read while `mig_enabled`
    mig_pending: bool | None = None  # the MIG mode after the next reset if it changes then
    numa_node: int | None = None
    thresholds: Thresholds = Thresholds()
    margins: Thresholds = Thresholds()  # limits relative to T.Limit
    remaps_rows: bool = False  # whether it remaps bad memory rows
    nvlinks: int = 0  # the number of its NVLinks, active or not
    nvswitch: bool = False  # whether its NVLinks lead to switches
    fields: frozenset[int] = frozenset()  # the field ids (`nvml_h.FI_*`) that the driver answered in the probe
    # Names of fields that the driver did not report in the probe for a passing reason, and that are read again.
    unsettled: frozenset[str] = frozenset()
    # Why the driver could not describe the GPU. Such a GPU is listed and never allocated. Its `uuid` is that of an earlier probe,
    # or a placeholder made of its index.
    unreadable: str | None = None


class Link(msgspec.Struct, frozen=True):
    """The connection of two GPUs, as far as it works now."""

    # Direct NVLinks between them or, if `switched`, NVLinks that both have to the NVSwitches of the same mesh.
    nvlinks: int = 0
    ancestor: int = 50  # closest common PCIe ancestor (`nvml_h.TopologyLevel`), also 50 if it could not be read
    switched: bool = False
    numa_distance: int | None = None  # of their NUMA nodes in the firmware's table (ACPI SLIT: 10 for the same node)


# Prefix of the name of an NVSwitch mesh of this node alone. Other meshes are named by their cluster of NVLink domains.
OWN_MESH = "nvswitch"

Pair = tuple[str, str]


class Node(msgspec.Struct, frozen=True):
    """The whole node as probed."""

    gpus: tuple[Gpu, ...] = ()
    links: Mapping[Pair, Link] = msgspec.field(default_factory=dict)  # every pair of uuids once, the lower first
    driver_version: str = ""
    device_nodes: frozenset[str] = frozenset()  # the existing paths under /dev
    # The NVSwitch mesh of a GPU by uuid: GPUs that reach each other through the same switches have the same name (`OWN_MESH`). A
    # GPU without a mesh has no entry.
    cliques: Mapping[str, str] = msgspec.field(default_factory=dict)
    cuda_version: tuple[int, int] | None = None  # the newest CUDA that the driver supports, major and minor number
    absent: tuple[Gpu, ...] = ()  # missing GPUs of the node (`absent.absent_gpus`)
    device_roots: Mapping[str, str] = {}  # the root on the host of each path that was not found below /

    def link(self, one: str, other: str) -> Link:
        """Return the link of two GPUs by uuid, in either order; the worst link if it is not known."""
        return self.links.get((one, other) if one < other else (other, one), Link())
