"""Verdicts, and the latch that holds one open from its evidence until there is proof of recovery."""

from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple

from gpu_plugin.health.observation import Sample

CLEAN_SAMPLES = 3
"""Samples in a row without a fault before a reset GPU is believed."""


class Verdict(IntEnum):
    """What a signal means, the worse the greater."""

    OK = 0
    APP = 1
    """An application's own error: counted, nothing else."""
    DEGRADED = 2
    """Worth an operator's look; still handed out."""
    FATAL = 3
    """Not fit for use: Unhealthy to the kubelet."""


class Proof(StrEnum):
    """What closes a latch."""

    READING = "reading"
    """The signal's own readings, by its exit rule."""
    APPLICATION = "application"
    """Time without another: the fault was an application's, the GPU keeps nothing of it."""
    QUIET = "quiet"
    """A long time without another, or whatever proves a reset."""
    RESET = "reset"
    """The GPU was reset, the driver reloaded or the node booted, and it answers without a fault since."""
    REBOOT = "reboot"
    """The node was booted or the GPU enumerated anew, and it answers without a fault since."""
    RMA = "rma"
    """Nothing by itself: the part is to be replaced, or an operator overrides."""
    OPERATOR = "operator"
    """The operator's own word."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What of a GPU only a reset, a reload of the driver or a new enumeration sets back or changes; None: unknown.

    `energy` in mJ and `ecc` (uncorrected errors) are the driver's volatile counters, `binding` is `Sample.binding`.
    `counting` tells which counters they compare with (`Sample.counting`), `taken` (Unix seconds) when the energy was read.
    """

    energy: int | None = None
    ecc: int | None = None
    binding: int | None = None
    counting: int | None = None
    taken: float | None = None

    def after(self, seen: Sample, now: float) -> "Marks":
        """The marks as of this sample at Unix time `now`; what it does not say stays as it was, where it still compares.

        The very same object where nothing changes.
        """
        kept = self if self.compares(seen) or seen.counting is None else _UNCOUNTED
        energy, taken = (kept.energy, kept.taken) if seen.energy is None else (seen.energy, now)
        ecc = kept.ecc if seen.ecc_uncorrected is None else seen.ecc_uncorrected
        binding = self.binding if seen.binding is None else seen.binding
        counting = self.counting if seen.counting is None else seen.counting
        if (energy, ecc, binding, counting) == (self.energy, self.ecc, self.binding, self.counting):
            return self
        return Marks(energy, ecc, binding, counting, taken)

    def completed(self, seen: Sample, now: float) -> "Marks":
        """The marks with what is unknown as of this sample; what is known stays, so that a change since still shows."""
        fresh = UNMARKED.after(seen, now)
        own = self.counting is not None or self.energy is not None or self.ecc is not None
        return Marks(
            fresh.energy if self.energy is None else self.energy,
            fresh.ecc if self.ecc is None else self.ecc,
            fresh.binding if self.binding is None else self.binding,
            self.counting if own else fresh.counting,
            fresh.taken if self.energy is None else self.taken,
        )

    def compares(self, seen: Sample) -> bool:
        """Whether the counters of this sample go on from those here: a difference is the GPU's, not of who opened the driver."""
        return self.counting is not None and self.counting == seen.counting


UNMARKED = _UNCOUNTED = Marks()
"""Of a GPU that nothing is known of."""


@dataclass(frozen=True, slots=True)
class Latch:
    """One signal's memory of one GPU or MIG device.

    `verdict` is OK while evidence is still being gathered. `since` is Unix time in seconds. `proof` is what closes it.
    `streak` counts samples in a row for whatever the signal is waiting for; `quiet_since` is when its exit condition began
    to hold; `times` (Unix seconds, oldest first) when it happened lately; `value` whatever number the signal compares with.

    `marks` are the GPU's as last seen; `reset` and `rebound` whether they showed since the evidence that it was reset or the
    driver reloaded, or that it was enumerated anew; `asked` whether the driver asked for a recovery since.
    `overridden`: an operator vouches for the GPU in spite of it.
    `pods` are who held the GPU when it happened lately: Unix seconds, and their names as namespace/name with commas between.
    `readings` are what was last read, where the signal compares several numbers or the last few looks; a restart reads anew.
    """

    verdict: Verdict = Verdict.OK
    detail: str = ""
    since: float = 0.0
    proof: Proof = Proof.READING
    streak: int = 0
    quiet_since: float | None = None
    times: tuple[float, ...] = ()
    value: float | None = None
    marks: Marks = UNMARKED
    reset: bool = False
    rebound: bool = False
    asked: bool = False
    overridden: bool = False
    readings: tuple[int | None, ...] = ()
    pods: tuple[tuple[float, str], ...] = ()

    @property
    def gathering(self) -> bool:
        """Whether the next samples would settle something, rather than a recovery that nobody has made yet."""
        return self.streak > 0 and (self.proof in (Proof.READING, Proof.OPERATOR) or self.streak < CLEAN_SAMPLES)

    def again(self, **changes: object) -> "Latch":
        """The latch after its evidence was renewed: whatever had been proven, or vouched for, counts no more."""
        fresh = {"streak": 0, "quiet_since": None, "reset": False, "rebound": False, "overridden": False}
        return replace(self, **{**fresh, **changes})  # type: ignore[arg-type]


class LatchKey(NamedTuple):
    """Which latch of a GPU: the signal's name; `part` tells several of one signal apart, such as the Xid's number.

    `device` is the uuid of the MIG device that alone is meant; empty for the whole GPU.
    """

    signal: str
    part: str = ""
    device: str = ""
