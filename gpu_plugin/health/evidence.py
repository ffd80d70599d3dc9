"""A latch as it is written down: enough to hold the same verdict after a restart."""

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

CORRECTED = 1.0
"""Seconds by which a wall clock was set at least, where it was: its zero is read from two clocks, one after the other."""

LATEST = 2.0**33
"""Unix seconds beyond which nothing that was written down can have happened: the year 2242."""

LONGEST = 86400.0
"""Seconds beyond which nothing is counted or held back by the clock: a day, in `flapping.LONGEST` and in the table of Xids."""

_GREATEST = LATEST**2
"""Beyond any number that a signal remembers."""

_DEEPEST = 6
"""Levels beyond any nesting of what a signal remembers."""


BACKGROUND = LatchKey("background")
"""Stands where a signal is written down, for what is remembered of a GPU beside latches; there is no signal of this name."""


class Background(Memory, frozen=True):
    """`action` is what the driver said last that it asks for (`Sample.recovery_action`); None: nothing yet."""

    action: int | None = None

    lasting: ClassVar[bool] = True  # it is written down where there is something to it


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of the file: what is held against a GPU, by which signal, since when (Unix seconds), and the proof that ends it.

    `boot_id` is the boot in which it was true, `zero` the Unix time at which the clock of that boot stood at 0, as the process
    that wrote this down had it: where a later process has another, the wall clock was corrected, and every time is shifted.
    `memory` is what the signal remembers, by the names of its type's fields, and the rest what `Latch` says of the same names.
    A `verdict` of OK holds nothing against the GPU: some signals remember a count or a baseline.
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
        """A latch of a GPU."""
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
        """Which latch it was."""
        return LatchKey(self.signal, self.part, self.device)

    @property
    def known(self) -> bool:
        """Whether this version has such a signal, and latches of it that are told apart so."""
        if self.signal == BACKGROUND.signal:
            return self.key == BACKGROUND and self.verdict == Verdict.OK.name
        signal = SIGNALS.get(self.signal)
        return signal is not None and (signal.parts is None or signal.parts.fullmatch(self.part) is not None)

    @property
    def lasts(self) -> bool:
        """Whether the entry outlives boots, as an operator's cordon does."""
        return self.known and self.key != BACKGROUND and SIGNALS[self.signal].lasts

    @property
    def possible(self) -> bool:
        """Whether the entry can be true: its times are times, and its numbers such as a signal remembers.

        A time a little before 0 is one: the wall clock may have been corrected by more than it told. It is taken for 0.
        """
        if not (all(map(_time, (self.since, self.taken, self.reset_after))) and _sane(self.memory, -LATEST)):
            return False
        if not self.known:
            return _sane(self.memory)
        return all(_plausible(value, of) for value, of in values(_memory(self)))

    def latch(self, zero: float | None = None) -> AnyLatch:
        """The latch of a known signal as it was, its times by a wall clock of this `zero`.

        A verdict that another version wrote is taken for the worst, a proof for that of a reset. What the signal cannot read
        of its memory it does not remember.
        """
        by = 0.0 if zero is None or self.zero is None else zero - self.zero
        by = by if abs(by) >= CORRECTED else 0.0
        memory = _memory(self)
        # The counters that persistence mode suspended are not among them: the driver was closed since
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
        """The entry as a process with a wall clock of this `zero` would have written it down."""
        if zero is None or self.zero is None or abs(zero - self.zero) < CORRECTED or not self.known:
            return self
        return Evidence.of(self.boot_id, self.uuid, self.key, self.latch(zero), zero)


def newer(evidence: Iterable[Evidence], than: Iterable[Evidence]) -> tuple[Evidence, ...]:
    """The entries that hold something against a GPU which no entry of `than` held against it then, or not as severely."""
    before = {(entry.uuid, entry.key, entry.since, entry.verdict) for entry in than}
    return tuple(
        entry
        for entry in evidence
        if entry.verdict != Verdict.OK.name and (entry.uuid, entry.key, entry.since, entry.verdict) not in before
    )


def news(latch: AnyLatch | None) -> tuple[object, ...]:
    """The parts of a latch that are written down when they change: a report or a restart needs them."""
    if latch is None:
        return ()
    memory = latch.memory
    if latch.verdict is Verdict.OK:
        return (memory.news,) if memory.lasting else ()
    recovery = latch.recovery.before or latch.recovery
    done = (recovery.reset, recovery.rebound, latch.overridden)
    return (latch.verdict, latch.detail, latch.proof, done, marks_news(recovery.marks), memory.counted)


def marks_news(marks: Marks) -> tuple[object, ...]:
    """The parts of a GPU's marks that are written down when they change.

    Energy counts up all the time: each doubling is written down, which is seldom and enough: a reset while nobody looks shows
    until a quarter of what had been used then was used again.
    """
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
    """Whether a number that is declared so can be true; words always can."""
    if declared == Celsius or not isinstance(value, int | float):
        return True
    if declared == Moment:
        return _time(value)
    return 0 <= value <= (LONGEST if declared == Span else _GREATEST)


def _sane(value: object, least: float = 0, depth: int = 0) -> bool:
    """Whether all numbers are such as a signal remembers, and nested no deeper; `least` is the least of them."""
    if isinstance(value, Mapping | list | tuple):
        inside = value.values() if isinstance(value, Mapping) else value
        return depth < _DEEPEST and all(_sane(each, least, depth + 1) for each in inside)
    return not isinstance(value, int | float) or least <= value < _GREATEST


_PROOFS: Mapping[str, Proof] = {proof.value: proof for proof in Proof}
