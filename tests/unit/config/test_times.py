"""Moments and durations as they are told."""

import pytest

from gpu_plugin.config.times import duration, rfc3339, rfc3339_milliseconds, utc

AT = 1_800_000_000.1234
NEVER = [-1e18, 7e19, 1e300, float("inf"), float("nan")]


def test_a_moment_is_told_by_the_calendar():
    assert utc(0.0) == "1970-01-01 00:00:00 UTC"
    assert utc(AT) == "2027-01-15 08:00:00 UTC"
    assert rfc3339(AT) == "2027-01-15T08:00:00Z"
    assert rfc3339_milliseconds(AT) == "2027-01-15T08:00:00.123Z"
    assert rfc3339_milliseconds(0.9999) == "1970-01-01T00:00:01.000Z"


@pytest.mark.parametrize("at", NEVER)
def test_one_that_no_calendar_has_is_told_to_people_and_not_to_programs(at):
    assert utc(at).endswith(" s after 1970-01-01 UTC")
    with pytest.raises((OverflowError, OSError, ValueError)):
        rfc3339(at)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (-7.0, "0 s"),
        (59.4, "59 s"),
        (59.5, "1 min"),
        (90.0, "1 min 30 s"),
        (600.0, "10 min"),
        (615.0, "10 min"),
        (720.0, "12 min"),
        (3599.0, "59 min"),
        (3600.0, "1 h"),
        (11_100.0, "3 h 5 min"),
        (float("inf"), "inf s"),
    ],
)
def test_a_duration_is_told_to_two_units_at_most(seconds, told):
    assert duration(seconds) == told
