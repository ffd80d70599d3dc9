"""Medians, percentiles and ratios of samples. Pure."""

import math
import statistics
from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that at least `percent` % of the samples do not exceed (nearest rank, without interpolation).

    With fewer than 100 samples, the 99th percentile is the greatest sample. Raises ValueError if there are no samples.
    """
    if not samples:
        raise ValueError("no samples")
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


def median(samples: Sequence[float]) -> float:
    """Return the median; for an even number, the mean of the middle two. Raises ValueError if there are no samples."""
    return statistics.median(samples)


def median_ratio(measured: Sequence[float], bare: Sequence[float]) -> float:
    """Return the median of the ratios of samples taken in turn. A machine that slows down affects both samples of a pair.

    Raises ValueError if the numbers of samples differ.
    """
    return median([one / other for one, other in zip(measured, bare, strict=True)])
