"""What a daemon remembers of this boot over its own restarts: why GPUs were unfit, which there were, and what was listed."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.devices.naming import PLACEHOLDER, resource_name_fault
from gpu_plugin.devices.node import Gpu, MigDevice, Node
from gpu_plugin.health.ledger import Evidence
from gpu_plugin.state import StateDirectory

log = logging.getLogger(__name__)

HEALTH_FILE = "health.json"
GPUS_FILE = "gpus.json"
DEVICES_FILE = "devices.json"


@dataclass(frozen=True, slots=True)
class HealthMemory:
    """What `HEALTH_FILE` holds."""

    boot_id: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """A GPU as `GPUS_FILE` remembers it: enough to list it again when the driver cannot describe it."""

    uuid: str
    index: int
    minor: int | None = None
    pci_bus_id: str = ""
    model: str = ""
    numa_node: int | None = None
    mig_enabled: bool = False
    mig_devices: tuple[MigDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What `GPUS_FILE` holds."""

    boot_id: str
    gpus: tuple[KnownGpu, ...] = ()


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """A device as `DEVICES_FILE` remembers it: enough to list it again, unhealthy, once it is gone."""

    id: str
    gpu: str
    visible_id: str
    index: str
    kind: str
    shared: str = ""
    numa: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What `DEVICES_FILE` holds: by resource name, what the kubelet was told of."""

    boot_id: str
    resources: dict[str, tuple[ListedDevice, ...]]


class Memory:
    """Reads and writes the files for one boot. What another boot wrote is not believed: hardware may have changed since."""

    def __init__(self, state: StateDirectory, boot_id: str) -> None:
        self._state = state
        self._boot_id = boot_id
        self._written: dict[str, object] = {}

    def evidence(self) -> tuple[Evidence, ...]:
        """What was held against GPUs when an earlier process of this boot last wrote it down."""
        memory = self._state.read(HEALTH_FILE, HealthMemory)
        return memory.evidence if memory is not None and memory.boot_id == self._boot_id else ()

    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs that an earlier process of this boot knew by name."""
        memory = self._state.read(GPUS_FILE, GpuMemory)
        if memory is None or memory.boot_id != self._boot_id:
            return ()
        return tuple(
            Gpu(
                g.uuid,
                g.index,
                g.minor,
                g.pci_bus_id,
                g.model,
                numa_node=g.numa_node,
                mig_enabled=g.mig_enabled,
                mig_devices=g.mig_devices,
            )
            for g in memory.gpus
        )

    def listed(self) -> tuple[Resource, ...]:
        """Resources and devices that an earlier process of this boot listed: a pod may hold each of them."""
        memory = self._state.read(DEVICES_FILE, DeviceMemory)
        if memory is None or memory.boot_id != self._boot_id:
            return ()
        return tuple(
            Resource(name, tuple(_device(name, one) for one in devices))
            for name, devices in memory.resources.items()
            if not resource_name_fault(name)
        )

    def write(self, evidence: tuple[Evidence, ...], node: Node, listed: Iterable[Resource]) -> bool:
        """Writes down what changed since the last time. Blocks for as long as the disk does. Returns whether all is written."""
        known = tuple(
            KnownGpu(g.uuid, g.index, g.minor, g.pci_bus_id, g.model, g.numa_node, g.mig_enabled, g.mig_devices)
            for g in node.gpus
            if not g.uuid.startswith(PLACEHOLDER)
        )
        devices = {resource.name: tuple(map(_listed, resource.devices)) for resource in listed}
        wanted = {
            HEALTH_FILE: HealthMemory(self._boot_id, evidence),
            GPUS_FILE: GpuMemory(self._boot_id, known),
            DEVICES_FILE: DeviceMemory(self._boot_id, devices),
        }
        for name, content in wanted.items():
            if self._written.get(name) != content and self._state.write(name, content):
                self._written[name] = content
        return self._written == wanted


def _listed(device: Device) -> ListedDevice:
    return ListedDevice(device.id, device.gpu, device.visible_id, device.index, device.kind, device.shared, device.numa)


def _device(resource: str, known: ListedDevice) -> Device:
    """The device as far as it is known; how many replicas there were is not, and is never asked of a retired one."""
    sharing = SharedResource(resource, resource, 2, known.shared) if known.shared else None
    return Device(known.id, known.gpu, known.visible_id, known.index, numa=known.numa, kind=known.kind, sharing=sharing)
