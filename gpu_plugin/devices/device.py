"""Devices and resources: what the kubelet counts and the name it counts them under. Immutable."""

from dataclasses import dataclass, replace

from gpu_plugin.devices.node import Gpu


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a resource, as the kubelet knows it.

    `id` is at most 63 characters and never changes its meaning; `visible_id` is what a container is told to see: the GPU's
    uuid; `index` its NVML index as text; `nodes` the /dev paths that are this device's own; `numa` its NUMA nodes, empty
    where unknown; `reason` says why it is not healthy, and is empty where it is.
    """

    id: str
    gpu: str
    visible_id: str
    index: str
    nodes: tuple[str, ...] = ()
    numa: tuple[int, ...] = ()
    reason: str = ""

    @property
    def healthy(self) -> bool:
        """Whether the kubelet may hand it out."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class Resource:
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
        nodes=() if gpu.minor is None else (f"/dev/nvidia{gpu.minor}",),
        numa=() if gpu.numa_node is None or gpu.numa_node < 0 else (gpu.numa_node,),
        reason="",
    )


def with_reason(device: Device, reason: str) -> Device:
    """The device with that reason (empty: healthy); the very same object where nothing changes."""
    return device if device.reason == reason else replace(device, reason=reason)
