"""How long things took, counted in buckets. Plain: no clock, no registry, no lock."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any


class Histogram:
    """Counts seconds by upper bounds, which count as within. Whoever shares one between threads sees to that."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are seconds, in order; what is above the last one is counted, too."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Takes in one."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def as_data(self) -> Mapping[str, Any]:
        """Plain data: `bounds` (seconds), `counts` of each bucket by itself with one more for what is above, `sum` (seconds)."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}
