"""The profile of a simulated node: a built-in one, which is a module of `profiles`, or a YAML file.

A profile file has the common properties of all GPUs (`gpu`), properties by index (`gpus`), the links (`nvlink` or `nvswitch`,
`pcie`), the distances of NUMA nodes (`numa_distances`), and further paths under /dev (`dev`). `docs/simulated-node.yaml` shows
and describes all keys.
"""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.nvml_h import FabricState, FabricSummary, TopologyLevel
from gpu_plugin.runtime.regular_file import read_file
from gpu_plugin.simulation import topology
from gpu_plugin.simulation.mig import MigInstance, lay_out
from gpu_plugin.simulation.topology import Block, BusId, Count, Distance, NvLink, NvSwitch, Pcie

MAX_BYTES = 1024 * 1024  # Largest size of a profile file: 64 GPUs with a line for each value need a tenth of it

# A GPU without a written uuid always has uuid5(this, "<profile name>/<index>"). A MIG device has uuid5(this, "<its GPU's
# uuid>/<GPU instance>/<compute instance>/<MIG profile>").
_UUID_NAMESPACE = "6f0d1a52-9c1e-5d0e-8a3b-0f5f4f1f2c77"

_Celsius = Annotated[int, msgspec.Meta(ge=-40, le=200)]
_Mask = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]


class ThresholdsProfile(Block, frozen=True):
    """°C by nvmlTemperatureThresholds_t kind. None means NOT_SUPPORTED."""

    shutdown: _Celsius | None = None
    slowdown: _Celsius | None = None
    memory_max: _Celsius | None = None
    gpu_max: _Celsius | None = None


class FabricProfile(Block, frozen=True):
    """nvmlGpuFabricInfoV_t of a GPU that has joined its fabric, or (`state` 0) has no fabric."""

    state: Annotated[int, msgspec.Meta(ge=0, le=int(max(FabricState)))] = 0
    status: Count = 0
    health_mask: _Mask = 0
    summary: Annotated[int, msgspec.Meta(ge=0, le=int(max(FabricSummary)))] = 0
    # Uuid of the cluster of NVLink domains, without hyphens; empty if there is no cluster, as within one chassis
    cluster: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")] = ""
    clique: _Mask = 0  # Number of the group of GPUs in the cluster that reach each other


class GpuProfile(Block, frozen=True):
    """One GPU. None and False mean NOT_SUPPORTED. In a file all keys are optional: `gpu` and defaults are used instead."""

    name: str = ""
    uuid: Annotated[str, msgspec.Meta(pattern="^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")] = ""
    minor: Annotated[int, msgspec.Meta(ge=0, le=253)] = 0
    """N of /dev/nvidiaN; default: the index. 254 and 255 are the minors of nvidia-modeset and nvidiactl."""
    pci_bus_id: BusId = ""  # In NVML's form; default: 00000000:<0x10 + index>:00.0
    # nvmlDeviceArchitecture_t: 5 Volta, 6 Turing, 7 Ampere, 8 Ada, 9 Hopper, 10 Blackwell (nvml.h)
    architecture: int | None = None
    # CUDA's major and minor number; default: the value of the architecture's first GPU for data centers
    compute_capability: tuple[Count, Count] | None = None
    # Class code of the PCI device: 0x030200 a 3D controller, 0x030000 a VGA controller; None: the host does not report it
    pci_class: Count | None = 0x030200
    memory_bytes: Count | None = None
    mig_mode: tuple[Annotated[int, msgspec.Meta(ge=0, le=1)], Annotated[int, msgspec.Meta(ge=0, le=1)]] | None = None
    """(current, pending); 1 is enabled. None: the GPU model has no MIG."""
    mig: tuple[str, ...] | None = None
    """The MIG devices into which it is partitioned, such as [3g.20gb, 1c.3g.20gb]; None: no devices, `mig_mode` counts."""
    mig_profiles: Literal["a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb"] | None = None
    """The model whose table of MIG profiles it uses (`simulation/mig.py`). Without it, the GPU cannot be partitioned."""
    numa_node: Annotated[int, msgspec.Meta(ge=-1)] = -1  # sysfs numa_node of the PCI device: -1 is unknown
    memory_affinity: tuple[Count, ...] | None = None  # NUMA nodes of nvmlDeviceGetMemoryAffinity with node scope
    thresholds: ThresholdsProfile = ThresholdsProfile()
    event_types: _Mask | None = None  # Mask of nvmlDeviceGetSupportedEventTypes; None: too old for events
    fields: dict[Count, int] = msgspec.field(default_factory=dict)
    """Values by field id (NVML_FI_*); the value of a link's field is for all NVLinks. Other ids are refused.

    Fields with the values of functions, such as energy (83) or pending row remaps (144), follow the functions instead.
    """
    margin: _Celsius | None = None  # nvmlDeviceGetMarginTemperature at the idle temperature, °C
    ecc: bool = False  # Whether it counts memory errors (nvmlDeviceGetTotalEccErrors)
    sram_status: bool = False  # nvmlDeviceGetSramEccErrorStatus
    row_remapping: bool = False  # nvmlDeviceGetRemappedRows: Ampere and later, except while it has MIG devices
    page_retirement: bool = False  # nvmlDeviceGetRetiredPagesPendingStatus: GPU models that do not remap rows
    unrepairable_memory: bool = False  # nvmlDeviceGetUnrepairableMemoryFlag_v1
    clocks_event_reasons: _Mask | None = None  # nvmlDeviceGetCurrentClocksEventReasons of an idle GPU
    fabric: FabricProfile | None = None  # nvmlDeviceGetGpuFabricInfoV: Hopper and later
    # Lanes of its PCIe link, all in use; None: no value of the link is supported, including its replays
    pcie_width: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    vgpu_licensed: bool | None = None  # Whether a vGPU has its license; None: it is not a vGPU
    idle_temperature: _Celsius = 30
    limit_watts: Annotated[int, msgspec.Meta(ge=1, le=5000)] = 400  # The power limit in force, from its data sheet
    # Growth of the energy counter. Not measured, since only the fact that it grows is used.
    idle_watts: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 60


class NodeDescription(Block, frozen=True):
    """A node with all of its GPUs. A GPU without a uuid gets a uuid by the node's name and the GPU's index."""

    driver_version: str = "580.159.04"
    cuda_version: tuple[Count, Count] = (13, 0)  # The newest version that the driver supports
    machine: str = "Simulated Node"  # The firmware's name of the machine
    # nvmlReturn_t with which opening the driver fails; None: it can be opened
    init_error: Annotated[int, msgspec.Meta(ge=1, le=999)] | None = None
    gpus: Annotated[tuple[GpuProfile, ...], msgspec.Meta(max_length=64)] = ()
    nvlink: NvLink | None = None
    nvswitch: NvSwitch | None = None
    pcie: Pcie = Pcie()
    # Distances by NUMA node to all nodes, in the order of their numbers: {0: [10, 21], 1: [21, 10]}
    numa_distances: dict[Count, tuple[Distance, ...]] = msgspec.field(default_factory=dict)
    dev: tuple[Annotated[str, msgspec.Meta(pattern=r"^/dev(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+$")], ...] = ()


class _File(NodeDescription, frozen=True):
    """A profile file as a whole: in addition, the properties that all GPUs have in common."""

    name: str = ""
    about: str = ""
    count: Annotated[int, msgspec.Meta(ge=0, le=64)] | None = None
    gpu: GpuProfile = GpuProfile()


class Profile(msgspec.Struct, frozen=True):
    """The unchanging properties of a simulated node.

    `remotes[gpu]` is the PCI bus id at the far end of each of that GPU's NVLinks by link number, None for a link that leads
    nowhere; empty for a GPU without NVLink. `ancestors` has the nvmlGpuTopologyLevel_t of each pair, the lower index first;
    `pci_paths[gpu]` is its path in sysfs, and `numa_distances` has all ordered pairs of NUMA nodes. `device_nodes` are all
    paths under /dev, including the GPUs' own, except those of MIG devices, which change.
    """

    name: str
    driver_version: str
    cuda_version: tuple[int, int]
    machine: str
    gpus: tuple[GpuProfile, ...]
    remotes: tuple[tuple[str | None, ...], ...]
    ancestors: dict[tuple[int, int], int]
    pci_paths: tuple[str, ...]
    numa_distances: dict[tuple[int, int], int]
    device_nodes: frozenset[str]
    init_error: int | None = None

    def at(self, bus_id: str) -> int | None:
        """Return the index of the GPU at a bus id in NVML's (00000000:1B:00.0) or sysfs' form (0000:1b:00.0), or None."""
        domain, _, rest = bus_id.partition(":")
        wanted = f"{domain:0>8}:{rest}".upper()
        return next((index for index, gpu in enumerate(self.gpus) if gpu.pci_bus_id == wanted), None)

    def ancestor(self, one: int, other: int) -> int:
        """Return the closest common ancestor of two GPUs by index; INTERNAL if both are the same GPU."""
        return TopologyLevel.INTERNAL if one == other else self.ancestors[min(one, other), max(one, other)]


def names() -> list[str]:
    """Return the names of the built-in profiles."""
    return sorted(file.stem.replace("_", "-") for file in (Path(__file__).parent / "profiles").glob("[a-z]*.py"))


def load(name_or_path: str) -> Profile:
    """Load the built-in profile with this name, or a file (a text with `/` or ending in .yaml, .yml or .json, or a file).

    Raises:
        ConfigError: there is no such profile, or the file has a fault; the text has the file and the path in it.
    """
    known = names()
    if name_or_path in known:
        module = import_module(f"gpu_plugin.simulation.profiles.{name_or_path.replace('-', '_')}")
        return _built(name_or_path, module.NODE)
    path = Path(name_or_path)
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml", ".json")) or path.is_file():
        return _read(path)
    import difflib  # noqa: PLC0415 - only needed for this error

    close = difflib.get_close_matches(name_or_path, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"no simulated node is called {name_or_path!r}.{hint} There are: {', '.join(known)}; or name a file."
    )


def mig_uuid(gpu_uuid: str, instance: MigInstance) -> str:
    """Return the uuid of a MIG device, which is the same whenever the same instance of the same GPU is made."""
    return _uuid("MIG", f"{gpu_uuid}/{instance.gpu_instance}/{instance.compute_instance}/{instance.profile}")


def parse(content: object, default_name: str = "node") -> Profile:
    """Make a profile from plain objects of YAML or JSON.

    Raises:
        ConfigError: a fault, in the form `$.gpus[3].minor: what is wrong`.
    """
    try:
        file = msgspec.convert(content, _File, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_located(str(error))) from None
    assert isinstance(content, dict)
    return _built(file.name or default_name, msgspec.structs.replace(file, gpus=_gpus(file, content)))


def _built(name: str, node: NodeDescription) -> Profile:
    """Make the profile of a node. Raises ConfigError as `parse`."""
    gpus = tuple(_complete(name, index, gpu) for index, gpu in enumerate(node.gpus))
    for key in ("uuid", "minor", "pci_bus_id"):
        seen: dict[object, int] = {}
        for index, gpu in enumerate(gpus):
            if (first := seen.setdefault(getattr(gpu, key), index)) != index:
                raise ConfigError(f"$.gpus[{index}].{key}: {getattr(gpu, key)} is GPU {first}'s already")
    buses, numa_nodes = [gpu.pci_bus_id for gpu in gpus], [gpu.numa_node for gpu in gpus]
    return Profile(
        name=name,
        driver_version=node.driver_version,
        cuda_version=node.cuda_version,
        machine=node.machine,
        gpus=gpus,
        remotes=topology.remotes(node.nvlink, node.nvswitch, buses),
        ancestors=topology.ancestors(node.pcie, numa_nodes),
        pci_paths=topology.pci_paths(node.pcie, buses),
        numa_distances=topology.numa_distances(node.numa_distances, numa_nodes),
        device_nodes=frozenset(node.dev) | {f"/dev/nvidia{gpu.minor}" for gpu in gpus},
        init_error=node.init_error,
    )


def _complete(name: str, index: int, gpu: GpuProfile) -> GpuProfile:
    """Return a GPU with a uuid, and in MIG mode if it is partitioned, after checking that its MIG devices fit."""
    if not gpu.name:
        raise ConfigError(f"$.gpus[{index}].name: missing here and in $.gpu: the model, such as NVIDIA H200")
    if not gpu.uuid:
        gpu = msgspec.structs.replace(gpu, uuid=_uuid("GPU", f"{name}/{index}"))
    if gpu.mig is None:
        return gpu
    if gpu.mig_profiles is None:
        raise ConfigError(
            f"$.gpus[{index}].mig_profiles: missing here and in $.gpu: of which model its MIG profiles are"
        )
    try:
        lay_out(gpu.mig_profiles, gpu.mig)
    except ConfigError as error:
        raise ConfigError(f"$.gpus[{index}].mig: {error}") from None
    return msgspec.structs.replace(gpu, mig_mode=(1, 1))


def _read(path: Path) -> Profile:
    import yaml  # noqa: PLC0415 - 9 ms, only needed for a file

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = read_file(path, MAX_BYTES).decode()
        content = yaml.load(text, Loader=loader)  # noqa: S506 - both loaders are the safe kind
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{path}: {where}{error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    try:
        return parse(content, path.stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _located(text: str) -> str:
    """Return msgspec's sentence with the path in front and without back-ticks."""
    text, _, path = text.partition(" - at ")
    path = path.replace("`", "").removeprefix("key in ") or "$"
    prefix, unknown, field = text.partition("Object contains unknown field ")
    if unknown and not prefix:
        return f"{path}.{field.strip('`')}: unknown key"
    return f"{path}: {text[:1].lower()}{text[1:].replace('`', '')}"


def _gpus(file: _File, content: dict[str, Any]) -> tuple[GpuProfile, ...]:
    """Return the GPUs with values of the GPU in the file, else of all GPUs, else derived from the index."""
    count = len(file.gpus) or None if file.count is None else file.count
    if count is None:
        raise ConfigError("$.count: missing: how many GPUs the node has")
    if len(file.gpus) > count:
        raise ConfigError(f"$.gpus: describes {len(file.gpus)} GPUs, but count is {count}")
    own = [*content.get("gpus", []), *[{}] * (count - len(file.gpus))]
    gpus = []
    for index in range(count):
        derived = {"minor": index, "pci_bus_id": f"00000000:{0x10 + index:02X}:00.0"}
        gpus.append(msgspec.convert(derived | content.get("gpu", {}) | own[index], GpuProfile, str_keys=True))
    return tuple(gpus)


def _uuid(kind: str, name: str) -> str:
    import uuid  # noqa: PLC0415 - 7 ms, only needed for a simulated node

    return f"{kind}-{uuid.uuid5(uuid.UUID(_UUID_NAMESPACE), name)}"
