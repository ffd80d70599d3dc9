"""Which signals are shown an observation: those that see its kind and, of a look, go by something that it asked for."""

from collections.abc import Mapping
from functools import cache
from typing import get_args

from gpu_plugin.health.latch import LatchKey
from gpu_plugin.health.observation import Observation, Sample
from gpu_plugin.health.signals import SIGNALS, Signal

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
    """Those shown a faultless look that asked for these fields; there are few such sets, by turns."""
    looked = _BY_KIND[Sample]
    return tuple((key, signal) for key, signal in looked if not signal.asks or not asked.isdisjoint(signal.asks))
