"""Devices and resources: what the kubelet counts, by which id, and the name it counts them under. Immutable."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.names import DOMAIN
from gpu_plugin.config.sharing import MpsLimits, SharedResource
from gpu_plugin.config.words import shortened
from gpu_plugin.devices.node import Gpu, MigDevice

GPU = "gpu"
MIG = "mig"

WSL_GPUS = "all"
"""What NVIDIA's plugin calls all GPUs of a Windows host together, as its Linux guests see them (0.19.1 and later)."""

TEGRA_GPU = "tegra"
"""What NVIDIA's plugin calls the GPU of a Tegra chip (internal/rm/tegra_devices.go)."""

OWN_NAMES = frozenset({WSL_GPUS, TEGRA_GPU})
"""Names in place of the uuid, for GPUs that have none."""

MAX_DEVICE_ID = 63
"""Longest device id the API's own comment allows (k8s.io/kubelet, deviceplugin/v1beta1, Device.ID)."""

MAX_LIST_BYTES = 4 * 1024 * 1024
"""The longest message that the kubelet's gRPC client reads (grpc-go, defaultClientMaxReceiveMessageSize)."""

PLACEHOLDER = "GPU-unreadable-"
"""Begins the made-up uuid of a GPU whose own is not known yet. Such a device is never healthy, so no pod can hold it."""

MAX_NUMA_NODE = 2**31 - 1
"""The highest number that a NUMA node can have: the kernel counts them in an int."""

_MAX_SHOWN_ID = 80  # characters of an id that cannot be listed

_MAX_SHOWN = 4  # items of a list that may be long

_OWN_NODES = {WSL_GPUS: ("/dev/dxg",)}


# Tens of thousands may exist, and none refers to itself: Python's search for cycles (13 ms for 5,000) leaves them out.
class Device(msgspec.Struct, frozen=True, gc=False):
    """One device of a resource, as the kubelet knows it.

    `id` is at most 63 characters and never changes its meaning; `visible_id` is what a container is told to see: the uuid of
    the GPU or MIG device; `index` its NVML index as text ("0", or "0:1" of a MIG device); `gpu` the uuid of the hardware
    that its health follows; `nodes` the /dev paths that are this device's own; `numa` its NUMA nodes, empty where unknown.
    `kind` is GPU or MIG; `sharing` is why there are several of it, None for one that is given out once.

    `reason` says why it is not healthy, and is empty where it is; `withheld` is a reason that no proof of health takes away;
    `retired` means that it is gone, and listed for the sake of a pod that may hold it.
    """

    id: str
    gpu: str
    visible_id: str
    index: str
    nodes: tuple[str, ...] = ()
    numa: tuple[int, ...] = ()
    reason: str = ""
    withheld: str = ""
    kind: str = GPU
    sharing: SharedResource | None = None
    retired: bool = False

    @property
    def healthy(self) -> bool:
        """Whether the kubelet may hand it out."""
        return not self.reason

    @property
    def shared(self) -> str:
        """How it is shared: TIME_SLICING or MPS of `config.sharing`; empty for one that is given out once."""
        return self.sharing.strategy if self.sharing else ""

    @property
    def replicas(self) -> int:
        """How often its hardware is given out."""
        return self.sharing.replicas if self.sharing else 1

    @property
    def limits(self) -> MpsLimits:
        """Limits of each client under MPS."""
        return self.sharing.limits if self.sharing else MpsLimits()


class Resource(msgspec.Struct, frozen=True):
    """A resource name with its devices, in a stable order."""

    name: str
    devices: tuple[Device, ...] = ()


def whole_gpu(gpu: Gpu) -> Device:
    """The device that is a whole GPU: its id is the GPU's uuid."""
    return Device(
        id=gpu.uuid,
        gpu=gpu.uuid,
        visible_id=gpu.uuid,
        index=str(gpu.index),
        nodes=_nodes(gpu),
        numa=_numa(gpu),
    )


def mig_device(gpu: Gpu, mig: MigDevice) -> Device:
    """The device that is one MIG device: its id is the MIG device's uuid, its NUMA node the GPU's.

    Its nodes are the GPU's own and the capability nodes of both instances, as NVIDIA's plugin gives them.
    """
    caps = (mig.gpu_instance_cap, mig.compute_instance_cap)
    return Device(
        id=mig.uuid,
        gpu=gpu.uuid,
        visible_id=mig.uuid,
        index=f"{gpu.index}:{mig.index}",
        nodes=(*_nodes(gpu), *(f"/dev/nvidia-caps/nvidia-cap{cap}" for cap in caps if cap is not None)),
        numa=_numa(gpu),
        kind=MIG,
    )


def withhold(device: Device, reason: str) -> Device:
    """The device, withheld for that reason (empty: not withheld); the very same object where nothing changes."""
    return device if device.withheld == reason == device.reason else replace(device, withheld=reason, reason=reason)


def with_reason(device: Device, reason: str) -> Device:
    """The device with that reason (empty: healthy); the very same object where nothing changes."""
    return device if device.reason == reason else replace(device, reason=reason)


def device_id_fault(identifier: str) -> str:
    """Why a kubelet must not be sent this device id; empty if it may."""
    if not identifier:
        return "a device id must not be empty"
    if len(identifier) > MAX_DEVICE_ID:
        return f"a device id has at most {MAX_DEVICE_ID} characters, and this one has {len(identifier)}"
    if not (identifier.isascii() and identifier.isprintable()):
        return "a device id has printable ASCII characters only"
    return ""


def shown_id(identifier: str) -> str:
    """A device id for messages: as it is if it can be listed, else quoted and cut."""
    return shortened(ascii(identifier), _MAX_SHOWN_ID) if device_id_fault(identifier) else identifier


def _nodes(gpu: Gpu) -> tuple[str, ...]:
    if gpu.uuid in _OWN_NODES:
        return _OWN_NODES[gpu.uuid]
    return () if gpu.minor is None else (f"/dev/nvidia{gpu.minor}",)


def _numa(gpu: Gpu) -> tuple[int, ...]:
    return (gpu.numa_node,) if gpu.numa_node is not None and 0 <= gpu.numa_node <= MAX_NUMA_NODE else ()


def placeholder(index: int) -> str:
    """The uuid that stands for that of a GPU which cannot be read."""
    return f"{PLACEHOLDER}{index}"


def is_placeholder(uuid: str) -> bool:
    """Whether a uuid is none, and stands for one that is not known."""
    return uuid.startswith(PLACEHOLDER)


def mig_resource(profile: str) -> str:
    """The resource that MIG devices of a profile are counted under: nvidia.com/mig-1g.10gb.me for 1g.10gb+me."""
    return f"{DOMAIN}/mig-{profile.replace('+', '.')}"


def first_few(items: Sequence[str]) -> str:
    """The first four items, quoted, and how many more there are: one file fits a whole cluster, so lists may be long."""
    shown = ", ".join(repr(item) for item in items[:_MAX_SHOWN])
    return f"{shown} and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else shown
