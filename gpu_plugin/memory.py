"""What a daemon remembers of this boot over its own restarts: why GPUs were unfit, which there were, and what was listed."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio

from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.devices.naming import PLACEHOLDER, resource_name_fault
from gpu_plugin.devices.node import Gpu, MigDevice, Node
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.pulse import Pulse
from gpu_plugin.state import StateDirectory
from gpu_plugin.threads import DaemonThreads

log = logging.getLogger(__name__)

HEALTH_FILE = "health.json"
GPUS_FILE = "gpus.json"
DEVICES_FILE = "devices.json"

LASTING = frozenset({"cordon"})
"""Signals that a new boot proves nothing about: the operator's own word."""


PATIENCE = 10.0
RETRY = 5.0
LAST_WRITE = 0.2
"""Seconds for a write of what must outlive the process, until a failed one is tried again, and for the one at the exit."""

WRITTEN_SOON = 1.0
"""Seconds that an operator is kept waiting until what was asked for is on disk."""


@dataclass(frozen=True, slots=True)
class HealthMemory:
    """What `HEALTH_FILE` holds. `boot_id` is the boot in which it was written, each entry's the one in which it was true."""

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
    """Reads and writes the files for one boot. What another boot wrote is not believed: hardware may have changed since.

    What an operator ordered outlives boots: a cordon.
    """

    def __init__(self, state: StateDirectory, boot_id: str) -> None:
        self._state = state
        self._boot_id = boot_id
        self._written: dict[str, object] = {}

    def booted(self, boot_id: str) -> None:
        """Writes for another boot from now on."""
        self._boot_id = boot_id

    def evidence(self) -> tuple[Evidence, ...]:
        """What was held against GPUs when an earlier process of this boot last wrote it down, and what outlives boots."""
        memory = self._state.read(HEALTH_FILE, HealthMemory)
        if memory is None:
            return ()
        return tuple(e for e in memory.evidence if e.boot_id == self._boot_id or e.signal in LASTING)

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
        """Writes down what changed since the last time. Blocks for as long as the disk does. Returns whether all is written.

        While no GPU has been found, what is remembered of GPUs and devices is left as it is.
        """
        boot_id = self._boot_id
        known = tuple(
            KnownGpu(g.uuid, g.index, g.minor, g.pci_bus_id, g.model, g.numa_node, g.mig_enabled, g.mig_devices)
            for g in node.gpus
            if not g.uuid.startswith(PLACEHOLDER)
        )
        devices = {resource.name: tuple(map(_listed, resource.devices)) for resource in listed}
        wanted: dict[str, object] = {HEALTH_FILE: HealthMemory(boot_id, evidence)}
        if node.gpus:
            wanted |= {GPUS_FILE: GpuMemory(boot_id, known), DEVICES_FILE: DeviceMemory(boot_id, devices)}
        for name, content in wanted.items():
            if self._written.get(name) != content and self._state.write(name, content):
                self._written[name] = content
        return all(self._written.get(name) == content for name, content in wanted.items())


@dataclass(frozen=True, slots=True)
class Known:
    """What is known now: `revision` grows whenever `evidence` changes, `listed` is what the kubelet was told of."""

    revision: int
    evidence: tuple[Evidence, ...]
    node: Node
    listed: tuple[Resource, ...]

    @property
    def nothing(self) -> bool:
        """Whether nothing has been learnt yet, and nobody has ordered anything."""
        return not (self.node.gpus or self.evidence or self.revision)


class Recorder:
    """Writes down what changed, on a thread that nobody waits for; the newest alone where changes come fast."""

    def __init__(self, memory: Memory, known: Callable[[], Known]) -> None:
        """Takes where to write, and how to learn what is known at any time."""
        self._memory = memory
        self._known = known
        self._unsaved = Pulse()
        self._saved = Pulse()
        self._revision = 0

    def changed(self) -> None:
        """Has what is known written down soon. From the event loop's thread."""
        self._unsaved.ring()

    async def run(self) -> None:
        """Writes until cancelled, and once more then: what was learnt last is worth a moment of the exit, and no more."""
        threads = DaemonThreads("state-files")
        try:
            while True:
                known = self._known()
                saved = await self._write(known, threads, PATIENCE)
                if saved:
                    self._revision = known.revision
                    self._saved.ring()
                if saved and self._same(known):
                    await self._unsaved.wait()
                elif not saved:
                    await self._unsaved.wait(RETRY)
        finally:
            with anyio.CancelScope(shield=True):
                await self._write(self._known(), threads, LAST_WRITE)
            threads.close()

    async def written(self) -> bool:
        """Whether what is held against GPUs now is on disk; waits a moment for that."""
        revision = self._known().revision
        self.changed()
        with anyio.move_on_after(WRITTEN_SOON):
            while self._revision < revision:
                await self._saved.wait()
        return self._revision >= revision

    async def _write(self, known: Known, threads: DaemonThreads, patience: float) -> bool:
        if known.nothing:
            return True
        job = await threads.submit(lambda: self._memory.write(known.evidence, known.node, known.listed), patience)
        return job.done.done() and job.done.exception() is None and job.done.result()

    def _same(self, known: Known) -> bool:
        now = self._known()
        return now.revision == known.revision and now.node is known.node and now.listed == known.listed


def _listed(device: Device) -> ListedDevice:
    return ListedDevice(device.id, device.gpu, device.visible_id, device.index, device.kind, device.shared, device.numa)


def _device(resource: str, known: ListedDevice) -> Device:
    """The device as far as it is known; how many replicas there were is not, and is never asked of a retired one."""
    sharing = SharedResource(resource, resource, 2, known.shared) if known.shared else None
    return Device(known.id, known.gpu, known.visible_id, known.index, numa=known.numa, kind=known.kind, sharing=sharing)
