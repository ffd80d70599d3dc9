"""Proof that a fault is over which only a reset, or more, mends.

A GPU is believed after three looks in a row without a fault, with the driver asking for nothing that makes it unfit and no
other signal calling it so, all of them since one of:

- a new boot;
- the driver bound to the GPU anew;
- its energy counter begun anew, which NVML documents as counted since the driver was last loaded: it reads less than half of
  what it read, and no more than any part can have drawn since (`DRAWN` for all that time). A mere step back is none;
- on a part that does not tell its energy, the volatile count of uncorrected ECC errors back at 0. Elsewhere that count proves
  nothing but itself: an operator can clear it (`nvidia-smi -p 0`).

Counters are compared only where they go on from one another (`Sample.counting`).
"""

from dataclasses import replace

from gpu_plugin.health.actions import fatal_action
from gpu_plugin.health.context import Context
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, Marks, Proof
from gpu_plugin.health.observation import Observation, Sample


def after_recovery(latch: Latch, seen: Observation, ctx: Context) -> Latch | None:
    """The latch of a fault whose proof is RESET, REBOOT or QUIET, after an observation; None once it is proven over."""
    if not isinstance(seen, Sample):
        return latch
    marks = latch.marks.after(seen, ctx.now)
    rebound = latch.rebound or _changed(latch.marks.binding, seen.binding)
    reset = latch.reset or rebound or counted_anew(latch.marks, seen, ctx.now)
    news = (reset, rebound) != (latch.reset, latch.rebound)
    unfit = fatal_action(seen.recovery_action)
    asked = latch.asked or unfit
    clean = not (seen.fault or unfit or ctx.unfit)
    streak = min(1 if news else latch.streak + 1, CLEAN_SAMPLES) if clean else 0
    proven = rebound if latch.proof is Proof.REBOOT else reset
    if proven and streak >= CLEAN_SAMPLES and latch.proof in RECOVERIES:
        return None
    changed = replace(latch, marks=marks, reset=reset, rebound=rebound, asked=asked, streak=streak)
    return latch if changed == latch else changed


RECOVERIES = frozenset({Proof.QUIET, Proof.RESET, Proof.REBOOT})
"""Proofs that `after_recovery` can find."""


DRAWN = 2_000_000
"""mJ a second, 2 kW: more than any GPU draws."""

_SLACK = 5.0  # seconds by which a reading may be older or newer than it is dated


def counted_anew(marks: Marks, seen: Sample, now: float) -> bool:
    """Whether the counters of this sample show a reset, or a reload of the driver, since these marks."""
    if not marks.compares(seen):
        return False
    if marks.energy is not None and seen.energy is not None:
        since = 0.0 if marks.taken is None else max(0.0, now - marks.taken)
        return seen.energy < marks.energy / 2 and seen.energy <= DRAWN * (since + _SLACK)
    return marks.energy is None and seen.energy is None and bool(marks.ecc) and seen.ecc_uncorrected == 0


def _changed(then: int | None, now: int | None) -> bool:
    return then is not None and now is not None and then != now
