"""Delays between attempts: they double up to a bound, are spread, and begin anew after success."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_plugin.runtime.backoff import EXACT, IN_CLUSTER, NO_SOONER, Backoff

NOW = 1000.0


def test_the_first_delay_doubles_up_to_the_longest_and_stays_there():
    backoff = Backoff(1.0, 30.0)
    assert [backoff.failed(NOW) for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    for _ in range(5000):
        assert backoff.failed(NOW) == 30.0


def test_free_failures_are_tried_again_at_once():
    backoff = Backoff(0.05, 30.0, free=2)
    assert [backoff.failed(NOW) for _ in range(5)] == [0.0, 0.0, 0.05, 0.1, 0.2]


def test_what_succeeded_or_worked_for_long_fails_for_the_first_time_again():
    backoff = Backoff(1.0, 30.0, stable=60.0)
    assert [backoff.failed(NOW) for _ in range(3)] == [1.0, 2.0, 4.0]
    assert backoff.failed(NOW, worked_for=59.9) == 8.0
    assert backoff.failed(NOW, worked_for=60.0) == 1.0
    assert backoff.failed(NOW) == 2.0
    backoff.succeeded()
    assert (backoff.failures, backoff.due(NOW)) == (0, True)
    assert backoff.failed(NOW) == 1.0


def test_the_next_attempt_is_due_once_the_delay_is_over():
    backoff = Backoff(4.0, 30.0)
    assert backoff.due(-NOW)
    backoff.failed(NOW)
    assert not backoff.due(NOW + 3.9)
    assert backoff.due(NOW + 4.0)


@pytest.mark.parametrize(("spread", "low", "high"), [(EXACT, 8.0, 8.0), (IN_CLUSTER, 4.0, 8.0), (NO_SOONER, 8.0, 12.0)])
def test_the_dice_spread_a_delay_between_two_multiples_of_it(spread, low, high):
    def fourth(dice):
        backoff = Backoff(1.0, 30.0, spread)
        return [backoff.failed(NOW, dice) for _ in range(4)][-1]

    assert fourth(0.0) == pytest.approx(low)
    assert fourth(1.0) == pytest.approx(high)


@given(
    first=st.floats(0.01, 100),
    times=st.floats(1, 1000),
    free=st.integers(0, 3),
    dice=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=40),
)
def test_a_delay_never_shrinks_by_more_than_its_spread_nor_passes_the_longest(first, times, free, dice):
    backoff = Backoff(first, first * times, IN_CLUSTER, free=free)
    delays = [backoff.failed(NOW, die) for die in dice]
    least, largest = IN_CLUSTER
    assert max(delays) <= first * times * largest * (1 + 1e-9)
    assert all(later >= sooner * least / largest * (1 - 1e-9) for sooner, later in pairwise(delays))
    assert backoff.failures == len(dice)
