"""The stored entry of a latch, from which a later process restores the same verdict."""

from collections.abc import Iterable
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from gpu_plugin.health.latch import (
    AnyLatch,
    LatchKey,
    Marks,
    Memory,
    Verdict,
    shifted,
)
from gpu_plugin.health.signals import SIGNALS

# Smallest difference in seconds that counts as a corrected wall clock.
# A smaller one may arise because the two clocks behind `Evidence.zero` are read one after the other.
CORRECTED = 1.0

# The key of the entry that stores a GPU's marks and recovery action. There is no signal of this name.
BACKGROUND = LatchKey("background")


class Background(Memory, frozen=True):
    """`action` is the latest recovery action that the driver reported (`Sample.recovery_action`), None before the first."""

    action: int | None = None

    lasting: ClassVar[bool] = True  # `GpuRecord.written` leaves it out if it is empty


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of the file: a latch of one GPU, as `Latch.stored` returns it.

    `boot_id` is the boot in which the entry was true. `zero` is the Unix time at which the clock of that boot read 0, according
    to the process that stored the entry. If a later process finds another value, the wall clock was corrected, and every time
    is shifted. With a verdict of OK the latch is closed: some signals store a count or a baseline.
    """

    boot_id: str
    uuid: str
    signal: str
    latch: AnyLatch
    part: str = ""
    device: str = ""
    zero: float | None = None

    @classmethod
    def of(cls, boot_id: str, uuid: str, key: LatchKey, latch: AnyLatch, zero: float | None = None) -> "Evidence":
        """Return the entry for a latch of a GPU."""
        return cls(boot_id, uuid, key.signal, latch.stored(), key.part, key.device, zero)

    @property
    def key(self) -> LatchKey:
        """The key of the latch."""
        return LatchKey(self.signal, self.part, self.device)

    @property
    def known(self) -> bool:
        """True if this version has the signal, and the signal can have a latch with this `part`."""
        if self.signal == BACKGROUND.signal:
            return self.key == BACKGROUND and self.latch.verdict is Verdict.OK
        signal = SIGNALS.get(self.signal)
        return signal is not None and (signal.parts is None or signal.parts.fullmatch(self.part) is not None)

    @property
    def lasts(self) -> bool:
        """True if the entry outlives boots, as an operator's cordon does."""
        return self.known and self.key != BACKGROUND and SIGNALS[self.signal].lasts

    def moved(self, zero: float | None) -> "Evidence":
        """Return the entry that a process with a wall clock of this `zero` would have stored."""
        if zero is None or self.zero is None or abs(zero - self.zero) < CORRECTED or not self.known:
            return self
        latch = shifted(self.latch, zero - self.zero)
        return replace(self, latch=latch if self.latch.since else replace(latch, since=0.0), zero=zero)


def decode(raw: bytes | msgspec.Raw) -> Evidence:
    """Return an entry of the file. A memory that cannot be true, or that its signal cannot read, is replaced by an empty one.

    Raises:
        ValueError: it is no entry, or a time of its latch cannot be true.
    """
    try:
        found = msgspec.json.decode(raw, type=Evidence)
        if found.known:
            memory = _memory(found)
            recovery = replace(found.latch, memory=memory).stored().recovery  # the other fields of it are never stored
            found = replace(found, latch=replace(found.latch, memory=memory, recovery=recovery))
        return replace(found, latch=shifted(found.latch, 0.0))  # a time below 0 becomes 0
    except (msgspec.MsgspecError, RecursionError) as error:  # RecursionError: marks or recoveries in each other
        raise ValueError(str(error)) from None


def _memory(entry: Evidence) -> Memory:
    """Return the memory of an entry of a known signal; an empty memory if it cannot be true or cannot be read."""
    blank = Background() if entry.key == BACKGROUND else SIGNALS[entry.signal].memory
    try:
        return msgspec.convert(entry.latch.memory, type(blank))
    except msgspec.ValidationError:
        return blank


def newer(evidence: Iterable[Evidence], than: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """Return the open entries that `than` lacks, by GPU, latch, start and verdict."""
    before = {(entry.uuid, entry.key, entry.latch.since, entry.latch.verdict) for entry in than}
    return tuple(
        entry
        for entry in evidence
        if entry.latch.verdict is not Verdict.OK
        and (entry.uuid, entry.key, entry.latch.since, entry.latch.verdict) not in before
    )


def stored_parts(latch: AnyLatch | None) -> tuple[object, ...]:
    """Return the parts of a latch whose change must be stored, because a report or a restart needs them."""
    if latch is None:
        return ()
    memory = latch.memory
    if latch.verdict is Verdict.OK:
        return (memory.counted_closed,) if memory.lasting else ()
    recovery = latch.recovery.before or latch.recovery
    done = (recovery.reset, recovery.rebound, latch.overridden)
    return (latch.verdict, latch.detail, latch.proof, done, stored_marks(recovery.marks), memory.counted)


def stored_marks(marks: Marks) -> tuple[object, ...]:
    """Return the parts of a GPU's marks whose change must be stored."""
    # Energy grows all the time, and is stored at each doubling, which is seldom. The stored value is then at least half of the
    # energy before a reset, so a reset while no process runs shows until the GPU has used a quarter of that energy again.
    energy = None if marks.energy is None else marks.energy.bit_length()
    return marks.ecc, marks.binding, marks.counting, energy
