"""From the node's hardware and the settings to the resources the kubelet is told of."""

from gpu_plugin.config.settings import Settings
from gpu_plugin.devices.device import Device, Resource, whole_gpu, with_reason
from gpu_plugin.devices.node import Gpu, Node

GPU_RESOURCE = "nvidia.com/gpu"

# What NVIDIA's own library leaves out of its devices (go-nvlib, device/api.go): the display part of a DGX Station.
_SKIPPED_MODELS = frozenset({"DGX Display", "NVIDIA DGX Display"})


def served(gpu: Gpu) -> bool:
    """Whether a GPU is one that workloads may use at all."""
    return gpu.model not in _SKIPPED_MODELS


def plan(node: Node, settings: Settings) -> tuple[Resource, ...]:
    """The resources of a node, devices in the order of their GPUs' indices.

    Args:
        node: what the probe found.
        settings: the operator's wishes.

    A GPU in MIG mode is a whole GPU under `none`, as with NVIDIA's plugin. Under `single` and `mixed` it is listed and
    held back, since its slices are not served yet and the whole of it cannot run a workload.
    """
    devices = [_device(gpu, settings) for gpu in sorted(node.gpus, key=lambda g: (g.index, g.uuid)) if served(gpu)]
    return (Resource(GPU_RESOURCE, tuple(devices)),)


def _device(gpu: Gpu, settings: Settings) -> Device:
    reason = gpu.unreadable or ""
    if not reason and gpu.mig_enabled and settings.mig_strategy != "none":
        reason = f"the GPU is in MIG mode and MIG strategy {settings.mig_strategy} is not served by this version"
    return with_reason(whole_gpu(gpu), reason)
