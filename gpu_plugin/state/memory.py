"""State of the present boot that outlives restarts of the daemon: evidence against GPUs, the GPUs, and the listed devices."""

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
    """Reads and writes the files for one boot. Ignores content of another boot: the hardware may have changed since.

    Orders of an operator (cordons) outlive boots.
    """

    def __init__(self, state: StateDirectory, boot_id: str) -> None:
        self._state = state
        self._boot_id = boot_id
        self._written: dict[str, tuple[object, Identity | None]] = {}
        """The last content that was written under each name, and the identity of the file after the write."""
        self._journal = Journal(state.path / JOURNAL_FILE, WrittenHealth)
        self._health: HealthMemory[Evidence] | None = None
        self._sequence = 0

    def reserve(self) -> None:
        """Allocate room for the evidence, which can then be written on a full disk. Log a warning on failure. Blocks."""
        self._journal.reserve()

    def in_place(self) -> bool:
        """Return True if all written files are unchanged. They may have been removed, renamed or replaced since."""
        return (self._health is None or self._journal.in_place) and all(map(self._is_there, [*self._written]))

    def _is_there(self, name: str) -> bool:
        there = identity(self._state.path / name)
        # A file may be removed between its write and the read of its identity. The stored identity is then None, which must not
        # equal the identity of a missing file.
        return there is not None and there == self._written[name][1]

    def _holds(self, name: str, content: object) -> bool:
        """Return True if this content is the content that was written last, and the file is unchanged."""
        return name in self._written and self._written[name][0] == content and self._is_there(name)

    def booted(self, boot_id: str) -> None:
        """Set the boot id of all later reads and writes."""
        self._boot_id = boot_id

    def evidence(self) -> tuple[Evidence, ...]:
        """Return the last evidence that an earlier process of this boot wrote, and entries that outlive boots. Blocks."""
        memory, newest = self._state.read(HEALTH_FILE, WrittenHealth), self._journal.read()
        if newest is not None and (memory is None or newest.sequence >= memory.sequence):
            memory = newest
        if memory is None:
            return self.handed_over()
        self._sequence = memory.sequence
        return (*self._entries(HEALTH_FILE, memory), *self.handed_over())

    def hand_over(self, evidence: tuple[Evidence, ...]) -> bool:
        """Write evidence that this daemon found after it had unlocked the state directory. Return True on success. Blocks."""
        return self._state.write(HANDOVER_FILE, HealthMemory(self._boot_id, evidence))

    def handed_over(self) -> tuple[Evidence, ...]:
        """Return the evidence that a former daemon found during a takeover. Blocks."""
        memory = self._state.read(HANDOVER_FILE, WrittenHealth)
        return () if memory is None else self._entries(HANDOVER_FILE, memory)

    def forget_handover(self) -> None:
        """Remove the file with a former daemon's evidence, which is now stored in another file. Blocks."""
        (self._state.path / HANDOVER_FILE).unlink(missing_ok=True)

    def taken_back(self) -> tuple[Evidence, ...]:
        """Return the evidence of another daemon that used the state directory. Later writes write all files again. Blocks."""
        self._journal = Journal(self._state.path / JOURNAL_FILE, WrittenHealth)
        self._journal.reserve()
        self._health = None
        self._written.clear()
        return self.evidence()

    def _entries(self, file: str, memory: WrittenHealth) -> tuple[Evidence, ...]:
        """Return the entries of this boot and the entries that outlive boots. Log invalid entries."""
        found, faults = [], []
        for place, raw in enumerate(memory.evidence):
            try:
                found.append(entry(raw))
            except ValueError as error:
                faults.append(f"entry {place} is invalid and left out: {error}")
        _log_faults(file, faults)
        return tuple(each for each in found if each.boot_id == self._boot_id or each.lasts)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that an earlier process of this boot wrote. Blocks."""
        memory = self._state.read(GPUS_FILE, WrittenGpus)
        if memory is None or memory.boot_id != self._boot_id:
            return ()
        return _gpus("gpus", memory.gpus)

    def before(self) -> tuple[Gpu, ...]:
        """Return the GPUs that the node had in an earlier boot and that no process of this boot has found. Blocks."""
        memory = self._state.read(GPUS_FILE, WrittenGpus)
        if memory is None:
            return ()
        absent = _gpus("absent", memory.absent)
        return absent if memory.boot_id == self._boot_id else (*_gpus("gpus", memory.gpus), *absent)

    def devices(self) -> Remembered:
        """Return devices that an earlier process of this boot listed, and devices that pods held under unlisted names. Blocks."""
        memory = self._state.read(DEVICES_FILE, WrittenDevices)
        if memory is None or memory.boot_id != self._boot_id:
            return Remembered()
        found = remembered(memory)
        if found.faults:
            more = f", and {counted(len(found.faults) - 1, 'more fault')}" if len(found.faults) > 1 else ""
            log.error("%s is damaged: %s%s", self._state.path / DEVICES_FILE, found.faults[0], more)
        return found

    def write_evidence(self, evidence: tuple[Evidence, ...]) -> bool:
        """Write the evidence to the journal, where it outlives this process, without waiting for a disk. Return True on success.

        `write_durably` writes evidence that must also outlive a power failure. Most evidence is useless after a power failure,
        which is a new boot.
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
        """Write the files that changed since the last call, so that they outlive a power failure. Return True if all are written.

        While no GPU has been found, the files of GPUs and devices stay unchanged.
        """
        boot_id = self._boot_id
        known, absent = (
            [{name: getattr(gpu, name) for name in KNOWN} for gpu in gpus if gpu.uuid and not is_placeholder(gpu.uuid)]
            for gpus in (node.gpus, node.absent)
        )
        devices = DeviceMemory(boot_id, by_name(listed), by_name(foreign))
        health = self._health  # may be newer than `evidence` and must not be replaced by older evidence
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
                self._written.pop(name, None)  # the content of the file is not known
        if HEALTH_FILE in self._written:
            self._journal.settle(health)
        return all_written


def _gpus(name: str, written: Iterable[msgspec.Raw]) -> tuple[Gpu, ...]:
    """Return the GPUs of the list `name`. Log damaged entries."""
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
