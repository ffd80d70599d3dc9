"""State of the present boot that outlives restarts of the daemon: evidence against GPUs, the GPUs, and the listed devices."""

import logging
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from gpu_plugin.config.words import counted
from gpu_plugin.devices.device import Resource, is_placeholder
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.health.evidence import Evidence, decode
from gpu_plugin.state.directory import StateDirectory
from gpu_plugin.state.log import DEVICES, GPUS, HEALTH, StateLog
from gpu_plugin.state.records import (
    HANDOVER_FILE,
    KNOWN,
    DeviceRecord,
    GpuRecord,
    HealthRecord,
    by_name,
    resources,
)

T = TypeVar("T")

log = logging.getLogger(__name__)


class Remembered(msgspec.Struct, frozen=True):
    """Devices that an earlier process listed, and devices that pods held under names that it did not list."""

    listed: tuple[Resource, ...] = ()
    foreign: tuple[Resource, ...] = ()


class Memory:
    """Reads and writes the state log for one boot. Ignores content of another boot: the hardware may have changed since.

    Orders of an operator (cordons) outlive boots. The reading methods return what `log.load` has read.
    """

    def __init__(self, state: StateDirectory, boot_id: str) -> None:
        self._state = state
        self._boot_id = boot_id
        self.log = StateLog(state.path)

    def booted(self, boot_id: str) -> None:
        """Set the boot id of all later reads and writes."""
        self._boot_id = boot_id

    def evidence(self) -> tuple[Evidence, ...]:
        """Return the last evidence that an earlier process of this boot wrote, and entries that outlive boots. Blocks."""
        memory = self._latest(HEALTH, HealthRecord)
        return (*(() if memory is None else self._entries(HEALTH, memory)), *self.handed_over())

    def hand_over(self, evidence: tuple[Evidence, ...]) -> bool:
        """Write evidence that this daemon found after it had unlocked the state directory. Return True on success. Blocks."""
        return self._state.write(HANDOVER_FILE, {"boot_id": self._boot_id, "evidence": evidence})

    def handed_over(self) -> tuple[Evidence, ...]:
        """Return the evidence that a former daemon found during a takeover. Blocks."""
        memory = self._state.read(HANDOVER_FILE, HealthRecord)
        return () if memory is None else self._entries(HANDOVER_FILE, memory)

    def forget_handover(self) -> None:
        """Remove the file with a former daemon's evidence, which is now in the log. Blocks."""
        (self._state.path / HANDOVER_FILE).unlink(missing_ok=True)

    def taken_back(self) -> tuple[Evidence, ...]:
        """Return the evidence of another daemon that used the state directory. Blocks."""
        self.log.load()
        return self.evidence()

    def _latest(self, kind: str, shape: type[T]) -> T | None:
        """Return the record in force; None if there is none, or if it is invalid, which is logged."""
        content = self.log.latest(kind)
        if content is None:
            return None
        try:
            return msgspec.json.decode(content.decode(), type=shape)
        except (ValueError, RecursionError) as error:
            log.error("the record of %s in %s is invalid and left out: %s", kind, self._state.path, error)  # noqa: TRY400
            return None

    def _entries(self, source: str, memory: HealthRecord) -> tuple[Evidence, ...]:
        """Return the entries of this boot and the entries that outlive boots. Log invalid entries."""
        found, faults = [], []
        for place, raw in enumerate(memory.evidence):
            try:
                found.append(decode(raw))
            except ValueError as error:
                faults.append(f"entry {place} is invalid and left out: {error}")
        if faults:
            more = f" (and {counted(len(faults) - 1, 'more fault')})" if len(faults) > 1 else ""
            log.error("%s in %s: %s%s", source, self._state.path, faults[0], more)
        return tuple(each for each in found if each.boot_id == self._boot_id or each.lasts)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that an earlier process of this boot wrote."""
        memory = self._latest(GPUS, GpuRecord)
        return memory.gpus if memory is not None and memory.boot_id == self._boot_id else ()

    def before(self) -> tuple[Gpu, ...]:
        """Return the GPUs that the node had in an earlier boot and that no process of this boot has found."""
        memory = self._latest(GPUS, GpuRecord)
        if memory is None:
            return ()
        return memory.absent if memory.boot_id == self._boot_id else (*memory.gpus, *memory.absent)

    def devices(self) -> Remembered:
        """Return devices that an earlier process of this boot listed, and devices that pods held under unlisted names."""
        memory = self._latest(DEVICES, DeviceRecord)
        if memory is None or memory.boot_id != self._boot_id:
            return Remembered()
        return Remembered(resources(memory.resources), resources(memory.foreign))

    def write_evidence(self, evidence: tuple[Evidence, ...]) -> bool:
        """Write the evidence, which then outlives this process. Does not wait for the disk. Return True on success."""
        return self.log.write(HEALTH, {"boot_id": self._boot_id, "evidence": evidence})

    def write_hardware(self, node: Node, listed: Iterable[Resource], foreign: Iterable[Resource] = ()) -> bool:
        """Write GPUs and devices, and the whole log to the disk, so that it outlives a power failure. Return True on success.

        While no GPU has been found, the records of GPUs and devices stay unchanged.
        """
        written = True
        if node.gpus:
            known, absent = (
                [
                    {name: getattr(gpu, name) for name in KNOWN}
                    for gpu in gpus
                    if gpu.uuid and not is_placeholder(gpu.uuid)
                ]
                for gpus in (node.gpus, node.absent)
            )
            written = self.log.write(GPUS, {"boot_id": self._boot_id, "gpus": known, "absent": absent})
            devices = {"boot_id": self._boot_id, "resources": by_name(listed), "foreign": by_name(foreign)}
            written = self.log.write(DEVICES, devices) and written
        return self.log.sync() and written
