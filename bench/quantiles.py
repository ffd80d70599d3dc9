"""Medians, percentiles and ratios of samples. Pure."""

import math
import statistics
from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` % of the samples do not exceed (nearest rank, nothing interpolated).

    With fewer than 100 samples the 99th percentile is thus the greatest of them. Raises ValueError where there are none.
    """
    if not samples:
        raise ValueError("no samples")
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


def median(samples: Sequence[float]) -> float:
    """The 50th percentile, the mean of the middle two where their number is even. Raises ValueError where there are none."""
    return statistics.median(samples)


def median_ratio(measured: Sequence[float], bare: Sequence[float]) -> float:
    """The median of the ratios of samples taken in turn: a machine that is slow for a while slows both of a pair.

    Raises ValueError where the two do not pair up.
    """
    return median([one / other for one, other in zip(measured, bare, strict=True)])
