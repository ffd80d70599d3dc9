"""Buckets."""

import pytest

from gpu_plugin.runtime.histogram import Histogram


@pytest.mark.parametrize(
    ("seconds", "counts"), [(0.0, [1, 0, 0]), (0.1, [1, 0, 0]), (0.11, [0, 1, 0]), (1.0, [0, 1, 0]), (1.5, [0, 0, 1])]
)
def test_a_bound_counts_as_within(seconds, counts):
    histogram = Histogram((0.1, 1.0))
    histogram.observe(seconds)
    assert histogram.as_data() == {"bounds": [0.1, 1.0], "counts": counts, "sum": seconds}
