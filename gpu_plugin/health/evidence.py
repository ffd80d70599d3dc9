"""The stored form of a latch, from which a later process restores the same verdict."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import msgspec

from gpu_plugin.health.hysteresis import Celsius
from gpu_plugin.health.latch import (
    AnyLatch,
    Latch,
    LatchKey,
    Marks,
    Memory,
    Moment,
    Proof,
    Recovery,
    Span,
    Verdict,
    corrected,
    shifted,
    values,
)
from gpu_plugin.health.signals import SIGNALS

# Smallest difference in seconds that counts as a corrected wall clock.
# A smaller one may arise because the two clocks behind `Evidence.zero` are read one after the other.
CORRECTED = 1.0

LATEST = 2.0**33  # The latest possible time of an entry, in Unix seconds: the year 2242

# The longest time in seconds that a signal counts or withholds: a day, as in `flapping.LONGEST` and the table of Xids
LONGEST = 86400.0

_GREATEST = LATEST**2  # Greater than any number in a signal's memory
_DEEPEST = 6  # Deeper than the nesting of any signal's memory


# The key of the entry that stores a GPU's marks and recovery action. There is no signal of this name.
BACKGROUND = LatchKey("background")


class Background(Memory, frozen=True):
    """`action` is the latest recovery action that the driver reported (`Sample.recovery_action`), None before the first."""

    action: int | None = None

    lasting: ClassVar[bool] = True  # `GpuRecord.written` leaves it out if it is empty


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of the file: a latch of one GPU, with its signal, its start (Unix seconds) and the proof that closes it.

    `boot_id` is the boot in which the entry was true. `zero` is the Unix time at which the clock of that boot read 0, according
    to the process that stored the entry. If a later process finds another value, the wall clock was corrected, and every time
    is shifted. `memory` is the signal's memory, by the names of its type's fields. The other fields are those of `Latch` and
    of its `Recovery` and `Marks`. With a `verdict` of OK the latch is closed: some signals store a count or a baseline.
    """

    boot_id: str
    uuid: str
    signal: str
    verdict: str
    detail: str
    since: float
    proof: str = Proof.READING.value
    part: str = ""
    device: str = ""
    energy: int | None = None
    ecc: int | None = None
    binding: int | None = None
    counting: int | None = None
    taken: float | None = None
    opening: int | None = None
    reset: bool = False
    rebound: bool = False
    reset_after: float | None = None
    overridden: bool = False
    zero: float | None = None
    memory: dict[str, Any] = {}

    @classmethod
    def of(cls, boot_id: str, uuid: str, key: LatchKey, latch: AnyLatch, zero: float | None = None) -> "Evidence":
        """Return the entry for a latch of a GPU."""
        memory, recovery = latch.memory, latch.recovery.before or latch.recovery
        marks = recovery.marks
        memory = memory.stored() if latch.verdict is Verdict.OK else memory.stored_open()
        return cls(
            boot_id=boot_id,
            uuid=uuid,
            verdict=latch.verdict.name,
            detail=latch.detail,
            since=latch.since,
            proof=latch.proof.value,
            reset=recovery.reset,
            rebound=recovery.rebound,
            reset_after=recovery.since,
            overridden=latch.overridden,
            zero=zero,
            memory=msgspec.json.decode(msgspec.json.encode(memory)) if memory.__struct_fields__ else {},
            **key._asdict(),
            energy=marks.energy,
            ecc=marks.ecc,
            binding=marks.binding,
            counting=marks.counting,
            taken=marks.taken,
            opening=marks.opening,
        )

    @property
    def key(self) -> LatchKey:
        """The key of the latch."""
        return LatchKey(self.signal, self.part, self.device)

    @property
    def known(self) -> bool:
        """True if this version has the signal, and the signal can have a latch with this `part`."""
        if self.signal == BACKGROUND.signal:
            return self.key == BACKGROUND and self.verdict == Verdict.OK.name
        signal = SIGNALS.get(self.signal)
        return signal is not None and (signal.parts is None or signal.parts.fullmatch(self.part) is not None)

    @property
    def lasts(self) -> bool:
        """True if the entry outlives boots, as an operator's cordon does."""
        return self.known and self.key != BACKGROUND and SIGNALS[self.signal].lasts

    @property
    def possible(self) -> bool:
        """True if the entry can be true: its times and numbers are in the ranges that signals use.

        A time below 0 is allowed, because a correction of the wall clock may exceed the time itself. `latch` reads it as 0.
        """
        if not (all(map(_time, (self.since, self.taken, self.reset_after))) and _sane(self.memory, -LATEST)):
            return False
        if not self.known:
            return _sane(self.memory)
        return all(_plausible(value, of) for value, of in values(_memory(self)))

    def latch(self, zero: float | None = None) -> AnyLatch:
        """Return the latch of a known signal, with its times by a wall clock of this `zero`.

        A verdict that this version does not know becomes FATAL, and an unknown proof becomes that of a reset. A memory that
        the signal cannot read is replaced by an empty one.
        """
        by = 0.0 if zero is None or self.zero is None else zero - self.zero
        by = by if abs(by) >= CORRECTED else 0.0
        memory = _memory(self)
        # `suspended` is left out: the driver was closed since, which sets those counters back
        marks = Marks(self.energy, self.ecc, self.binding, self.counting, self.taken, self.opening)
        return Latch(
            shifted(memory, by),
            Verdict.__members__.get(self.verdict, Verdict.FATAL),
            self.detail,
            corrected(self.since, by) if self.since else self.since,
            _PROOFS.get(self.proof, Proof.RESET),
            shifted(Recovery(marks, self.reset, self.rebound, since=self.reset_after), by),
            self.overridden,
        )

    def moved(self, zero: float | None) -> "Evidence":
        """Return the entry that a process with a wall clock of this `zero` would have stored."""
        if zero is None or self.zero is None or abs(zero - self.zero) < CORRECTED or not self.known:
            return self
        return Evidence.of(self.boot_id, self.uuid, self.key, self.latch(zero), zero)


def newer(evidence: Iterable[Evidence], than: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """Return the open entries that `than` lacks, by GPU, latch, start and verdict."""
    before = {(entry.uuid, entry.key, entry.since, entry.verdict) for entry in than}
    return tuple(
        entry
        for entry in evidence
        if entry.verdict != Verdict.OK.name and (entry.uuid, entry.key, entry.since, entry.verdict) not in before
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


def _memory(entry: Evidence) -> Memory:
    blank = Background() if entry.signal == BACKGROUND.signal else SIGNALS[entry.signal].memory
    try:
        return msgspec.convert(entry.memory, type(blank))
    except msgspec.ValidationError:
        return blank


def _time(at: float | None) -> bool:
    return at is None or -LATEST < at < LATEST


def _plausible(value: object, declared: object) -> bool:
    """Return True if a number is in the range of its declared type. Words always are."""
    if declared == Celsius or not isinstance(value, int | float):
        return True
    if declared == Moment:
        return _time(value)
    return 0 <= value <= (LONGEST if declared == Span else _GREATEST)


def _sane(value: object, least: float = 0, depth: int = 0) -> bool:
    """Return True if all numbers are at least `least` and below `_GREATEST`, and nested less than `_DEEPEST` levels deep."""
    if isinstance(value, Mapping | list | tuple):
        inside = value.values() if isinstance(value, Mapping) else value
        return depth < _DEEPEST and all(_sane(each, least, depth + 1) for each in inside)
    return not isinstance(value, int | float) or least <= value < _GREATEST


_PROOFS: Mapping[str, Proof] = {proof.value: proof for proof in Proof}
