"""Devices, which the kubelet counts by id, and resources, the names of groups of devices. Immutable."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.names import DOMAIN
from gpu_plugin.config.sharing import MpsLimits, SharedResource
from gpu_plugin.config.words import shortened
from gpu_plugin.devices.node import Gpu, MigDevice

GPU = "gpu"
MIG = "mig"

WSL_GPUS = (
    "all"  # the name in NVIDIA's plugin (from 0.19.1 on) of all GPUs of a Windows host together, for Linux guests
)
TEGRA_GPU = "tegra"  # the name in NVIDIA's plugin of the GPU of a Tegra chip (internal/rm/tegra_devices.go)
OWN_NAMES = frozenset({WSL_GPUS, TEGRA_GPU})  # names in place of the uuid, for GPUs that have none
MAX_DEVICE_ID = 63  # characters; the longest id that the API allows (k8s.io/kubelet, deviceplugin/v1beta1, Device.ID)

MAX_LIST_BYTES = 4 * 1024 * 1024
"""The longest message that the kubelet's gRPC client reads (grpc-go, defaultClientMaxReceiveMessageSize)."""

PLACEHOLDER = "GPU-unreadable-"
"""Prefix of the placeholder uuid of a GPU whose uuid is not known yet. Such a device is never healthy: no pod can hold it."""

MAX_NUMA_NODE = 2**31 - 1  # the highest number of a NUMA node: the kernel stores it in an int

_MAX_SHOWN_ID = 80  # characters of an id that cannot be listed

_MAX_SHOWN = 4  # items of a list that may be long

_OWN_NODES = {WSL_GPUS: ("/dev/dxg",)}


# Tens of thousands of devices may exist, without reference cycles: gc=False spares the garbage collector 13 ms for 5,000.
class Device(msgspec.Struct, frozen=True, gc=False):
    """One device of a resource, as the kubelet knows it."""

    id: str  # MAX_DEVICE_ID characters at most; it always refers to the same hardware
    gpu: str  # uuid of the GPU whose health applies
    visible_id: str  # the id for the container runtime: the uuid of the GPU or MIG device
    index: str  # the NVML index as text: "0", or "0:1" for a MIG device
    nodes: tuple[str, ...] = ()  # its own paths under /dev
    numa: tuple[int, ...] = ()  # its NUMA nodes; empty if unknown
    reason: str = ""  # why it is unhealthy; empty if it is healthy
    withheld: str = ""  # a reason that no proof of health removes
    kind: str = GPU  # GPU or MIG
    sharing: SharedResource | None = None  # the entry that shares it; None for a device that is given out once
    retired: bool = False  # the device is gone, and only listed because a pod may hold it

    @property
    def healthy(self) -> bool:
        """True if the kubelet may allocate it."""
        return not self.reason

    @property
    def shared(self) -> str:
        """The kind of sharing: TIME_SLICING or MPS of `config.sharing`; empty for a device that is given out once."""
        return self.sharing.strategy if self.sharing else ""

    @property
    def replicas(self) -> int:
        """The number of times that its hardware is given out."""
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
    """Return the device of a whole GPU. Its id is the GPU's uuid."""
    return Device(
        id=gpu.uuid, gpu=gpu.uuid, visible_id=gpu.uuid, index=str(gpu.index), nodes=_nodes(gpu), numa=_numa(gpu)
    )


def mig_device(gpu: Gpu, mig: MigDevice) -> Device:
    """Return the device of a MIG device. Its id is the MIG device's uuid, its NUMA node the GPU's.

    Its nodes are the GPU's own and the capability nodes of both instances, as in NVIDIA's plugin.
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
    """Return the device, withheld for this reason (empty: not withheld); the same object if nothing changed."""
    return device if device.withheld == reason == device.reason else replace(device, withheld=reason, reason=reason)


def with_reason(device: Device, reason: str) -> Device:
    """Return the device with this reason (empty: healthy); the same object if nothing changed."""
    return device if device.reason == reason else replace(device, reason=reason)


def device_id_fault(identifier: str) -> str:
    """Return the reason why a kubelet must not get this device id; empty if it may get it."""
    if not identifier:
        return "a device id must not be empty"
    if len(identifier) > MAX_DEVICE_ID:
        return f"a device id has at most {MAX_DEVICE_ID} characters, and this one has {len(identifier)}"
    if not (identifier.isascii() and identifier.isprintable()):
        return "a device id has printable ASCII characters only"
    return ""


def shown_id(identifier: str) -> str:
    """Return a device id for messages: unchanged if it is valid, else quoted and cut."""
    return shortened(ascii(identifier), _MAX_SHOWN_ID) if device_id_fault(identifier) else identifier


def _nodes(gpu: Gpu) -> tuple[str, ...]:
    if gpu.uuid in _OWN_NODES:
        return _OWN_NODES[gpu.uuid]
    return () if gpu.minor is None else (f"/dev/nvidia{gpu.minor}",)


def _numa(gpu: Gpu) -> tuple[int, ...]:
    return (gpu.numa_node,) if gpu.numa_node is not None and 0 <= gpu.numa_node <= MAX_NUMA_NODE else ()


def placeholder(index: int) -> str:
    """Return the placeholder uuid of a GPU whose uuid cannot be read."""
    return f"{PLACEHOLDER}{index}"


def is_placeholder(uuid: str) -> bool:
    """Return True if a uuid is the placeholder of an unknown uuid."""
    return uuid.startswith(PLACEHOLDER)


def mig_resource(profile: str) -> str:
    """Return the resource name of MIG devices of a profile: nvidia.com/mig-1g.10gb.me for 1g.10gb+me."""
    return f"{DOMAIN}/mig-{profile.replace('+', '.')}"


def first_few(items: Sequence[str]) -> str:
    """Return the first four items, quoted, and the number of further items. Lists of a file for a whole cluster may be long."""
    shown = ", ".join(repr(item) for item in items[:_MAX_SHOWN])
    return f"{shown} and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else shown
