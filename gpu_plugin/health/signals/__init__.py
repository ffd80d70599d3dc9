"""The signals by name. A new one is one function in a file here, decorated, and its line in `config.choices.HEALTH_SIGNALS`."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from gpu_plugin.config.choices import HEALTH_SIGNALS
from gpu_plugin.health.signal import DEFINED, EndsBy, OperatorInfluence, Signal, SignalKind

__all__ = ["SIGNALS", "EndsBy", "OperatorInfluence", "Signal", "SignalKind"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

SIGNALS: Mapping[str, Signal] = {name: DEFINED[name] for name in HEALTH_SIGNALS}
"""Signals by name, those first whose word the proofs of others heed."""
