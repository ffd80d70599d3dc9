"""Durations counted in buckets, without a clock, a registry or a lock."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any


class Histogram:
    """Counts durations by inclusive upper bounds. Not safe between threads."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are in seconds and ascending. Longer durations have a bucket of their own."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration in seconds."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def as_data(self) -> Mapping[str, Any]:
        """Plain data: `bounds` and `sum` in seconds, and `counts`, not cumulative, the last of them for longer durations."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}
