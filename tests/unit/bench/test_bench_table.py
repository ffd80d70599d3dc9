"""The pure parts of the benchmark: quantiles, budgets, the table."""

import pytest

from bench.quantiles import median_ratio, percentile
from bench.table import Comparison, Judged, Row, number, render, side_by_side, verdict


def test_percentile_is_a_sample_never_less_than_asked_for():
    samples = [float(at) for at in range(200, 0, -1)]
    assert percentile(samples, 50) == 100
    assert percentile(samples, 99) == 198
    assert percentile([3.0, 1.0], 99) == 3
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_ratio_is_taken_pair_by_pair():
    assert median_ratio([2, 40, 3], [1, 20, 2]) == 2
    with pytest.raises(ValueError, match="longer"):
        median_ratio([1], [1, 2])


def test_budget_is_held_against_the_value_it_is_for():
    assert not Row("x", "ms", 9, 1.0, 9.0, budget=2).missed()
    assert Row("x", "ms", 9, 1.0, 9.0, budget=2, judged=Judged.P99).missed() == ["x p99 9 ms > 2"]
    assert Row("x", "ms", 9, 1.0, ratio=1.84, ratio_budget=1.8).missed() == ["x 1.84 x bare > 1.8"]


def test_verdict_counts_budgets_not_rows():
    rows = [
        Row("a", "ms", 1, 3.0, budget=2, ratio=1.0, ratio_budget=1.5),
        Row("b", "MiB", 1, 35.84, budget=40),
        Row("c", "ms", 1, 7.0),
    ]
    assert verdict(rows) == "1 of 3 budgets missed: a p50 3 ms > 2"
    assert verdict(rows[1:], ["xid"]) == "0 of 1 budgets missed; not measured: xid"
    head, *lines = render(rows).splitlines()
    assert head.startswith("figure")
    assert [line.split()[0] for line in lines] == ["a", "b", "c"]
    assert "NO" in lines[0]
    assert "yes" in lines[1]


def compared(subject, ours, first, other, linked=None):
    values = {
        "mean": {"ours": ours, "first": first, "other": other},
        "linked": {"ours": linked, "first": 0.5, "other": None},
    }
    return Comparison(subject, 7, values, ("first", "other"))


def test_a_comparison_is_one_budget_that_nothing_below_another_rule_meets():
    assert not compared("a", 20.0, 20.0, 19.9, 0.5).missed()
    assert not compared("a", 20.0, 20.0 + 1e-12, 1.0).missed(), "noise of floating-point numbers"
    assert not Comparison("a", 1, {"mean": {"ours": 1.0, "first": 2.0}}, ()).missed(), "not a rule to be compared with"
    short = compared("b", 20.0, 21.0, 20.04, 0.25)
    assert short.missed() == ["b: mean 20.0 < 21.0 of first, mean 20.00 < 20.04 of other, linked 0.2 < 0.5 of first"]
    assert verdict([compared("a", 20.0, 1.0, 1.0), short, Row("c", "ms", 1, 3.0, budget=2)]).startswith(
        "2 of 3 budgets"
    )


def test_rules_stand_side_by_side():
    groups, rules, *lines = side_by_side(
        [compared("a", 20.0, 1.5, 7.0), compared("long name", 1.0, 2.0, 3.0)]
    ).splitlines()
    assert [word.strip("-") for word in groups.split() if word.strip("-")] == ["mean", "linked"]
    assert rules.split() == ["n", "ours", "first", "other", "ours", "first", "other", "met"]
    assert lines[0].split() == ["a", "7", "20.0", "1.500", "7.000", "-", "0.500", "-", "yes"]
    assert lines[1].endswith("NO")


@pytest.mark.parametrize(
    ("value", "text"), [(0.0714, "0.071"), (1.234, "1.23"), (35.84, "35.8"), (250, "250"), (1016.4, "1016"), (2.0, "2")]
)
def test_numbers_are_short(value, text):
    assert number(value) == text
