"""Writes down what changed, beside everything else: what is held against GPUs at once, hardware and lists soon after."""

from collections.abc import Callable
from functools import partial

import anyio
import msgspec

from gpu_plugin.devices.device import Resource
from gpu_plugin.devices.node import Node
from gpu_plugin.health.evidence import Evidence
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.slow_call import SlowCall
from gpu_plugin.runtime.threads import Workers
from gpu_plugin.state.memory import Memory

PATIENCE = 10.0  # seconds for a write of what must outlive the process
RETRY = 5.0  # seconds until a failed write is tried again
LAST_WRITE = 0.2  # seconds at the exit, for what is being written then and for each of the last two writes after it
WRITTEN_SOON = 1.0  # seconds that an operator is kept waiting until what was asked for is written down


class Known(msgspec.Struct, frozen=True):
    """What is known now: `revision` grows whenever `evidence` changes, `listed` is what the kubelet was told of.

    `foreign` is what pods hold under names that are not listed.
    """

    revision: int
    evidence: tuple[Evidence, ...]
    node: Node
    listed: tuple[Resource, ...]
    foreign: tuple[Resource, ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether nothing has been learnt yet, and nobody has ordered anything."""
        return not (self.node.gpus or self.evidence or self.revision)


class Recorder:
    """Writes down what changed, on threads that nobody waits for long; the newest alone where changes come fast.

    What is held against GPUs is written on a thread of its own: it comes before others are told, and waits for no disk.
    """

    def __init__(self, memory: Memory, known: Callable[[], Known], revision: Callable[[], int]) -> None:
        """Takes where to write, and how to learn at any time what is known, and of which `revision` that is alone."""
        self._memory = memory
        self._known = known
        self._revision = revision
        self._unsaved = Pulse()
        self._attempt_ended = Pulse()
        self._attempted = 0
        self._saved = 0
        self._durable = True
        self._runs = False
        self._threads = Workers("health-file"), Workers("state-files")
        self._evidence, self._hardware = (SlowCall[bool](threads.begin) for threads in self._threads)

    def changed(self) -> None:
        """Has what is known written down soon. From the event loop's thread."""
        self._unsaved.ring()

    async def run(self) -> None:
        """Writes until cancelled, and once more then: what was learnt last is worth a moment of the exit, and no more."""
        self._runs = True
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write_evidence_changes)
                tasks.start_soon(self._write_hardware_changes)
        finally:
            self._runs = False
            with anyio.CancelScope(shield=True):
                known = self._known()
                if not known.nothing:
                    with anyio.move_on_after(LAST_WRITE):  # none of this is taken from the time for the last writes
                        await self.hanging_writes()
                    if await _write_within(self._evidence, partial(self._memory.write_evidence, known.evidence), LAST_WRITE):
                        self._saved = self._attempted = known.revision
                    await _write_within(self._hardware, partial(self._write_durably, known), LAST_WRITE)
            for threads in self._threads:
                threads.close()

    def look(self) -> None:
        """Has all that is known written down again where something of it is gone. From the event loop's thread."""
        if not self._memory.in_place():
            self._unsaved.ring()

    @property
    def writes(self) -> bool:
        """Whether a write is under way, also one that hangs since `run` ended."""
        return self._evidence.under_way or self._hardware.under_way

    @property
    def trouble(self) -> str:
        """What a restart would not remember, in a sentence; empty while all is written down."""
        if self._saved < self._attempted:
            return "what is held against GPUs, and what operators ordered, cannot be written down: a restart would forget it"
        return "" if self._durable else "a file cannot be written, as the log says: a restart would not remember all"

    async def written(self, seconds: float = WRITTEN_SOON) -> bool:
        """Whether what is held against GPUs now outlives this process; waits `seconds` at most, not at all unless `run` runs."""
        revision = self._revision()
        if self._saved < revision and self._runs:
            self.changed()
            with anyio.move_on_after(seconds):
                while self._attempted < revision:
                    await self._attempt_ended.wait()
        return self._saved >= revision

    async def all_written(self) -> None:
        """Wait until what is held against GPUs now outlives this process."""
        revision = self._revision()
        while self._saved < revision:
            await self._attempt_ended.wait()

    async def hanging_writes(self) -> None:
        """Wait until each write that is under way has returned."""
        await self._evidence.wait()
        await self._hardware.wait()

    async def _write_evidence_changes(self) -> None:
        while True:
            known = self._known()
            saved = known.nothing or await _write_within(
                self._evidence, partial(self._memory.write_evidence, known.evidence), PATIENCE
            )
            self._attempted = known.revision
            self._saved = known.revision if saved else self._saved
            self._attempt_ended.ring()
            if self._revision() == known.revision:
                await self._unsaved.wait(None if saved else RETRY)

    async def _write_hardware_changes(self) -> None:
        while True:
            known = self._known()
            if self._attempted < known.revision:
                self._unsaved.ring()
            while self._attempted < known.revision:  # what the journal has of it is what is written here
                await self._attempt_ended.wait()
            journaled = self._saved >= known.revision
            saved = known.nothing or await _write_within(self._hardware, partial(self._write_durably, known), PATIENCE)
            self._durable = saved
            now = self._known()
            same = (now.listed, now.foreign) == (known.listed, known.foreign)
            if not (saved and journaled):
                await self._unsaved.wait(RETRY)
            elif same and now.node is known.node and now.revision == known.revision:
                await self._unsaved.wait()

    def _write_durably(self, known: Known) -> bool:
        return self._memory.write_durably(known.evidence, known.node, known.listed, known.foreign)


async def _write_within(writing: SlowCall[bool], write: Callable[[], bool], patience: float) -> bool:
    """Whether it is written within so many seconds. While one write hangs, no other of its kind is begun."""
    try:
        return await writing.fresh(write, patience)
    except Exception:  # noqa: BLE001 - whatever it is, it is not written
        return False
