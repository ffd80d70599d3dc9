"""The signals by name, the observations that each of them gets, and the verdict and advice of their latches.

A new signal is a decorated function in a file here, or a row of the tables in `levels` and `counters`, and a line in
`config.choices.HEALTH_SIGNALS`.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import get_args

from gpu_plugin.config.choices import HEALTH_SIGNALS
from gpu_plugin.health.latch import AnyLatch, LatchKey, Verdict
from gpu_plugin.health.observation import Facts, Observation, Sample
from gpu_plugin.health.policy import HealthPolicy
from gpu_plugin.health.signal import DEFINED, Case, OperatorInfluence, Signal, SignalKind

__all__ = ["SIGNALS", "Signal", "SignalKind", "advice", "shown", "standing"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

UNKNOWN = Facts()  # The facts of an unknown GPU

# Signals by name. Signals that other signals' proofs depend on come first.
SIGNALS: Mapping[str, Signal] = {name: DEFINED[name] for name in HEALTH_SIGNALS}

# Signals in the order in which they are judged, each with the key of its latch of the whole GPU
Shown = tuple[tuple[LatchKey, Signal], ...]

_BY_KIND: Mapping[type, Shown] = {
    kind: tuple((LatchKey(name), signal) for name, signal in SIGNALS.items() if kind in signal.sees)
    for kind in get_args(Observation)
}


def shown(seen: Observation) -> Shown:
    """Return the signals that get this observation. All signals that judge looks get a look with a fault."""
    if isinstance(seen, Sample) and seen.asked is not None and not seen.fault:
        return _asked(seen.asked)
    return _BY_KIND[type(seen)]


@cache
def _asked(asked: frozenset[str]) -> Shown:
    """Return the signals that get a faultless look that requested these fields. Few different sets of fields are in use."""
    of_looks = _BY_KIND[Sample]
    return tuple((key, signal) for key, signal in of_looks if not signal.asks or not asked.isdisjoint(signal.asks))


def standing(key: LatchKey, latch: AnyLatch | None, policy: HealthPolicy) -> Verdict:
    """Return the verdict of a latch under a policy and an operator's override; OK if it is closed."""
    verdict, signal = Verdict.OK if latch is None else latch.verdict, SIGNALS[key.signal]
    if latch is None or signal.essential or verdict is Verdict.OK:
        return verdict
    if not policy.judging and signal.influence is not OperatorInfluence.ENABLED:
        return Verdict.OK
    if verdict is not Verdict.APP:
        verdict = policy.signals.get(key.signal, verdict)
    return min(verdict, Verdict.DEGRADED) if latch.overridden else verdict


def advice(key: LatchKey, policy: HealthPolicy, gpu: str, latch: AnyLatch, facts: Facts = UNKNOWN) -> str:
    """Return advice to the operator about an open latch; empty if the signal has no advice. `gpu` is its uuid, for commands."""
    action = SIGNALS[key.signal].action
    return (action if isinstance(action, str) else action(Case(key, latch, policy, gpu, facts=facts))).format(gpu=gpu)
