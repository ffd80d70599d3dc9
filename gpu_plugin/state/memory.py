"""What a daemon remembers of this boot over its own restarts: why GPUs were unfit, which there were, and what was listed."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import anyio
import msgspec

from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.devices.device import Device, Resource
from gpu_plugin.devices.naming import PLACEHOLDER, resource_name_fault
from gpu_plugin.devices.node import Gpu, MigDevice, Node
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.health.former_evidence import FORMER, FormerEvidence, without_imex
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import Workers
from gpu_plugin.state.directory import Identity, StateDirectory, identity
from gpu_plugin.state.journal import Journal

log = logging.getLogger(__name__)

HEALTH_FILE = "health.json"
JOURNAL_FILE = "health.journal"
GPUS_FILE = "gpus.json"
DEVICES_FILE = "devices.json"

PATIENCE = 10.0
RETRY = 5.0
LAST_WRITE = 0.2
"""Seconds for a write of what must outlive the process, until a failed one is tried again, and for the one at the exit."""

WRITTEN_SOON = 1.0
"""Seconds that an operator is kept waiting until what was asked for is written down."""


@dataclass(frozen=True, slots=True)
class HealthMemory:
    """What `HEALTH_FILE` holds, and a line of `JOURNAL_FILE`: of the two, that of the greater `sequence` is in force.

    Of the same one the journal's: it was written later.

    `boot_id` is the boot in which it was written, each entry's the one in which it was true.
    """

    boot_id: str
    evidence: tuple[Evidence, ...] = ()
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class WrittenHealth:
    """The same as it is read: entries are understood one by one, so that one of a wrong type costs no other."""

    boot_id: str
    evidence: tuple[msgspec.Raw, ...] = ()
    sequence: int = 0


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
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What `DEVICES_FILE` holds, by resource name: what the kubelet was told of, and what pods hold under `foreign` names."""

    boot_id: str
    resources: dict[str, tuple[ListedDevice, ...]]
    foreign: dict[str, tuple[ListedDevice, ...]] = field(default_factory=dict)


class Memory:
    """Reads and writes the files for one boot. What another boot wrote is not believed: hardware may have changed since.

    What an operator ordered outlives boots: a cordon.
    """

    def __init__(self, state: StateDirectory, boot_id: str) -> None:
        self._state = state
        self._boot_id = boot_id
        self._written: dict[str, tuple[object, Identity | None]] = {}
        """What was written last under each name, and what bore that name then."""
        self._journal: Journal[HealthMemory, WrittenHealth] = Journal(state.path / JOURNAL_FILE, WrittenHealth)
        self._health: HealthMemory | None = None
        self._sequence = 0

    def reserve(self) -> None:
        """Allocates room for what is held against GPUs, which a full disk takes then. Says where it cannot. Blocks."""
        self._journal.reserve()

    def stands(self) -> bool:
        """Whether all that was written is where a restart looks for it: it may have been removed, renamed or replaced since."""
        return (self._health is None or self._journal.stands) and all(map(self._is_there, [*self._written]))

    def _is_there(self, name: str) -> bool:
        return identity(self._state.path / name) == self._written[name][1]

    def _holds(self, name: str, content: object) -> bool:
        """Whether the file of this name has this content."""
        return name in self._written and self._written[name][0] == content and self._is_there(name)

    def booted(self, boot_id: str) -> None:
        """Writes for another boot from now on."""
        self._boot_id = boot_id

    def evidence(self) -> tuple[Evidence, ...]:
        """What was held against GPUs when an earlier process of this boot last wrote it down, and what outlives boots."""
        memory, newest = self._state.read(HEALTH_FILE, WrittenHealth), self._journal.read()
        if newest is not None and (memory is None or newest.sequence >= memory.sequence):
            memory = newest
        if memory is None:
            return ()
        self._sequence = memory.sequence
        found: list[tuple[Evidence, bool]] = []
        for place, raw in enumerate(memory.evidence):
            try:
                found.append(_entry(raw))
            except ValueError as error:
                log.error("%s: entry %d cannot be true and is left out: %s", HEALTH_FILE, place, error)  # noqa: TRY400
        believed = without_imex(found)
        return tuple(entry for entry in believed if entry.boot_id == self._boot_id or entry.lasts)

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
        memory = self._devices()
        return () if memory is None else _resources(memory.resources)

    def foreign(self) -> tuple[Resource, ...]:
        """What an earlier process of this boot knew pods to hold under names that it did not list."""
        memory = self._devices()
        return () if memory is None else _resources(memory.foreign)

    def _devices(self) -> DeviceMemory | None:
        memory = self._state.read(DEVICES_FILE, DeviceMemory)
        return memory if memory is not None and memory.boot_id == self._boot_id else None

    def write(self, evidence: tuple[Evidence, ...], node: Node, listed: Iterable[Resource]) -> bool:
        """Writes down what changed since the last time. Blocks for as long as the disk does. Returns whether all is written."""
        told = self.write_evidence(evidence)
        return self.write_durably(evidence, node, listed) and told

    def write_evidence(self, evidence: tuple[Evidence, ...]) -> bool:
        """Has what is held against GPUs outlive this process, without waiting for a disk. Returns whether that worked.

        `write_durably` has it outlive a power failure too, of which most is of no use: that is a new boot.
        """
        former = self._health
        if former is None or (former.boot_id, former.evidence) != (self._boot_id, evidence) or not self._journal.stands:
            newer = HealthMemory(self._boot_id, evidence, self._sequence + 1)
            if not self._journal.append(newer):
                self._health = None
                return False
            self._health, self._sequence = newer, newer.sequence
        return True

    def write_durably(
        self,
        evidence: tuple[Evidence, ...],
        node: Node,
        listed: Iterable[Resource],
        foreign: Iterable[Resource] = (),
    ) -> bool:
        """Writes down what changed since the last time, so that it outlives a power failure. Returns whether all is written.

        While no GPU has been found, what is remembered of GPUs and devices is left as it is.
        """
        boot_id = self._boot_id
        known = tuple(
            KnownGpu(g.uuid, g.index, g.minor, g.pci_bus_id, g.model, g.numa_node, g.mig_enabled, g.mig_devices)
            for g in node.gpus
            if not g.uuid.startswith(PLACEHOLDER)
        )
        devices = DeviceMemory(boot_id, _by_name(listed), _by_name(foreign))
        health = self._health  # which may be newer than `evidence` by now, and must not be unsaid
        if health is None or health.boot_id != boot_id:  # the journal could not be written
            health = HealthMemory(boot_id, evidence, self._sequence + 1)
        wanted: dict[str, object] = {HEALTH_FILE: health}
        if node.gpus:
            wanted |= {GPUS_FILE: GpuMemory(boot_id, known), DEVICES_FILE: devices}
        held = True
        for name, content in wanted.items():
            if self._holds(name, content):
                continue
            if self._state.write(name, content):
                self._written[name] = content, identity(self._state.path / name)
            else:
                held = False
                self._written.pop(name, None)  # whatever is there now, it is not known to be this
        if HEALTH_FILE in self._written:
            self._journal.settle(health)
        return held


def _entry(raw: msgspec.Raw) -> tuple[Evidence, bool]:
    """An entry, and whether a version before wrote it. Raises ValueError for one that cannot be, with what is wrong."""
    try:
        fields = msgspec.json.decode(raw)
        former = isinstance(fields, dict) and not FORMER.isdisjoint(fields)
        entry = msgspec.convert(fields, FormerEvidence).evidence() if former else msgspec.convert(fields, Evidence)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not entry.possible:
        raise ValueError("its times or numbers are out of range")
    return entry, former


@dataclass(frozen=True, slots=True)
class Known:
    """What is known now: `revision` grows whenever `evidence` changes, `listed` is what the kubelet was told of.

    `foreign` is what pods hold under names that are not listed.
    """

    revision: int
    evidence: tuple[Evidence, ...]
    node: Node
    listed: tuple[Resource, ...]
    foreign: tuple[Resource, ...] = ()

    @property
    def devices(self) -> tuple[tuple[Resource, ...], tuple[Resource, ...]]:
        """All that `DEVICES_FILE` is made of."""
        return self.listed, self.foreign

    @property
    def nothing(self) -> bool:
        """Whether nothing has been learnt yet, and nobody has ordered anything."""
        return not (self.node.gpus or self.evidence or self.revision)


class Recorder:
    """Writes down what changed, on threads that nobody waits for long; the newest alone where changes come fast.

    What is held against GPUs is written on a thread of its own: it comes before others are told, and waits for no disk.
    """

    def __init__(self, memory: Memory, known: Callable[[], Known]) -> None:
        """Takes where to write, and how to learn what is known at any time."""
        self._memory = memory
        self._known = known
        self._unsaved = Pulse()
        self._turned = Pulse()
        self._tried = 0
        self._saved = 0
        self._durable = True
        self._threads = Workers("health-file"), Workers("state-files")
        self._evidence, self._hardware = (SlowCall[bool](threads.begin) for threads in self._threads)

    def changed(self) -> None:
        """Has what is known written down soon. From the event loop's thread."""
        self._unsaved.ring()

    async def run(self) -> None:
        """Writes until cancelled, and once more then: what was learnt last is worth a moment of the exit, and no more."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_evidence)
                tasks.start_soon(self._keep_hardware)
        finally:
            with anyio.CancelScope(shield=True):
                known = self._known()
                if not known.nothing:
                    await _done(self._evidence, partial(self._write_evidence, known), LAST_WRITE)
                    await _done(self._hardware, partial(self._write_durably, known), LAST_WRITE)
            for threads in self._threads:
                threads.close()

    def look(self) -> None:
        """Has all that is known written down again where something of it is gone. From the event loop's thread."""
        if not self._memory.stands():
            self._unsaved.ring()

    @property
    def trouble(self) -> str:
        """What a restart would not remember, in a sentence; empty while all is written down."""
        if self._saved < self._tried:
            return "what is held against GPUs, and what operators ordered, cannot be written down: a restart would forget it"
        return "" if self._durable else "a file cannot be written, as the log says: a restart would not remember all"

    async def written(self, seconds: float = WRITTEN_SOON) -> bool:
        """Whether what is held against GPUs now outlives this process; waits `seconds` at most, less where it cannot be."""
        revision = self._known().revision
        if self._saved < revision:
            self.changed()
            with anyio.move_on_after(seconds):
                while self._tried < revision:
                    await self._turned.wait()
        return self._saved >= revision

    async def _keep_evidence(self) -> None:
        while True:
            known = self._known()
            saved = known.nothing or await _done(self._evidence, partial(self._write_evidence, known), PATIENCE)
            self._tried = known.revision
            self._saved = known.revision if saved else self._saved
            self._turned.ring()
            if self._known().revision == known.revision:
                await self._unsaved.wait(None if saved else RETRY)

    async def _keep_hardware(self) -> None:
        while True:
            known = self._known()
            if self._tried < known.revision:
                self._unsaved.ring()
            while self._tried < known.revision:  # what the journal has of it is what is written here
                await self._turned.wait()
            journaled = self._saved >= known.revision
            saved = known.nothing or await _done(self._hardware, partial(self._write_durably, known), PATIENCE)
            self._durable = saved
            now = self._known()
            if not (saved and journaled):
                await self._unsaved.wait(RETRY)
            elif now.node is known.node and now.revision == known.revision and now.devices == known.devices:
                await self._unsaved.wait()

    def _write_evidence(self, known: Known) -> bool:
        return self._memory.write_evidence(known.evidence)

    def _write_durably(self, known: Known) -> bool:
        return self._memory.write_durably(known.evidence, known.node, known.listed, known.foreign)


async def _done(writing: SlowCall[bool], write: Callable[[], bool], patience: float) -> bool:
    """Whether it is written within so many seconds. While one write hangs, no other of its kind is begun."""
    try:
        return await writing.anew(write, patience)
    except Exception:  # noqa: BLE001 - whatever it is, it is not written
        return False


def _by_name(resources: Iterable[Resource]) -> dict[str, tuple[ListedDevice, ...]]:
    return {resource.name: tuple(map(_listed, resource.devices)) for resource in resources}


def _resources(remembered: Mapping[str, tuple[ListedDevice, ...]]) -> tuple[Resource, ...]:
    return tuple(
        Resource(name, tuple(_device(name, one) for one in devices))
        for name, devices in remembered.items()
        if not resource_name_fault(name)
    )


def _listed(device: Device) -> ListedDevice:
    return ListedDevice(
        device.id,
        device.gpu,
        device.visible_id,
        device.index,
        device.kind,
        device.shared,
        device.numa,
        device.nodes,
    )


def _device(resource: str, known: ListedDevice) -> Device:
    """The device as far as it is known; how many replicas there were is not, and is never asked of a retired one."""
    sharing = SharedResource(resource, resource, 2, known.shared) if known.shared else None
    return Device(
        known.id,
        known.gpu,
        known.visible_id,
        known.index,
        numa=known.numa,
        kind=known.kind,
        sharing=sharing,
        nodes=known.nodes,
    )
