"""Verdicts, and the latch that keeps a verdict from its evidence until there is proof of recovery."""

from enum import IntEnum, StrEnum
from functools import cache
from itertools import repeat
from types import NoneType
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, Self, TypeVar, get_args

import msgspec
from msgspec.structs import replace

from gpu_plugin.health.observation import Sample

CLEAN_SAMPLES = 3  # Samples in a row without a fault after which a reset GPU counts as fit


class Verdict(IntEnum):
    """How bad a signal is: a greater number is worse."""

    OK = 0
    APP = 1  # An application's own error: it is counted, and has no other effect
    DEGRADED = 2  # An operator should look at it. Pods still get the GPU.
    FATAL = 3  # Not fit for use: Unhealthy to the kubelet

    @classmethod
    def _missing_(cls, _value: object) -> "Verdict":
        return cls.FATAL  # stored by a later version


class Proof(StrEnum):
    """The proof that closes a latch."""

    READING = "reading"  # The signal's own readings, by its exit rule
    # Time without another such event: an application caused the fault, and the GPU works on.
    APPLICATION = "application"
    QUIET = "quiet"  # A long time without another such event, or the proof of a reset
    # The GPU was reset, the driver reloaded or the node booted, and the GPU has answered without a fault since.
    RESET = "reset"
    REBOOT = "reboot"  # The node was booted or the GPU enumerated again, and the GPU has answered without a fault since
    RMA = "rma"  # Replacement of the part, or an operator's override. It never closes by itself.
    OPERATOR = "operator"  # An order of the operator

    @classmethod
    def _missing_(cls, _value: object) -> "Proof":
        return cls.RESET  # stored by a later version


# Advice that leads to the proofs of these names
RESET = "reset the GPU when no pod has it"
REBOOT = "drain the node and reboot it; if the GPU does not come back, have it serviced"

# The ranges of stored numbers. A number out of its range cannot be true.
# A Unix time in seconds, up to the year 2242. It is shifted if the wall clock was corrected between two processes, by more than
# the time itself perhaps.
Moment = Annotated[float, msgspec.Meta(gt=-(2.0**33), lt=2.0**33)]
# Seconds: a day is the longest time that a signal counts or withholds.
Span = Annotated[float, msgspec.Meta(ge=0, le=86400)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]  # A number of readings, or a mask
Celsius = Annotated[int, msgspec.Meta(ge=-1000, le=1000)]  # °C, in the range of any sensor


DRAWN = 2_000_000  # mJ per second (2 kW): more than any GPU draws
SLACK_SECONDS = 5.0  # by which the driver's energy counter may lag behind the clock


class Marks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counters of a GPU that only a reset, a reload of the driver or a new enumeration sets back or changes; None: unknown.

    `energy` in mJ and `ecc` (uncorrected errors) are the driver's volatile counters, `binding` is `Sample.binding`. `taken` is
    the Unix time in seconds at which the energy was read. Counters are comparable if the samples have the same `counting`
    (`Sample.counting`).

    `opening` is the opening of the driver in which they were read. `suspended` has the counters of persistence mode while that
    is off. They are comparable again once it is on, if the driver was not closed since: closing the driver without persistence
    mode sets the counters back, too.
    """

    energy: int | None = None
    ecc: int | None = None
    binding: int | None = None
    counting: int | None = None
    taken: Moment | None = None
    opening: int | None = None
    suspended: "Marks | None" = None

    @classmethod
    def of(cls, seen: Sample, now: float) -> "Marks":
        """Return the marks of this sample alone, at Unix time `now`."""
        opening = (seen.counting or None) if seen.opening is None else seen.opening
        taken = None if seen.energy is None else now
        return cls(seen.energy, seen.ecc_uncorrected, seen.binding, seen.counting, taken, opening)

    def after(self, seen: Sample, now: float) -> "Marks":
        """Return the marks updated by this sample at Unix time `now`; the same object if nothing changed.

        A reading that the sample lacks keeps its value if it is comparable. The energy is unknown if it grew by more than any
        GPU can draw.
        """
        fresh = Marks.of(seen, now)
        if fresh.counting is None and self.counting is not None:
            # The counters may not be comparable: a count of 0 is no difference, a greater count is
            after = replace(self, ecc=fresh.ecc or self.ecc, binding=_first(fresh.binding, self.binding))
            return self if after == self else after
        base = self if self.counting is None else self.comparing(fresh)
        energy, taken = (base.energy, base.taken) if fresh.energy is None else (fresh.energy, now)
        after = Marks(
            energy if self.counting is None or base.leads_to(fresh) else None,
            _first(fresh.ecc, base.ecc),
            _first(fresh.binding, self.binding),
            _first(fresh.counting, self.counting),
            taken,
            _first(fresh.opening, self.opening),
            self._suspended(base, fresh),
        )
        return self if replace(after, taken=self.taken) == self else after

    def sure(self, seen: Sample, now: float) -> "Marks":
        """Return the marks updated by this sample, for evidence of the same moment.

        An energy that decreased and a binding that changed are unknown until the next sample: either the driver misread them,
        or the GPU was reset before the evidence. Suspended counters are left out, because the GPU may also have been reset
        since persistence mode was on.
        """
        after, before = self.after(seen, now), self.comparing(Marks.of(seen, now))
        after = after if after.suspended is None else replace(after, suspended=None)
        if before.fell_to(after):
            after = replace(after, energy=None, taken=None)
        if self.rebound_to(after):
            after = replace(after, binding=None)
        return after

    def completed(self, seen: Sample, now: float) -> "Marks":
        """Return the marks with unknown values filled from this sample. Known values stay, so that a later change shows."""
        fresh = Marks.of(seen, now)
        uncounted = self.counting is None and self.energy is None and self.ecc is None
        return replace(
            self,
            energy=_first(self.energy, fresh.energy),
            ecc=_first(self.ecc, fresh.ecc),
            binding=_first(self.binding, fresh.binding),
            counting=fresh.counting if uncounted else self.counting,
            taken=fresh.taken if self.energy is None else self.taken,
            opening=fresh.opening if uncounted else self.opening,
        )

    def comparing(self, fresh: "Marks") -> "Marks":
        """Return the marks with only the counters that are comparable with fresh ones, so that a difference is the GPU's own."""
        if fresh.counting is not None and self.counting == fresh.counting:
            return self
        aside = self.suspended
        if aside is not None and aside.counting == fresh.counting and not self._reopened(fresh):
            return replace(aside, binding=self.binding)
        return Marks(binding=self.binding)

    def leads_to(self, fresh: "Marks") -> bool:
        """Return True unless the energy of these comparable fresh marks grew by more than the GPU can have drawn."""
        if self.energy is None or fresh.energy is None or self.taken is None:
            return True
        return fresh.energy - self.energy <= self.drawn(fresh)

    def fell_to(self, fresh: "Marks") -> bool:
        """Return True if the energy of these comparable fresh marks is lower."""
        return self.energy is not None and fresh.energy is not None and fresh.energy < self.energy

    def rebound_to(self, fresh: "Marks") -> bool:
        """Return True if the fresh marks show another binding of the driver to the GPU."""
        return self.binding is not None and fresh.binding is not None and fresh.binding != self.binding

    def drawn(self, fresh: "Marks") -> float:
        """Return the most mJ that the GPU can have drawn between these marks and fresh ones; an unknown time counts as 0 s."""
        seconds = 0.0 if self.taken is None or fresh.taken is None else max(0.0, fresh.taken - self.taken)
        return DRAWN * (seconds + SLACK_SECONDS)

    def _suspended(self, base: "Marks", fresh: "Marks") -> "Marks | None":
        """Return the counters of persistence mode to keep with fresh marks; `base` are the marks comparable with the fresh ones.

        Return None after a reset, which set them back, too.
        """
        reset = base.fell_to(fresh) or self.rebound_to(fresh)
        if not fresh.counting or reset or self._reopened(fresh):
            return None
        if self.counting == 0:
            return replace(self, binding=None, suspended=None)
        return self.suspended

    def _reopened(self, fresh: "Marks") -> bool:
        """Return True if the driver was closed and opened between these marks and fresh ones."""
        return None not in (self.opening, fresh.opening) and self.opening != fresh.opening


def _first(one: int | None, other: int | None) -> int | None:
    return other if one is None else one


UNMARKED = Marks()  # The marks of a GPU without any reading


class Recovery(msgspec.Struct, frozen=True, omit_defaults=True):
    """Signs of a recovery since the evidence.

    `marks` are the latest marks of the GPU. `reset` is True if they showed that the GPU was reset or the driver reloaded,
    `rebound` if they showed that the GPU was enumerated again. `clean` is the number of clean looks in a row, up to
    CLEAN_SAMPLES. `since` (Unix seconds) is the time after which a reset happened that the energy counter showed, None if the
    counter did not show it. `before` is the state before a look that showed a reset, until the next look confirms that. Until
    then, `before` is stored.
    """

    marks: Marks = UNMARKED
    reset: bool = False
    rebound: bool = False
    clean: int = 0
    since: Moment | None = None
    before: "Recovery | None" = None

    @property
    def ended_before(self) -> bool:
        """True if a look showed a reset that the next look did not contradict, so that earlier faults are over."""
        return self.reset and self.before is None


UNPROVEN = Recovery()


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The memory of a signal, in addition to the fields of all latches. A signal that needs a memory defines a subclass.

    Its fields are stored for a restart, by their names. Times are declared as `Moment`, durations as `Span`, temperatures as
    `Celsius`, and other numbers as `Count`.
    """

    unstored: ClassVar[tuple[str, ...]] = ()  # Fields that are not stored
    # Fields that are not stored while the latch is open, either: progress towards closing
    progress: ClassVar[tuple[str, ...]] = ()

    @property
    def gathering(self) -> bool:
        """True if the next samples would decide something."""
        return False

    @property
    def lasting(self) -> bool:
        """True if it must be stored for a restart although the latch is closed."""
        return False

    @property
    def counted_closed(self) -> object:
        """The part that is stored when it changes, while the latch is closed."""
        return self

    @property
    def counted(self) -> object:
        """The part that is stored when it changes, while the latch is open: it counts towards a worse verdict."""
        return None

    def without(self, names: tuple[str, ...]) -> Self:
        """Return the memory with the defaults of these fields; the same object if nothing changes."""
        blank = type(self)()
        changed = {name: getattr(blank, name) for name in names if getattr(self, name) != getattr(blank, name)}
        return replace(self, **changed) if changed else self

    def stored(self) -> Self:
        """Return the memory of a closed latch as it is stored for a restart."""
        return self.without(self.unstored)

    def stored_open(self) -> Self:
        """Return the memory of an open latch as it is stored for a restart."""
        return self.stored().without(self.progress)

    def after_boot(self) -> Self:
        """Return the memory of an open latch after a boot, without progress that a boot invalidates."""
        return self.stored_open()

    def joined(self, _other: Self) -> Self:
        """Return the memory joined with that of the same GPU under another name: events that count towards a worse verdict."""
        return self


def shifted(value: Any, by: float, declared: Any = None) -> Any:
    """Return a value of this declared type with each `Moment` in it shifted by this correction of the wall clock in seconds."""
    types = get_args(declared)
    if value is not None and NoneType in types:
        return shifted(value, by, types[0])
    if isinstance(value, msgspec.Struct):
        return type(value)(*(shifted(getattr(value, name), by, of) for name, of in _fields(type(value))))
    if isinstance(value, tuple):
        of_each = repeat(types[0]) if types[-1] is ... else types
        return tuple(shifted(each, by, of) for each, of in zip(value, of_each, strict=False))
    return max(0.0, value + by) if declared == Moment and value is not None else value


@cache  # `msgspec.structs.fields` takes far longer than reading the fields
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.type) for field in msgspec.structs.fields(kind))


def merged(mine: tuple[float, ...], others: tuple[float, ...], most: int = 64) -> tuple[float, ...]:
    """Return the last `most` times of both rows, the oldest first, without duplicates."""
    return tuple(sorted({*mine, *others}))[-most:]


NOTHING = Memory()  # The memory of a signal that stores nothing of its own

M = TypeVar("M", bound=Memory)


class Latch(msgspec.Struct, Generic[M], frozen=True, omit_defaults=True):
    """The state of one signal for one GPU or MIG device: its verdict and its memory.

    `verdict` is OK while evidence is still being gathered. `since` is Unix time in seconds. `proof` is the proof that closes
    the latch, and `recovery` the progress of a proof that needs a reset or more. `overridden` is True if an operator stated
    that the GPU is fit despite the latch. `memory` is the signal's own.
    """

    memory: M
    verdict: Verdict = Verdict.OK
    detail: str = ""
    since: Moment = 0.0
    proof: Proof = Proof.READING
    recovery: Recovery = UNPROVEN
    overridden: bool = False

    @property
    def gathering(self) -> bool:
        """True if the next samples would decide something, without a recovery that is still missing."""
        return 0 < self.recovery.clean < CLEAN_SAMPLES or self.memory.gathering

    def renewed(self, memory: M, marks: Marks | None = None, **changes: Any) -> "Latch[M]":
        """Return the latch after new evidence: an earlier proof or override no longer counts.

        A recovery is recognized by a change of `marks` from now on. None keeps the marks of before.
        """
        fresh = Recovery(self.recovery.marks if marks is None else marks)
        return replace(self, memory=memory, **{"recovery": fresh, "overridden": False, **changes})

    def stored(self) -> "Latch[M]":
        """Return the latch as it is stored for a restart.

        Clean looks, and a reset that no second look confirmed, are left out. So are suspended counters: closing the driver, as
        the end of this process does, sets them back.
        """
        known = self.recovery.before or self.recovery
        recovery = Recovery(replace(known.marks, suspended=None), known.reset, known.rebound, since=known.since)
        memory = self.memory.stored() if self.verdict is Verdict.OK else self.memory.stored_open()
        return replace(self, memory=memory, recovery=recovery)


AnyLatch = Latch[Any]


XID = "xid"  # The signal with a latch for each Xid


class LatchKey(NamedTuple):
    """The key of a latch of a GPU: the signal's name, and `part` if the signal has several latches, such as an Xid's number.

    `device` is the uuid of the MIG device that the latch is limited to; empty for the whole GPU.
    """

    signal: str
    part: str = ""
    device: str = ""

    @property
    def xid(self) -> int | None:
        """The number of its Xid; None for any other signal."""
        return int(self.part) if self.signal == XID and self.part else None


class Health(NamedTuple):
    """The health of a GPU or a MIG device: the key and the verdict of each open latch.

    `reason` is the reason why pods must not get the hardware, in words for people; empty if they may get it.
    """

    standing: tuple[tuple[LatchKey, Verdict], ...] = ()
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the open latches; OK if there are none."""
        return max((verdict for _, verdict in self.standing), default=Verdict.OK)


class Transition(msgspec.Struct, frozen=True):
    """A change of a signal's verdict, as all reports on health receive it.

    `uuid` is the GPU's, `device` and `part` are the fields of the latch's key. `since` is Unix time in seconds. `xid` is the
    number of the Xid, None for other signals. `action` is the advice to the operator, empty if the
    verdict is OK. `others` is the worst verdict of the other open signals of the GPU, or of the MIG device.
    """

    uuid: str
    signal: str
    verdict: Verdict
    before: Verdict
    detail: str
    since: float
    device: str = ""
    xid: int | None = None
    action: str = ""
    others: Verdict = Verdict.OK
    part: str = ""

    @property
    def stood(self) -> Verdict:
        """The worst verdict of the GPU, or of the MIG device, before the change."""
        return max(self.before, self.others)

    @property
    def standing(self) -> Verdict:
        """The worst verdict of the GPU, or of the MIG device, after the change."""
        return max(self.verdict, self.others)

    @property
    def healthy_again(self) -> bool:
        """True if this signal made the GPU or the MIG device Unhealthy, and no signal does now."""
        return self.before is Verdict.FATAL and self.standing < Verdict.FATAL
