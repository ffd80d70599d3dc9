"""Device list strategies: the ways to name a container's devices to the runtime.

Each field of the answers is the same as in NVIDIA's plugin v0.20.0 (internal/plugin/server.go), with four differences. Three of
them make the answer for the same devices always the same: ids are in the order of the resource's list, no entry occurs twice, and
the annotation key is made from the ids instead of at random. The fourth is the read-only mount of the MPS pipe directory.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gpu_plugin.config.choices import DEVICE_LIST_STRATEGIES, Functions
from gpu_plugin.config.sharing import MPS
from gpu_plugin.containers.cdi_names import ALL, GPU, IMEX, qualified
from gpu_plugin.devices.device import Device
from gpu_plugin.devices.mps_paths import container_pipe_directory, pipe_directory, shm_directory


class Mount(msgspec.Struct, frozen=True):
    """A bind mount into the container."""

    container_path: str
    host_path: str
    read_only: bool = False


class DeviceSpec(msgspec.Struct, frozen=True):
    """A device node for the container; `permissions` is a subset of "rwm"."""

    container_path: str
    host_path: str
    permissions: str = "rw"


class ContainerEdits(msgspec.Struct):
    """The answer for one container. Each strategy adds entries to it. Mappings keep their order, and no entry occurs twice."""

    envs: dict[str, str] = msgspec.field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    devices: tuple[DeviceSpec, ...] = ()
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
VOLUME_ROOT = "/var/run/nvidia-container-devices"
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
"""Device nodes for every GPU container, in the order of NVIDIA's plugin. Nodes that do not exist are left out."""

REQUIRED_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")  # those without which no CUDA program starts

_NAMESPACE = uuid.UUID("6ba7b811-9dad-11d1-80b4-00c04fd430c8")  # RFC 9562's namespace for URLs


class MpsDirectories(msgspec.Struct, frozen=True):
    """The directories through which clients reach a resource's MPS daemon, the same as in NVIDIA's plugin (`mps_paths`)."""

    host_pipe: str
    host_shm: str
    pipe: str  # the path of `host_pipe` in a container

    @classmethod
    def of(cls, root: str, resource: str) -> "MpsDirectories":
        """Return the MPS directories of a resource, under the host's MPS root `root`."""
        return cls(pipe_directory(root, resource), shm_directory(root), container_pipe_directory(resource))


class Access(msgspec.Struct, frozen=True):
    """The settings and the node's device nodes that Allocate needs."""

    strategies: tuple[str, ...] = ("envvar",)
    id_strategy: str = "uuid"
    pass_device_specs: bool = False
    dev_root: str | None = None  # the host directory whose dev/ has all device nodes; None if each has its own
    device_roots: Mapping[str, str] = {}  # that directory for each device node; nodes under / may be missing here
    annotation_prefix: str = "cdi.k8s.io/"
    features: tuple[str, ...] = ()
    cdi_classes: tuple[str, ...] = ()
    imex_channels: tuple[int, ...] = ()
    control_nodes: tuple[str, ...] = ()
    required_nodes: tuple[str, ...] = ()  # the device nodes that every container must get
    mps: MpsDirectories | None = None

    @property
    def by_cdi(self) -> bool:
        """Whether the runtime gets the devices by CDI name."""
        return any(map(is_cdi, self.strategies))

    @property
    def missing_node(self) -> str:
        """Why no container can use a GPU: a required device node does not exist. Empty if all exist."""
        missing = next((path for path in self.required_nodes if path not in self.control_nodes), "")
        return missing and missing_node_reason(missing)

    @property
    def cdi_others(self) -> tuple[str, ...]:
        """Qualified names of the other CDI devices that every container with a GPU gets."""
        channels = [qualified(IMEX, str(channel)) for channel in self.imex_channels]
        return (*channels, *(qualified(device_class, ALL) for device_class in self.cdi_classes))

    def id_of(self, device: Device) -> str:
        """Return the name of a device for the runtime."""
        return device.visible_id if self.id_strategy == "uuid" else device.index


STRATEGIES: Functions[Callable[[ContainerEdits, tuple[str, ...], Access], None]] = Functions(
    "device list strategy",
    DEVICE_LIST_STRATEGIES,
    "DEVICE_LIST_STRATEGIES in gpu_plugin/config/choices.py",
    "gpu_plugin/containers/edits.py",
)
"""Device list strategies by name. Several strategies are applied in the order of DEVICE_LIST_STRATEGIES."""


def is_cdi(strategy: str) -> bool:
    """Whether a device list strategy names CDI devices."""
    return strategy.startswith("cdi-")


def imex_node(channel: int) -> str:
    """Return the device node of an IMEX channel."""
    return f"/dev/nvidia-caps-imex-channels/channel{channel}"


def missing_node_reason(path: str) -> str:
    """Say why no container can use a GPU of a node without this required device node, and how to make the node."""
    return (
        f"{path} does not exist on this node, or is not safe, and without it no CUDA program starts: run nvidia-modprobe -u -c0 "
        "there, and for the next boot name nvidia and nvidia-uvm in a file of /etc/modules-load.d"
    )


def container_edits(devices: Sequence[Device], access: Access) -> ContainerEdits:
    """Return the edits for a container that gets `devices`, which are in the order of their resource's list.

    Raises NoFunctionError for a strategy that is not implemented.
    """
    ids = tuple(dict.fromkeys(map(access.id_of, devices)))
    edits = ContainerEdits()
    if access.mps and any(device.shared == MPS for device in devices):
        edits.envs["CUDA_MPS_PIPE_DIRECTORY"] = access.mps.pipe
        # Clients can connect to the sockets and write to the FIFO also on a read-only mount. On a writable mount, root in a
        # container could replace them by links, and the MPS daemon runs as root on the node.
        pipe = Mount(access.mps.pipe, access.mps.host_pipe, read_only=True)
        edits.mounts = pipe, Mount("/dev/shm", access.mps.host_shm)  # noqa: S108
    for feature in access.features:
        edits.envs[f"NVIDIA_{feature.upper()}"] = "enabled"
    for name in DEVICE_LIST_STRATEGIES:
        if name in access.strategies:
            STRATEGIES[name](edits, ids, access)
    if access.pass_device_specs and not all(map(is_cdi, access.strategies)):
        edits.devices = _device_specs(devices, access)
    return edits


@STRATEGIES("envvar")
def _envvar(edits: ContainerEdits, ids: tuple[str, ...], access: Access) -> None:
    edits.envs[VISIBLE_DEVICES] = ",".join(ids)
    if access.imex_channels:
        edits.envs["NVIDIA_IMEX_CHANNELS"] = ",".join(map(str, access.imex_channels))


@STRATEGIES("volume-mounts")  # runs after envvar and replaces its variable
def _volume_mounts(edits: ContainerEdits, ids: tuple[str, ...], access: Access) -> None:
    edits.envs[VISIBLE_DEVICES] = VOLUME_ROOT
    names = [*ids, *(f"imex/{channel}" for channel in access.imex_channels)]
    edits.mounts += tuple(Mount(f"{VOLUME_ROOT}/{name}", "/dev/null") for name in names)


def _cdi_names(ids: tuple[str, ...], access: Access) -> tuple[str, ...]:
    return (*(qualified(GPU, identifier) for identifier in ids), *access.cdi_others)


@STRATEGIES("cdi-annotations")
def _cdi_annotations(edits: ContainerEdits, ids: tuple[str, ...], access: Access) -> None:
    names = ",".join(_cdi_names(ids, access))
    if not names:
        return  # a runtime would search for a device with an empty name
    key = f"{access.annotation_prefix}nvidia-device-plugin_{uuid.uuid5(_NAMESPACE, names)}"
    edits.annotations[key] = names


@STRATEGIES("cdi-cri")
def _cdi_cri(edits: ContainerEdits, ids: tuple[str, ...], access: Access) -> None:
    edits.cdi_devices += _cdi_names(ids, access)


def _device_specs(devices: Sequence[Device], access: Access) -> tuple[DeviceSpec, ...]:
    paths = [*access.control_nodes, *(node for device in devices for node in device.nodes)]
    paths += [imex_node(channel) for channel in access.imex_channels]
    return tuple(DeviceSpec(path, f"{_root_of(path, access)}{path}") for path in dict.fromkeys(paths))


def _root_of(path: str, access: Access) -> str:
    return access.device_roots.get(path, "") if access.dev_root is None else access.dev_root.rstrip("/")
