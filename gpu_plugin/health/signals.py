"""The signals: each a function from its latch and an observation to its latch.

A function returns the latch it was given where the observation is not its business, None once nothing is left to
remember, and a new latch otherwise. It falls on evidence and rises on proof: silence never closes a latch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from gpu_plugin.health.latch import CLEAN_SAMPLES, Latch, Limits, Verdict
from gpu_plugin.health.observation import Observation, Sample, XidEvent
from gpu_plugin.health.xids import XidPolicy, describe

Step = Callable[["Latch | None", Observation, float, Limits, XidPolicy, "int | None"], "Latch | None"]
"""(latch, observation, now in Unix seconds, limits, policy, energy in mJ when last seen before) → latch."""


def xid(
    latch: Latch | None,
    seen: Observation,
    now: float,
    limits: Limits,  # noqa: ARG001
    policy: XidPolicy,
    energy: int | None,
) -> Latch | None:
    """Opens on an Xid that the policy calls fatal; closes when the GPU was reset and answers again."""
    if isinstance(seen, XidEvent):
        if not policy.fatal(seen.xid):
            return latch
        words = describe(seen.xid)
        if latch is None:
            return Latch(Verdict.FATAL, words, now, energy=energy)
        known = latch.detail if words in latch.detail.split(", ") else f"{latch.detail}, {words}"
        return replace(latch, detail=known, streak=0, reset=False)
    return latch and _after_reset(latch, seen)


def lost(
    latch: Latch | None,
    seen: Observation,
    now: float,
    limits: Limits,  # noqa: ARG001
    policy: XidPolicy,  # noqa: ARG001
    energy: int | None,
) -> Latch | None:
    """Opens when the driver says that the GPU is lost or needs a reset; closes when it was reset and answers again."""
    if isinstance(seen, Sample) and seen.fault in {"lost", "reset-required"}:
        if latch is None:
            return Latch(Verdict.FATAL, seen.detail, now, energy=energy)
        return replace(latch, detail=seen.detail, streak=0, reset=False)
    return latch and _after_reset(latch, seen, back_is_proof=latch.energy is None)


def unanswered(
    latch: Latch | None,
    seen: Observation,
    now: float,
    limits: Limits,  # noqa: ARG001
    policy: XidPolicy,  # noqa: ARG001
    energy: int | None,  # noqa: ARG001
) -> Latch | None:
    """Opens when a call hangs, or fails three times in a row for no reason of its own; closes on as many good answers."""
    if not isinstance(seen, Sample) or seen.fault in {"lost", "reset-required"}:
        return latch
    if not seen.fault:
        if latch is None or latch.verdict is Verdict.OK or latch.streak + 1 >= CLEAN_SAMPLES:
            return None
        return replace(latch, streak=latch.streak + 1)
    if latch is not None and latch.verdict is not Verdict.OK:
        return replace(latch, detail=seen.detail, streak=0)
    failures = 1 + (latch.streak if latch else 0)
    if seen.fault == "hung" or failures >= CLEAN_SAMPLES:
        return Latch(Verdict.FATAL, seen.detail, now)
    return Latch(streak=failures)


def temperature(
    latch: Latch | None,
    seen: Observation,
    now: float,
    limits: Limits,
    policy: XidPolicy,  # noqa: ARG001
    energy: int | None,  # noqa: ARG001
) -> Latch | None:
    """Opens at 2 °C under the shutdown threshold in two samples; closes after a time 5 °C under the slowdown one."""
    if not isinstance(seen, Sample):
        return latch
    if not limits.watch_temperature:
        return None
    if limits.shutdown is None or seen.temperature is None:  # silence is no proof of coolness: the time starts anew
        return latch and (None if latch.verdict is Verdict.OK else replace(latch, quiet_since=None))
    if latch is None or latch.verdict is Verdict.OK:
        if seen.temperature < limits.shutdown - 2:
            return None
        if latch is None:
            return Latch(streak=1)
        return Latch(Verdict.FATAL, f"{seen.temperature} °C, the GPU shuts down at {limits.shutdown} °C", now)
    slowdown = limits.shutdown - 5 if limits.slowdown is None else min(limits.slowdown, limits.shutdown)
    if seen.temperature >= slowdown - 5:
        return replace(latch, quiet_since=None)
    if latch.quiet_since is None:
        latch = replace(latch, quiet_since=now)
    assert latch.quiet_since is not None
    return None if now - latch.quiet_since >= limits.temperature_recovery else latch


SIGNALS: Mapping[str, Step] = {
    "xid": xid,
    "lost": lost,
    "unanswered": unanswered,
    "temperature": temperature,
}
"""Signals by name. A new one is one function and one line here."""


def _after_reset(latch: Latch, seen: Observation, *, back_is_proof: bool = False) -> Latch | None:
    """The latch of a fault that only a reset mends.

    NVML documents total energy as counted since the driver was last loaded, so a smaller figure proves a reload. A lost
    GPU whose figure was never known proves itself by answering at all (`back_is_proof`): it must have been found anew.
    """
    if not isinstance(seen, Sample):
        return latch
    if seen.fault:
        return replace(latch, streak=0)
    reset, energy, streak = latch.reset or back_is_proof, latch.energy, latch.streak + 1
    if seen.energy is not None:
        reset = reset or (energy is not None and seen.energy < energy)
        energy = seen.energy
    return None if reset and streak >= CLEAN_SAMPLES else replace(latch, reset=reset, streak=streak, energy=energy)
