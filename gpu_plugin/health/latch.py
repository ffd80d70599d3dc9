"""Verdicts, and the latch that holds one open from its evidence until there is proof of recovery."""

from collections.abc import Callable
from enum import IntEnum, StrEnum
from functools import cache
from itertools import repeat
from types import NoneType
from typing import Annotated, Any, Generic, NamedTuple, Self, TypeVar, get_args

import msgspec
from msgspec.structs import replace

from gpu_plugin.health.observation import Sample

CLEAN_SAMPLES = 3
"""Samples in a row without a fault before a reset GPU is believed."""


class Verdict(IntEnum):
    """How bad a signal is, the worse the greater."""

    OK = 0
    APP = 1
    """An application's own error: counted, nothing else."""
    DEGRADED = 2
    """Worth an operator's look; still handed out."""
    FATAL = 3
    """Not fit for use: Unhealthy to the kubelet."""


class Proof(StrEnum):
    """The proof that closes a latch."""

    READING = "reading"
    """The signal's own readings, by its exit rule."""
    APPLICATION = "application"
    """Time without another: the fault was an application's, the GPU keeps nothing of it."""
    QUIET = "quiet"
    """A long time without another, or whatever proves a reset."""
    RESET = "reset"
    """The GPU was reset, the driver reloaded or the node booted, and it answers without a fault since."""
    REBOOT = "reboot"
    """The node was booted or the GPU enumerated again, and it answers without a fault since."""
    RMA = "rma"
    """Nothing by itself: the part is to be replaced, or an operator overrides."""
    OPERATOR = "operator"
    """The operator's own word."""


RESET = "reset the GPU when no pod has it"
REBOOT = "drain the node and reboot it; where the GPU does not come back, have it serviced"
"""Advice that brings the proofs of these names about."""

Moment = Annotated[float, msgspec.Meta(title="Unix time in seconds")]
"""A time in what a signal remembers: shifted where the wall clock is corrected between two processes."""

Span = Annotated[float, msgspec.Meta(title="seconds")]
"""For how long something is counted, was watched or is withheld."""


S = TypeVar("S", bound=msgspec.Struct)


DRAWN = 2_000_000
"""mJ per second (2 kW): more than any GPU draws."""

SLACK_SECONDS = 5.0  # by which the driver's energy counter may lag behind the clock


class Marks(msgspec.Struct, frozen=True):
    """Counters of a GPU that only a reset, a reload of the driver or a new enumeration sets back or changes; None: unknown.

    `energy` in mJ and `ecc` (uncorrected errors) are the driver's volatile counters, `binding` is `Sample.binding`. `taken` is
    when (Unix seconds) the energy was read. Counters compare with those of samples of the same `counting` (`Sample.counting`).

    `opening` is the opening of the driver in which they were read. `suspended` has the counters of persistence mode while that
    is off. They compare again once it is on, if the driver was not closed since: closing it without persistence mode sets the
    counters back, too.
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
        """The marks of this sample alone, at Unix time `now`."""
        opening = (seen.counting or None) if seen.opening is None else seen.opening
        taken = None if seen.energy is None else now
        return cls(seen.energy, seen.ecc_uncorrected, seen.binding, seen.counting, taken, opening)

    def after(self, seen: Sample, now: float) -> "Marks":
        """The marks as of this sample at Unix time `now`. A reading that the sample lacks stays as it was, if it compares.

        The energy is unknown if it grew by more than any GPU can draw. The very same object if nothing changes.
        """
        fresh = Marks.of(seen, now)
        if fresh.counting is None and self.counting is not None:
            # Counters may compare with nothing here: a count differs only if there are errors
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
        """The marks as of this sample, for evidence of now: energy that went back or another binding is unknown until the next.

        Either it was misread, or the GPU was reset before the evidence. It may have been reset as well since persistence mode
        was on: suspended counters are left out.
        """
        after, before = self.after(seen, now), self.comparing(Marks.of(seen, now))
        after = after if after.suspended is None else replace(after, suspended=None)
        if before.fell_to(after):
            after = replace(after, energy=None, taken=None)
        if self.rebound_to(after):
            after = replace(after, binding=None)
        return after

    def completed(self, seen: Sample, now: float) -> "Marks":
        """The marks with what is unknown as of this sample; what is known stays, so that a change since still shows."""
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
        """The marks with those counters alone that these fresh ones continue: a difference is the GPU's own then."""
        if fresh.counting is not None and self.counting == fresh.counting:
            return self
        aside = self.suspended
        if aside is not None and aside.counting == fresh.counting and not self._reopened(fresh):
            return replace(aside, binding=self.binding)
        return Marks(binding=self.binding)

    def leads_to(self, fresh: "Marks") -> bool:
        """Whether the energy of these comparable fresh marks is no more than the GPU can have drawn since."""
        if self.energy is None or fresh.energy is None or self.taken is None:
            return True
        return fresh.energy - self.energy <= self.drawn(fresh)

    def fell_to(self, fresh: "Marks") -> bool:
        """Whether the energy of these comparable fresh marks is less."""
        return self.energy is not None and fresh.energy is not None and fresh.energy < self.energy

    def rebound_to(self, fresh: "Marks") -> bool:
        """Whether the driver has another binding to the GPU as of fresh marks."""
        return self.binding is not None and fresh.binding is not None and fresh.binding != self.binding

    def drawn(self, fresh: "Marks") -> float:
        """The most mJ that the GPU can have drawn between these marks and fresh ones; as if at once if a time is unknown."""
        seconds = 0.0 if self.taken is None or fresh.taken is None else max(0.0, fresh.taken - self.taken)
        return DRAWN * (seconds + SLACK_SECONDS)

    def _suspended(self, base: "Marks", fresh: "Marks") -> "Marks | None":
        """The counters of persistence mode to keep beside fresh marks, of which `base` are the comparable ones before.

        None after a reset, which set them back, too.
        """
        reset = base.fell_to(fresh) or self.rebound_to(fresh)
        if not fresh.counting or reset or self._reopened(fresh):
            return None
        if self.counting == 0:
            return replace(self, binding=None, suspended=None)
        return self.suspended

    def _reopened(self, fresh: "Marks") -> bool:
        """Whether the driver was closed and opened between these marks and fresh ones."""
        return None not in (self.opening, fresh.opening) and self.opening != fresh.opening


def _first(one: int | None, other: int | None) -> int | None:
    return other if one is None else one


UNMARKED = Marks()
"""Of a GPU that nothing is known of."""


class Recovery(msgspec.Struct, frozen=True):
    """Signs of a recovery since the evidence.

    `marks` are the GPU's as last seen; `reset` and `rebound` whether they showed that it was reset or the driver reloaded, or
    that it was enumerated again; `clean` how many clean looks there were in a row, up to CLEAN_SAMPLES. `since` (Unix seconds)
    is the time after which a reset happened that the energy counter showed; None: something else showed it. `before` is the
    state before a look that showed a reset, until the next look confirms that. Until then `before` is written down.
    """

    marks: Marks = UNMARKED
    reset: bool = False
    rebound: bool = False
    clean: int = 0
    since: Moment | None = None
    before: "Recovery | None" = None

    @property
    def ended_before(self) -> bool:
        """Whether what came before is over: a reset showed that the next look did not contradict."""
        return self.reset and self.before is None


UNPROVEN = Recovery()


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory of one signal beside what all latches have. A signal that needs more has a type of its own.

    Its fields are what is written down for a restart, by their names; times are declared as `Moment`, durations as `Span`, and
    a number that may be below 0 as `hysteresis.Celsius`.
    """

    @property
    def gathering(self) -> bool:
        """Whether the next samples would settle something."""
        return False

    @property
    def lasting(self) -> bool:
        """Whether it is worth keeping over a restart while nothing is held against the GPU."""
        return False

    @property
    def news(self) -> object:
        """The part that is written down when it changes, while nothing is held against the GPU."""
        return self

    @property
    def counted(self) -> object:
        """The part that is written down when it changes, while the latch is open: what counts towards more."""
        return None

    def stored(self) -> Self:
        """The memory as a restart is to know it while nothing is held against the GPU."""
        return self

    def stored_open(self) -> Self:
        """The memory of an open latch as a restart is to know it: progress towards its end is left out, and gathered again."""
        return self.stored()

    def after_boot(self) -> Self:
        """The memory of an open latch after a boot: whatever was gathered since is gathered again."""
        return self.stored_open()

    def joined(self, _other: Self) -> Self:
        """The memory joined with that of the same GPU under another name, as far as it counts towards more."""
        return self


def shifted(remembered: S, by: float) -> S:
    """A value with each `Moment` as it is after the wall clock was corrected by so many seconds."""
    found: S = _changed(remembered, type(remembered), lambda value, of: corrected(value, by) if of == Moment else value)
    return found


def values(remembered: msgspec.Struct) -> list[tuple[Any, Any]]:
    """All numbers and words that are remembered, however nested, each with the type that it is declared as."""
    found: list[tuple[Any, Any]] = []
    _changed(remembered, type(remembered), lambda value, of: found.append((value, of)))
    return found


def _changed(remembered: Any, declared: Any, change: Callable[[Any, Any], Any]) -> Any:
    """The same value with `change(value, declared type)` in place of each number and word in it."""
    if remembered is None:
        return None
    types = get_args(declared)
    if NoneType in types:
        return _changed(remembered, types[0], change)
    if isinstance(remembered, msgspec.Struct):
        fields = _fields(type(remembered))
        return type(remembered)(*(_changed(getattr(remembered, name), of, change) for name, of in fields))
    if isinstance(remembered, tuple):
        of_each = repeat(types[0]) if types[-1] is ... else types
        return tuple(_changed(each, of, change) for each, of in zip(remembered, of_each, strict=False))
    return change(remembered, declared)


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    """Name and declared type of each field; telling them takes far longer than reading the fields."""
    return tuple((field.name, field.type) for field in msgspec.structs.fields(kind))


def corrected(at: float, by: float) -> float:
    """A Unix time after the wall clock was corrected by so many seconds, 0 at least: nothing is dated before that."""
    return max(0.0, at + by)


def merged(mine: tuple[float, ...], others: tuple[float, ...], most: int = 64) -> tuple[float, ...]:
    """The last `most` of two rows of times, the oldest first, one that is in both once."""
    return tuple(sorted({*mine, *others}))[-most:]


NOTHING = Memory()
"""Of a signal that remembers nothing of its own."""

M = TypeVar("M", bound=Memory)


class Latch(msgspec.Struct, Generic[M], frozen=True):
    """The state of one signal for one GPU or MIG device: its verdict and its memory.

    `verdict` is OK while evidence is still being gathered. `since` is Unix time in seconds. `proof` is what closes it,
    `recovery` what was seen of that where it is a reset or more. `overridden`: an operator states that the GPU is fit despite it.
    `memory` is the signal's own.
    """

    memory: M
    verdict: Verdict = Verdict.OK
    detail: str = ""
    since: float = 0.0
    proof: Proof = Proof.READING
    recovery: Recovery = UNPROVEN
    overridden: bool = False

    @property
    def gathering(self) -> bool:
        """Whether the next samples would settle something, rather than a recovery that nobody has made yet."""
        return 0 < self.recovery.clean < CLEAN_SAMPLES or self.memory.gathering

    def renewed(self, memory: M, marks: Marks | None = None, **changes: Any) -> "Latch[M]":
        """The latch after its evidence was renewed: whatever had been proven, or overridden, counts no more.

        `marks` are what a recovery is told by from now on; None: as before.
        """
        fresh = Recovery(self.recovery.marks if marks is None else marks)
        return replace(self, memory=memory, **{"recovery": fresh, "overridden": False, **changes})


AnyLatch = Latch[Any]


class LatchKey(NamedTuple):
    """Which latch of a GPU: the signal's name; `part` tells several of one signal apart, such as the Xid's number.

    `device` is the uuid of the MIG device that alone is meant; empty for the whole GPU.
    """

    signal: str
    part: str = ""
    device: str = ""


class Health(NamedTuple):
    """The health of a GPU or a MIG device: the key and the verdict of each latch that stands against it.

    `reason` is why the hardware is not to be handed out, worded for people; empty where it may be.
    """

    standing: tuple[tuple[LatchKey, Verdict], ...] = ()
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        """The worst there is; OK where nothing stands."""
        return max((verdict for _, verdict in self.standing), default=Verdict.OK)


class Transition(msgspec.Struct, frozen=True):
    """A change of a signal's verdict: the event that everyone who reports on health is given.

    `uuid` is the GPU's; `device` and `part` are those of the latch's key. `since` is Unix time in seconds; `xid` the Xid
    behind it, if one is, and `xid_name` its name. `action` is what an operator is advised to do, empty once the verdict
    is OK. `standing` is the worst of all signals of the GPU, or that MIG device, after the change.
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
    xid_name: str = ""
    standing: Verdict = Verdict.OK
    part: str = ""

    @property
    def healthy_again(self) -> bool:
        """Whether nothing is left that makes the GPU, or that MIG device, Unhealthy, where this did before."""
        return self.before is Verdict.FATAL and self.standing < Verdict.FATAL
