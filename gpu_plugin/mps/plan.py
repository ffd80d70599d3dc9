"""Plans the MPS daemons of a node: a daemon for each resource shared by MPS. Pure.

Directories are the same as in NVIDIA's plugin v0.20.0 (cmd/mps-control-daemon/mps), so that containers with NVIDIA's settings
reach these daemons too.
"""

from collections.abc import Iterable, Mapping

import msgspec

from gpu_plugin.config.sharing import MPS, MpsLimits
from gpu_plugin.config.socket_path import LONGEST, room
from gpu_plugin.devices.device import MIG, Device, Resource
from gpu_plugin.devices.mps_paths import log_directory, pipe_directory
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.devices.nvml_h import Architecture
from gpu_plugin.mps.limits import DaemonLimits, limits_of


class MpsResource(msgspec.Struct, frozen=True):
    """A resource shared by MPS: its GPUs in the order of their devices, the number of replicas, and the limits.

    `trouble` is the reason, found in its devices, why no daemon can serve it; empty if a daemon can serve it.
    """

    name: str
    gpus: tuple[Gpu, ...]
    replicas: int
    limits: MpsLimits = msgspec.field(default_factory=MpsLimits)
    trouble: str = ""


class MpsDaemon(msgspec.Struct, frozen=True):
    """One MPS control daemon with all its settings: a daemon with equal settings need not be restarted.

    `gpus` are uuids. The limits are set once the daemon answers, before it has clients.
    """

    resource: str
    pipe: str
    log: str
    gpus: tuple[str, ...]
    replicas: int
    limits: DaemonLimits

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that give a control daemon its directories and GPUs.

        The GPUs are given by uuid: without them, the daemon would use the GPUs of other resources as well.
        """
        return {
            "CUDA_MPS_PIPE_DIRECTORY": self.pipe,
            "CUDA_MPS_LOG_DIRECTORY": self.log,
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
        }


class MpsPlan(msgspec.Struct, frozen=True):
    """The daemons to run, the reason for each resource that cannot have a daemon, and warnings for the operator."""

    daemons: tuple[MpsDaemon, ...] = ()
    refused: Mapping[str, str] = msgspec.field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def mps_resources(resources: Iterable[Resource], node: Node) -> tuple[MpsResource, ...]:
    """Return the resources with devices shared by MPS, each with the GPUs of these devices without duplicates."""
    gpus = {gpu.uuid: gpu for gpu in node.gpus}
    found = []
    for resource in resources:
        devices = [device for device in resource.devices if device.shared == MPS and not device.retired]
        if devices:
            found.append(_mps_resource(resource.name, devices, gpus))
    return tuple(found)


def _mps_resource(name: str, devices: list[Device], gpus: Mapping[str, Gpu]) -> MpsResource:
    trouble = ""
    uuids = tuple(dict.fromkeys(device.gpu for device in devices))
    partitions = [device.visible_id for device in devices if device.kind == MIG]
    unknown = [uuid for uuid in uuids if uuid not in gpus]
    if partitions:
        trouble = f"{partitions[0]} is a MIG device, and MPS shares whole GPUs only; share it by time-slicing"
    elif unknown:
        trouble = f"{unknown[0]} is not a GPU that NVML describes, and MPS needs one; share it by time-slicing"
    elif len({(device.replicas, device.limits) for device in devices}) > 1:
        trouble = (
            "its GPUs have different replicas or limits, and one MPS daemon has the same for all; "
            "offer them under different names"
        )
    first = devices[0]
    return MpsResource(name, tuple(gpus[uuid] for uuid in uuids if uuid in gpus), first.replicas, first.limits, trouble)


def plan_daemons(root: str, resources: Iterable[MpsResource]) -> MpsPlan:
    """Plan the daemons of these resources under the MPS root. If two resources share a GPU, the first resource gets it.

    A resource that cannot be served does not affect the others.
    """
    daemons: list[MpsDaemon] = []
    refused: dict[str, str] = {}
    warnings: list[str] = []
    taken: dict[str, str] = {}
    for resource in resources:
        readable = tuple(gpu for gpu in resource.gpus if not gpu.unreadable)
        why = _fault(root, resource, readable, taken)
        if why:
            refused[resource.name] = why
            continue
        warnings += [
            f"{resource.name}: GPU {gpu.uuid} is left out of its MPS daemon until the next start or reload: {gpu.unreadable}"
            for gpu in resource.gpus
            if gpu.unreadable
        ]
        taken |= {gpu.uuid: resource.name for gpu in readable}
        daemons.append(
            MpsDaemon(
                resource=resource.name,
                pipe=pipe_directory(root, resource.name),
                log=log_directory(root, resource.name),
                gpus=tuple(gpu.uuid for gpu in readable),
                replicas=resource.replicas,
                limits=limits_of(readable, resource.replicas, resource.limits),
            )
        )
    return MpsPlan(tuple(daemons), refused, tuple(warnings))


def _fault(root: str, resource: MpsResource, gpus: tuple[Gpu, ...], taken: Mapping[str, str]) -> str:
    """Return why this resource can have no daemon; empty if it can."""
    if resource.trouble:
        return resource.trouble
    if not gpus:
        return "none of its GPUs can be read"
    for gpu in gpus:
        if gpu.mig_enabled:
            return f"GPU {gpu.uuid} is in MIG mode, and MPS shares whole GPUs only; disable MIG mode, or share its MIG devices"
        if gpu.uuid in taken:
            return f"GPU {gpu.uuid} is shared by the MPS daemon of {taken[gpu.uuid]} already; a GPU has one daemon"
        # 48 since compute capability 7.0 (V100 included), 16 before (nvidia-cuda-mps-control(1)) or if it is unknown
        most_clients = 48 if (gpu.architecture or 0) >= Architecture.VOLTA else 16
        if resource.replicas > most_clients:
            return (
                f"{resource.replicas} replicas are more than the {most_clients} MPS clients that GPU {gpu.uuid} "
                f"({gpu.model or 'of unknown model'}) takes; lower sharing.mps.resources[].replicas"
            )
    # Since Volta the hardware isolates clients from each other.
    if len({(gpu.architecture or 0) >= Architecture.VOLTA for gpu in gpus}) > 1:
        return (
            "some of its GPUs are older than Volta, and one MPS daemon ignores those if it has newer GPUs; "
            "offer them under different names"
        )
    longest = f"{pipe_directory(root, resource.name)}/control_privileged"  # of the daemon's sockets
    if room(longest) < 0:
        return f"{longest} is too long a path for a Unix socket (over {LONGEST} bytes); shorten --mps-root"
    return ""
