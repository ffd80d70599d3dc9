"""The names in a PromQL query: metrics with the labels of their matchers, and the labels of groupings and joins.

It supports the part of PromQL that the dashboard and the alerts use. Prometheus itself parses them in full.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_METRIC = re.compile(r"\b((?:gpu:|gpu_plugin_|kube_)[\w:]+|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Named:
    """By metric the labels that are matched; and labels that series are grouped or joined by."""

    metrics: Mapping[str, frozenset[str]]
    grouped: frozenset[str]


def named(expr: str) -> Named:
    """Return the names in a query."""
    metrics: dict[str, frozenset[str]] = {}
    for name, matchers in _METRIC.findall(expr):
        metrics[name] = metrics.get(name, frozenset()) | {label for label, _ in _MATCHER.findall(matchers)}
    grouped = (label.strip() for group in _GROUPING.findall(expr) for label in group.split(","))
    return Named(metrics, frozenset(filter(None, grouped)))
