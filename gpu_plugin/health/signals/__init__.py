"""The signals by name, which of them are shown an observation, and what their latches come to and advise.

A new one is one function in a file here, decorated, and its line in `config.choices.HEALTH_SIGNALS`.
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

__all__ = ["SIGNALS", "Signal", "SignalKind", "advice", "shown", "standing", "xid_number"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

UNKNOWN = Facts()
"""Of a GPU of which nothing is known."""

SIGNALS: Mapping[str, Signal] = {name: DEFINED[name] for name in HEALTH_SIGNALS}
"""Signals by name, those first whose word the proofs of others heed."""

Shown = tuple[tuple[LatchKey, Signal], ...]
"""Signals in the order in which they are judged, each with the key of its latch of the whole GPU."""

_BY_KIND: Mapping[type, Shown] = {
    kind: tuple((LatchKey(name), signal) for name, signal in SIGNALS.items() if kind in signal.sees)
    for kind in get_args(Observation)
}


def shown(seen: Observation) -> Shown:
    """The signals that are shown this observation. A look at fault is shown to all that see looks."""
    if isinstance(seen, Sample) and seen.asked is not None and not seen.fault:
        return _asked(seen.asked)
    return _BY_KIND[type(seen)]


@cache
def _asked(asked: frozenset[str]) -> Shown:
    """The signals that are shown a faultless look that asked for these fields; there are few such sets, by turns."""
    looked = _BY_KIND[Sample]
    return tuple((key, signal) for key, signal in looked if not signal.asks or not asked.isdisjoint(signal.asks))


def standing(key: LatchKey, latch: AnyLatch | None, policy: HealthPolicy) -> Verdict:
    """The verdict of an open latch under a policy and an operator's override."""
    verdict, signal = Verdict.OK if latch is None else latch.verdict, SIGNALS[key.signal]
    if latch is None or signal.essential or verdict is Verdict.OK:
        return verdict
    if not policy.judging and signal.say is not OperatorInfluence.ENABLED:
        return Verdict.OK
    if verdict is not Verdict.APP:
        verdict = policy.signals.get(key.signal, verdict)
    return min(verdict, Verdict.DEGRADED) if latch.overridden else verdict


def advice(key: LatchKey, policy: HealthPolicy, gpu: str, latch: AnyLatch, facts: Facts = UNKNOWN) -> str:
    """Advice to the operator about an open latch of a GPU of these facts, which commands name by its uuid; empty for nothing."""
    said = SIGNALS[key.signal].action
    return (said if isinstance(said, str) else said(Case(key, latch, policy, gpu, facts=facts))).format(gpu=gpu)


def xid_number(key: LatchKey) -> int | None:
    """The Xid that a latch is of; None for any other signal."""
    return int(key.part) if SIGNALS[key.signal].numbered and key.part else None
