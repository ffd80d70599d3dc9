"""Write changed state in the background: evidence against GPUs at once, hardware and lists soon after."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import anyio
import msgspec

from gpu_plugin.devices.device import Resource
from gpu_plugin.devices.node import Node
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.threads import SlowCall
from gpu_plugin.state.memory import Memory

PATIENCE = 10.0  # seconds for a write
RETRY = 5.0  # seconds between a failed write and the next attempt
LAST_WRITE = 0.2  # seconds at the exit for the running writes, and for each of the last two writes after them
WRITTEN_SOON = 1.0  # seconds that the reply to an operator's order waits until the order is written


class Known(msgspec.Struct, frozen=True):
    """The present state. `revision` grows whenever `evidence` changes. `listed` has the devices that the kubelet received.

    `foreign` has devices that pods hold under names that are not listed.
    """

    revision: int
    evidence: tuple[Evidence, ...]
    node: Node
    listed: tuple[Resource, ...]
    foreign: tuple[Resource, ...] = ()

    @property
    def nothing(self) -> bool:
        """True if there is no state yet: no GPU was found, there is no evidence, and no operator gave an order."""
        return not (self.node.gpus or self.evidence or self.revision)


class Knowledge(Protocol):
    """The source of everything that a restart must remember."""

    @property
    def revision(self) -> int:
        """`Known.revision`, at less cost."""

    def known(self) -> Known:
        """Everything as of now."""


class Recorder:
    """Writes changed state on threads. If changes are faster than writes, only the newest state is written.

    The evidence against GPUs has a separate thread: it must be written before the kubelet receives a change of health, and its
    write does not wait for the disk.
    """

    def __init__(self, memory: Memory, knowledge: Knowledge, unsaved: Pulse) -> None:
        """`unsaved` rings when there is something new to write. Only on the event loop's thread."""
        self._memory = memory
        self._knowledge = knowledge
        self._unsaved = unsaved
        self._attempt_ended = Pulse()
        self._attempted = 0
        self._saved = 0
        self._durable = True
        self._runs = False
        self._evidence, self._hardware = (SlowCall[bool](name) for name in ("health", "hardware"))

    async def run(self) -> None:
        """Write until cancelled. Then write the last state once more, for at most 3 * LAST_WRITE seconds."""
        self._runs = True
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write_evidence_changes)
                tasks.start_soon(self._write_hardware_changes)
        finally:
            self._runs = False
            with anyio.CancelScope(shield=True):
                known = self._knowledge.known()
                if not known.nothing:
                    with anyio.move_on_after(LAST_WRITE):  # this wait does not shorten the time for the last writes
                        await self.hanging_writes()
                    if await _write_within(
                        self._evidence, partial(self._memory.write_evidence, known.evidence), LAST_WRITE
                    ):
                        self._saved = self._attempted = known.revision
                    await _write_within(self._hardware, partial(self._write_hardware, known), LAST_WRITE)

    def look(self) -> None:
        """Request a write, which repairs the log, if a file was removed, renamed or replaced. Call on the event loop's thread."""
        if not self._memory.log.in_place:
            self._unsaved.ring()

    @property
    def writes(self) -> bool:
        """True while a write runs, even if it hangs since the end of `run`."""
        return self._evidence.under_way or self._hardware.under_way

    @property
    def trouble(self) -> str:
        """A sentence about state that cannot be written; empty if all state is written."""
        if self._saved < self._attempted:
            return "the health of GPUs and operators' orders cannot be written: they would be lost at a restart"
        return (
            ""
            if self._durable
            else "GPUs and devices cannot be written: they would be lost at a restart; the log has the reason"
        )

    async def written(self, seconds: float = WRITTEN_SOON) -> bool:
        """Wait until the present evidence is written, for at most `seconds` and only while `run` runs. Return True if it is."""
        revision = self._knowledge.revision
        if self._saved < revision and self._runs:
            self._unsaved.ring()
            with anyio.move_on_after(seconds):
                while self._attempted < revision:
                    await self._attempt_ended.wait()
        return self._saved >= revision

    async def all_written(self) -> None:
        """Wait until the present evidence is written."""
        revision = self._knowledge.revision
        while self._saved < revision:
            await self._attempt_ended.wait()

    async def hanging_writes(self) -> None:
        """Wait until all running writes have returned."""
        await self._evidence.wait()
        await self._hardware.wait()

    async def _write_evidence_changes(self) -> None:
        while True:
            known = self._knowledge.known()
            saved = known.nothing or await _write_within(
                self._evidence, partial(self._memory.write_evidence, known.evidence), PATIENCE
            )
            self._attempted = known.revision
            self._saved = known.revision if saved else self._saved
            self._attempt_ended.ring()
            if self._knowledge.revision == known.revision:
                await self._unsaved.wait(None if saved else RETRY)

    async def _write_hardware_changes(self) -> None:
        while True:
            known = self._knowledge.known()
            if self._attempted < known.revision:
                self._unsaved.ring()
            while self._attempted < known.revision:  # this write also writes the evidence in the log to the disk
                await self._attempt_ended.wait()
            has_evidence = self._saved >= known.revision
            saved = known.nothing or await _write_within(self._hardware, partial(self._write_hardware, known), PATIENCE)
            self._durable = saved
            now = self._knowledge.known()
            same = (now.listed, now.foreign) == (known.listed, known.foreign)
            if not (saved and has_evidence):
                await self._unsaved.wait(RETRY)
            elif same and now.node is known.node and now.revision == known.revision:
                await self._unsaved.wait()

    def _write_hardware(self, known: Known) -> bool:
        return self._memory.write_hardware(known.node, known.listed, known.foreign)


async def _write_within(writing: SlowCall[bool], write: Callable[[], bool], patience: float) -> bool:
    """Write, and return True if that succeeded within `patience` seconds. While a write of `writing` hangs, no other begins."""
    try:
        return await writing.fresh(write, patience)
    except Exception:  # noqa: BLE001 - any error means that the state is not written
        return False
