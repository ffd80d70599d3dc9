"""Proof that a fault is over which only a reset, or more, mends.

A GPU is believed after three looks in a row without a fault, with the driver asking for nothing and no other signal calling
it unfit, all of them since one of: a new boot; the driver bound to it anew; a counter that only a reset or a reload of the
driver sets back gone backwards (NVML documents total energy as counted since the driver was last loaded, and volatile ECC
counts likewise).
"""

from dataclasses import replace

from gpu_plugin.health.context import Context
from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, Proof
from gpu_plugin.health.observation import Observation, Sample


def after_recovery(latch: Latch, seen: Observation, ctx: Context) -> Latch | None:
    """The latch of a fault whose proof is RESET, REBOOT or QUIET, after an observation; None once it is proven over."""
    if not isinstance(seen, Sample):
        return latch
    marks = latch.marks.after(seen)
    rebound = latch.rebound or _changed(latch.marks.binding, seen.binding)
    reset = (
        latch.reset
        or rebound
        or _backwards(latch.marks.energy, seen.energy)
        or _backwards(latch.marks.ecc, seen.ecc_uncorrected)
    )
    news = (reset, rebound) != (latch.reset, latch.rebound)
    asked = latch.asked or bool(seen.recovery_action)
    clean = not (seen.fault or seen.recovery_action or ctx.unfit)
    streak = min(1 if news else latch.streak + 1, CLEAN_SAMPLES) if clean else 0
    proven = rebound if latch.proof is Proof.REBOOT else reset
    if proven and streak >= CLEAN_SAMPLES and latch.proof in RECOVERIES:
        return None
    changed = replace(latch, marks=marks, reset=reset, rebound=rebound, asked=asked, streak=streak)
    return latch if changed == latch else changed


RECOVERIES = frozenset({Proof.QUIET, Proof.RESET, Proof.REBOOT})
"""Proofs that `after_recovery` can find."""


def _changed(then: int | None, now: int | None) -> bool:
    return then is not None and now is not None and then != now


def _backwards(then: int | None, now: int | None) -> bool:
    return then is not None and now is not None and now < then
