"""What the daemon says of itself, as Prometheus reads it: the status in, families of metrics out, as text. Pure.

docs/metrics.md has every one of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from gpu_plugin.telemetry.metrics import gpus, plugin
from gpu_plugin.telemetry.metrics.exposition import PROMETHEUS, Family, lines


def families(status: Mapping[str, Any]) -> Iterator[Family]:
    """The families that a status makes, always in the same order. What the status does not tell of has none, or no sample."""
    yield from plugin.families(status)
    yield from gpus.families(status)


def metrics(status: Mapping[str, Any]) -> list[str]:
    """The status in Prometheus' text exposition format 0.0.4, line by line."""
    return [line for family in families(status) for line in lines(family, PROMETHEUS)]
