"""Proof that a fault is over that only a reset, or more, repairs.

The proof is three clean looks in a row (`clean`) after one of these signs:

- a new boot;
- another binding of the driver to the GPU;
- an energy counter that restarted. NVML counts it since the driver was last loaded. It reads less than half of the value before,
  and no more than any part can have drawn since (`DRAWN` for all that time). A smaller decrease is no sign;
- on a part that reports no energy, the volatile count of uncorrected ECC errors back at 0. On other parts a cleared count only
  proves that the count itself is over, because an operator can clear it (`nvidia-smi -p 0`).

Counters are only compared if they continue each other (`Sample.counting`). Each clean look must be consistent with the sign:
the next look confirms it, and the energy grows by no more than any part can draw. Otherwise there was no reset.
"""

import math
from typing import Self

import msgspec
from msgspec.structs import replace

from gpu_plugin.devices.nvml_h import RecoveryAction
from gpu_plugin.health.latch import (
    CLEAN_SAMPLES,
    DRAWN,
    SLACK_SECONDS,
    Latch,
    M,
    Marks,
    Moment,
    Proof,
    Recovery,
    Span,
)
from gpu_plugin.health.observation import CORE, Sample
from gpu_plugin.health.signal import Context

_HARMLESS = frozenset({RecoveryAction.NONE, RecoveryAction.RECOVER_IMEX_DOMAIN})


def fatal_action(action: int | None) -> bool:
    """Return True if this recovery action (NVML field 230) makes the GPU unfit for use. None: the driver reports no action.

    An action that nvml.h does not name yet counts as fatal. The recovery of an IMEX domain does not: only memory sharing
    between nodes fails, and the GPU itself works.
    """
    return action is not None and action not in _HARMLESS


def clean(seen: Sample, ctx: Context) -> bool | None:
    """Return True if the driver answered the core readings, and neither the driver nor a signal calls the GPU unfit.

    Return None if the part reports a recovery action that the look did not request, or whose value is unknown.
    """
    if not seen.core_answered or seen.core_implausible or ctx.unfit or fatal_action(seen.recovery_action):
        return False
    is_known = seen.asked_for("recovery_action") and "recovery_action" not in seen.unknown
    return None if ctx.facts.says_action and not is_known else True


def after_recovery(latch: Latch[M], seen: Sample, ctx: Context) -> Latch[M] | None:
    """Return the latch of a fault whose proof is RESET, REBOOT or QUIET after a look; None once it is proven over."""
    known = latch.recovery
    recovery = _observed(known, seen, ctx)
    proven = recovery.rebound if latch.proof is Proof.REBOOT else recovery.reset
    if proven and recovery.clean >= CLEAN_SAMPLES and latch.proof in RECOVERIES:
        return None
    return latch if recovery == known else replace(latch, recovery=recovery)


def _observed(known: Recovery, seen: Sample, ctx: Context) -> Recovery:
    """Return the signs of a recovery after this look.

    A look that shows a reset begins a row of clean looks, and the next look has to confirm it. A look whose readings
    contradict a reset is not clean, and there was no reset then. A look without the reading that confirms a reset does not
    count.
    """
    fresh = Marks.of(seen, ctx.now)
    before = known.before
    if before is not None and (confirmed := _confirms(known, before, fresh)) is not None:
        known, before = known if confirmed else before, None
    base, marks, answer = known.marks.comparing(fresh), known.marks.after(seen, ctx.now), clean(seen, ctx)
    bound = known.marks.rebound_to(fresh)
    if bound or restarted(base, fresh, seen):
        rebound = known.rebound or bound
        before = replace(known, clean=0, before=None) if before is None else before
        return Recovery(marks, True, rebound, int(answer is True), None if rebound else base.taken, before)
    drawn = math.inf if known.since is None else DRAWN * (max(0.0, ctx.now - known.since) + SLACK_SECONDS)
    if not base.leads_to(fresh) or (fresh.energy or 0) > drawn:
        return Recovery(marks, known.rebound, known.rebound)
    if answer is False:
        row = 0
    elif answer is None or before is not None or (known.since is not None and fresh.energy is None):
        row = known.clean
    else:
        row = min(known.clean + 1, CLEAN_SAMPLES)
    return Recovery(marks, known.reset, known.rebound, row, known.since, before)


def _confirms(known: Recovery, before: Recovery, fresh: Marks) -> bool | None:
    """Return whether fresh readings confirm that the look before showed a reset, None if they lack the reading.

    They contradict it if they equal or continue the readings before it.
    """
    if before.marks.rebound_to(known.marks):
        return None if fresh.binding is None else fresh.binding != before.marks.binding
    if fresh.counting != known.marks.counting:
        return None if fresh.counting is None else False
    base = before.marks.comparing(fresh)
    if known.marks.energy is None:
        if fresh.energy is not None:  # the part reports its energy, and so the count of errors proves nothing
            return False
        return None if fresh.ecc is None else fresh.ecc < (base.ecc or 0)
    return None if fresh.energy is None else base.fell_to(fresh) and known.marks.leads_to(fresh)


RECOVERIES = frozenset({Proof.QUIET, Proof.RESET, Proof.REBOOT})  # Proofs that `after_recovery` can find


def recovered(marks: Marks, seen: Sample, now: float) -> bool:
    """Return True if this sample, at Unix time `now`, shows a reset or more since these marks."""
    fresh = Marks.of(seen, now)
    return marks.rebound_to(fresh) or restarted(marks.comparing(fresh), fresh, seen)


def restarted(before: Marks, fresh: Marks, seen: Sample) -> bool:
    """Return True if the fresh counters of a look show a reset or a reload of the driver, compared with those of `before`."""
    if before.energy is not None and fresh.energy is not None:
        return fresh.energy * 2 < before.energy and fresh.energy <= before.drawn(fresh)
    without_energy = before.energy is None and fresh.energy is None and "energy" not in seen.refused
    return without_energy and bool(before.ecc) and fresh.ecc == 0


# Seconds of clean looks after which it counts that the driver requests nothing.
# The driver may request a recovery late: NVIDIA's open kernel module logs the first RPC timeout as Xid 119 and marks
# the GPU for a reset at the third (kernel_gsp.c, RPC_TIMEOUT_GPU_RESET_THRESHOLD).
PROVEN_SECONDS = 120.0

GAP_SECONDS = 60.0  # between two clean looks that restart the time, also after a clock was set forward


class AsksNothing(msgspec.Struct, frozen=True):
    """The `seconds` for which all looks were clean and without a request, up to the last look at Unix time `at`."""

    seconds: Span = 0.0
    at: Moment | None = None

    @property
    def is_proven(self) -> bool:
        """True if the time is long enough to lower a verdict."""
        return self.seconds >= PROVEN_SECONDS

    def after(self, seen: Sample, ctx: Context) -> Self:
        """Return the state after a look. A look that did not request the recovery action changes nothing.

        A core reading that cannot be true restarts the time, as a request for a recovery or a look that is not clean does.
        """
        answer = clean(seen, ctx)
        if answer is None:
            return self
        unread = not seen.unknown.isdisjoint(CORE)
        if not answer or unread or seen.recovery_action != RecoveryAction.NONE:
            return type(self)()
        passed = -1.0 if self.at is None else ctx.now - self.at
        return type(self)(self.seconds + passed if 0 <= passed <= GAP_SECONDS else 0.0, ctx.now)


UNKNOWN = AsksNothing()
