"""What a daemon remembers of this boot over its own restarts: why GPUs were unfit, which there were, and what was listed."""

import logging
from collections.abc import Iterable, Sequence

import msgspec

from gpu_plugin.config.words import counted
from gpu_plugin.devices.device import Resource, is_placeholder
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.state.directory import Identity, StateDirectory, identity
from gpu_plugin.state.journal import Journal
from gpu_plugin.state.listed_devices import Remembered, remembered
from gpu_plugin.state.records import (
    DEVICES_FILE,
    GPUS_FILE,
    HANDOVER_FILE,
    HEALTH_FILE,
    JOURNAL_FILE,
    KNOWN,
    DeviceMemory,
    HealthMemory,
    WrittenDevices,
    WrittenGpus,
    WrittenHealth,
    by_name,
    entry,
    gpu,
)

log = logging.getLogger(__name__)


class Memory:
    """Reads and writes the files for one boot. What another boot wrote is not believed: hardware may have changed since.

    What an operator ordered outlives boots: a cordon.
    """

    def __init__(self, state: StateDirectory, boot_id: str) -> None:
        self._state = state
        self._boot_id = boot_id
        self._written: dict[str, tuple[object, Identity | None]] = {}
        """The last content written under each name, and the file's identity then."""
        self._journal = Journal(state.path / JOURNAL_FILE, WrittenHealth)
        self._health: HealthMemory[Evidence] | None = None
        self._sequence = 0

    def reserve(self) -> None:
        """Allocates room for what is held against GPUs, which a full disk takes then. Says where it cannot. Blocks."""
        self._journal.reserve()

    def in_place(self) -> bool:
        """Whether all that was written is where a restart looks for it: it may have been removed, renamed or replaced since."""
        return (self._health is None or self._journal.in_place) and all(map(self._is_there, [*self._written]))

    def _is_there(self, name: str) -> bool:
        there = identity(self._state.path / name)
        # A file may be removed between its write and the read of its identity. The identity is None then, as that of no file is.
        return there is not None and there == self._written[name][1]

    def _holds(self, name: str, content: object) -> bool:
        """Whether the file of this name has this content."""
        return name in self._written and self._written[name][0] == content and self._is_there(name)

    def booted(self, boot_id: str) -> None:
        """Writes for another boot from now on."""
        self._boot_id = boot_id

    def evidence(self) -> tuple[Evidence, ...]:
        """The evidence against GPUs as an earlier process of this boot last wrote it down, and what outlives boots."""
        memory, newest = self._state.read(HEALTH_FILE, WrittenHealth), self._journal.read()
        if newest is not None and (memory is None or newest.sequence >= memory.sequence):
            memory = newest
        if memory is None:
            return self.handed_over()
        self._sequence = memory.sequence
        return (*self._entries(HEALTH_FILE, memory), *self.handed_over())

    def hand_over(self, evidence: tuple[Evidence, ...]) -> bool:
        """Writes down evidence that the daemon found which the state directory does not belong to any more. Blocks."""
        return self._state.write(HANDOVER_FILE, HealthMemory(self._boot_id, evidence))

    def handed_over(self) -> tuple[Evidence, ...]:
        """The evidence that a former daemon found during a takeover; empty if there is none. Blocks."""
        memory = self._state.read(HANDOVER_FILE, WrittenHealth)
        return () if memory is None else self._entries(HANDOVER_FILE, memory)

    def forget_handover(self) -> None:
        """Removes the evidence of a former daemon, which is written down elsewhere. Blocks."""
        (self._state.path / HANDOVER_FILE).unlink(missing_ok=True)

    def taken_back(self) -> tuple[Evidence, ...]:
        """The evidence of another daemon that had the state directory meanwhile. All is written again from now on. Blocks."""
        self._journal = Journal(self._state.path / JOURNAL_FILE, WrittenHealth)
        self._journal.reserve()
        self._health = None
        self._written.clear()
        return self.evidence()

    def _entries(self, file: str, memory: WrittenHealth) -> tuple[Evidence, ...]:
        """The entries of this boot, and those that outlive boots. Entries that cannot be true are logged."""
        found, faults = [], []
        for place, raw in enumerate(memory.evidence):
            try:
                found.append(entry(raw))
            except ValueError as error:
                faults.append(f"entry {place} cannot be true and is left out: {error}")
        _log_faults(file, faults)
        return tuple(each for each in found if each.boot_id == self._boot_id or each.lasts)

    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs that an earlier process of this boot knew by name."""
        memory = self._state.read(GPUS_FILE, WrittenGpus)
        if memory is None or memory.boot_id != self._boot_id:
            return ()
        return _gpus("gpus", memory.gpus)

    def before(self) -> tuple[Gpu, ...]:
        """GPUs that the node had in an earlier boot, as far as a process of this boot has not found them since."""
        memory = self._state.read(GPUS_FILE, WrittenGpus)
        if memory is None:
            return ()
        absent = _gpus("absent", memory.absent)
        return absent if memory.boot_id == self._boot_id else (*_gpus("gpus", memory.gpus), *absent)

    def devices(self) -> Remembered:
        """Devices that an earlier process of this boot listed, and devices that pods held under foreign names."""
        memory = self._state.read(DEVICES_FILE, WrittenDevices)
        if memory is None or memory.boot_id != self._boot_id:
            return Remembered()
        found = remembered(memory)
        if found.faults:
            more = f", and {counted(len(found.faults) - 1, 'more fault')}" if len(found.faults) > 1 else ""
            log.error("%s is damaged: %s%s", self._state.path / DEVICES_FILE, found.faults[0], more)
        return found

    def write_evidence(self, evidence: tuple[Evidence, ...]) -> bool:
        """Has what is held against GPUs outlive this process, without waiting for a disk. Returns whether that worked.

        `write_durably` has it outlive a power failure too, of which most is of no use: that is a new boot.
        """
        former = self._health
        if (
            former is None
            or (former.boot_id, former.evidence) != (self._boot_id, evidence)
            or not self._journal.in_place
        ):
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
        known, absent = (
            [{name: getattr(gpu, name) for name in KNOWN} for gpu in gpus if gpu.uuid and not is_placeholder(gpu.uuid)]
            for gpus in (node.gpus, node.absent)
        )
        devices = DeviceMemory(boot_id, by_name(listed), by_name(foreign))
        health = self._health  # which may be newer than `evidence` by now, and must not be unsaid
        if health is None or health.boot_id != boot_id:  # the journal could not be written
            health = HealthMemory(boot_id, evidence, self._sequence + 1)
        wanted: dict[str, object] = {HEALTH_FILE: health}
        if node.gpus:
            wanted |= {
                GPUS_FILE: {"boot_id": boot_id, "gpus": known, "absent": absent},
                DEVICES_FILE: devices,
            }
        all_written = True
        for name, content in wanted.items():
            if self._holds(name, content):
                continue
            if self._state.write(name, content):
                self._written[name] = content, identity(self._state.path / name)
            else:
                all_written = False
                self._written.pop(name, None)  # whatever is there now, it is not known to be this
        if HEALTH_FILE in self._written:
            self._journal.settle(health)
        return all_written


def _gpus(name: str, written: Iterable[msgspec.Raw]) -> tuple[Gpu, ...]:
    """GPUs of the list of this name, without damaged entries, which are logged."""
    found: dict[str, Gpu] = {}
    faults = []
    for place, raw in enumerate(written):
        try:
            known = gpu(raw)
            if found.setdefault(known.uuid, known) is not known:
                raise ValueError("its uuid occurs twice")
        except ValueError as error:
            faults.append(f"entry {place} of {name!r} is damaged and left out: {error}")
    _log_faults(GPUS_FILE, faults)
    return tuple(found.values())


def _log_faults(file: str, faults: Sequence[str]) -> None:
    """Log the first fault of a file and the number of the others: a file may have thousands."""
    if faults:
        more = f" (and {counted(len(faults) - 1, 'more fault')})" if len(faults) > 1 else ""
        log.error("%s: %s%s", file, faults[0], more)
