"""Proof that a fault is over which only a reset, or more, mends.

A GPU is believed after three looks in a row without a fault, with the driver asking for nothing that makes it unfit and no
other signal calling it so, all of them since one of:

- a new boot;
- the driver rebound to the GPU;
- its energy counter restarted, which NVML documents as counted since the driver was last loaded: it reads less than half of
  what it read, and no more than any part can have drawn since (`DRAWN` for all that time). A mere step back is none;
- on a part that does not tell its energy, the volatile count of uncorrected ECC errors back at 0. Elsewhere that count proves
  nothing but itself: an operator can clear it (`nvidia-smi -p 0`).

Counters are compared only where they go on from one another (`Sample.counting`).
"""

from msgspec.structs import replace

from gpu_plugin.devices.nvml_h import RecoveryAction
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, M, Marks, Proof, Recovery
from gpu_plugin.health.observation import Sample
from gpu_plugin.health.signal import Context

_HARMLESS = frozenset({RecoveryAction.NONE, RecoveryAction.RECOVER_IMEX_DOMAIN})


def fatal_action(action: int | None) -> bool:
    """Whether a GPU of which the driver asks for this (NVML field 230) is not fit for use; None: it does not say.

    An action that nvml.h does not name yet is taken for the worst. An IMEX domain to be recovered is not: sharing memory
    between nodes is what suffers, the GPU itself works.
    """
    return action is not None and action not in _HARMLESS


def after_recovery(latch: Latch[M], seen: Sample, ctx: Context) -> Latch[M] | None:
    """The latch of a fault whose proof is RESET, REBOOT or QUIET, after an observation; None once it is proven over."""
    known = latch.recovery
    rebound = known.rebound or _changed(known.marks.binding, seen.binding)
    reset = known.reset or rebound or recovered(known.marks, seen, ctx.now)
    news = (reset, rebound) != (known.reset, known.rebound)
    if seen.fault or ctx.unfit or fatal_action(seen.recovery_action):
        clean = 0
    elif ctx.facts.says_action and not seen.asked_for("recovery_action"):
        clean = 0 if news else known.clean  # nobody asked whether the look was clean
    else:
        clean = 1 if news else min(known.clean + 1, CLEAN_SAMPLES)
    proven = rebound if latch.proof is Proof.REBOOT else reset
    if proven and clean >= CLEAN_SAMPLES and latch.proof in RECOVERIES:
        return None
    recovery = Recovery(known.marks.after(seen, ctx.now), reset, rebound, clean)
    return latch if recovery == known else replace(latch, recovery=recovery)


RECOVERIES = frozenset({Proof.QUIET, Proof.RESET, Proof.REBOOT})
"""Proofs that `after_recovery` can find."""


DRAWN = 2_000_000
"""mJ a second, 2 kW: more than any GPU draws."""

_SLACK = 5.0  # seconds by which a reading may be older or newer than it is dated


def recovered(marks: Marks, seen: Sample, now: float) -> bool:
    """Whether this sample, at Unix time `now`, shows a reset or more since these marks."""
    return _changed(marks.binding, seen.binding) or counters_restarted(marks, seen, now)


def counters_restarted(marks: Marks, seen: Sample, now: float) -> bool:
    """Whether the counters of this sample show a reset, or a reload of the driver, since these marks."""
    known = marks.comparing(seen)
    if known is None:
        return False
    if known.energy is not None and seen.energy is not None:
        since = 0.0 if known.taken is None else max(0.0, now - known.taken)
        return seen.energy < known.energy / 2 and seen.energy <= DRAWN * (since + _SLACK)
    return known.energy is None and seen.energy is None and bool(known.ecc) and seen.ecc_uncorrected == 0


def _changed(then: int | None, now: int | None) -> bool:
    return then is not None and now is not None and then != now
