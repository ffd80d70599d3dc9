"""A table of figures and their budgets, and a table that compares rules. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar


class Judged(StrEnum):
    """The value of a row that its budget applies to."""

    P50 = "p50"
    P99 = "p99"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    `p50` and `p99` are in `unit`; `p99` is None if it has no meaning. `budget`, in `unit`, is for the value that `judged` names.
    `bare` is the p50 of the comparison, `ratio` is the figure divided by the comparison, and `ratio_budget` is its greatest
    allowed value. `series` has the samples by name.
    """

    figure: str
    unit: str
    samples: int
    p50: float
    p99: float | None = None
    budget: float | None = None
    judged: Judged = Judged.P50
    bare: float | None = None
    ratio: float | None = None
    ratio_budget: float | None = None
    note: str = ""
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The value to compare with the budget."""
        return self.p50 if self.judged is Judged.P50 or self.p99 is None else self.p99

    @property
    def budgets(self) -> int:
        """The number of its budgets: 0, 1 or 2."""
        return (self.budget is not None) + (self.ratio is not None and self.ratio_budget is not None)

    def missed(self) -> list[str]:
        """Return a text for each missed budget."""
        words = []
        if self.budget is not None and self.value > self.budget:
            beside = "" if self.bare is None else f" (bare {number(self.bare)})"
            words.append(
                f"{self.figure} {self.judged} {number(self.value)} {self.unit} > {number(self.budget)}{beside}"
            )
        if self.ratio is not None and self.ratio_budget is not None and self.ratio > self.ratio_budget:
            words.append(f"{self.figure} {self.ratio:.2f} x bare > {number(self.ratio_budget)}")
        return words


@dataclass(frozen=True, slots=True)
class Comparison:
    """The values of several rules for one subject, by figure and rule; our rule is the first.

    A value without a meaning is None.
    Greater values are better. Our value must not be below the value of a rule in `against`, in any figure; this is one budget.
    """

    subject: str
    samples: int
    values: Mapping[str, Mapping[str, float | None]]
    against: Sequence[str]
    note: str = ""

    budgets: ClassVar[int] = 1

    def missed(self) -> list[str]:
        """Return one text with all figures in which our rule is worse; empty if it never is."""
        words = []
        for figure, values in self.values.items():
            ours, *_ = values.values()
            for rule in self.against:
                other = values[rule]
                if ours is not None and other is not None and other - ours > NOISE * abs(other):
                    words.append(f"{figure} {_apart(ours, other)} of {rule}")
        return [f"{self.subject}: {', '.join(words)}"] if words else []


NOISE = 1e-9
"""The largest relative difference between sums of the same floating-point numbers in different orders."""

HEAD = ("figure", "n", "p50", "p99", "unit", "budget", "bare", "x bare", "budget", "met", "")


def number(value: float) -> str:
    """Format a value with three significant digits, or more before the point, and without an exponent."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def render(rows: Iterable[Row]) -> str:
    """Return the table with a line for each row and numbers aligned to the right."""
    return aligned([HEAD, *(_cells(row) for row in rows)], left={0, 4, len(HEAD) - 1})


def side_by_side(comparisons: Sequence[Comparison]) -> str:
    """Return the table of comparisons with a line for each subject. All must have the same figures and rules; at least one."""
    figures = comparisons[0].values
    lines = [["", "n", *(rule for rules in figures.values() for rule in rules), "met", ""]]
    for one in comparisons:
        cells = [_shown(value) for rules in one.values.values() for value in rules.values()]
        lines.append([one.subject, str(one.samples), *cells, "NO" if one.missed() else "yes", one.note])
    widths = _widths(lines)
    head, at = " " * (widths[0] + 2 + widths[1]), 2
    for figure, rules in figures.items():
        span = widths[at : at + len(rules)]
        head += "  " + f" {figure} ".center(sum(span) + 2 * len(span) - 2, "-")
        at += len(rules)
    return head + "\n" + aligned(lines, left={0, len(lines[0]) - 1})


def _apart(less: float, more: float) -> str:
    """Format two different values with enough digits to show the difference."""
    texts = ((f"{less:.{digits}f}", f"{more:.{digits}f}") for digits in range(1, 18))
    return " < ".join(next((pair for pair in texts if pair[0] != pair[1]), (repr(less), repr(more))))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.{1 if abs(value) >= 10 else 3}f}"


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]


def aligned(lines: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """Align cells in columns: the columns in `left` to the left, all others to the right."""
    widths = _widths(lines)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def verdict(rows: Sequence[Row | Comparison], unmeasured: Sequence[str] = ()) -> str:
    """Return the last line: the number of missed budgets, and their texts."""
    budgets = sum(row.budgets for row in rows)
    missed = [words for row in rows for words in row.missed()]
    text = f"{len(missed)} of {budgets} budgets missed" + (f": {'; '.join(missed)}" if missed else "")
    return text + (f"; not measured: {', '.join(unmeasured)}" if unmeasured else "")


def _cells(row: Row) -> tuple[str, ...]:
    met = "" if not row.budgets else "NO" if row.missed() else "yes"
    return (
        row.figure,
        str(row.samples),
        number(row.p50),
        "" if row.p99 is None else number(row.p99),
        row.unit,
        "" if row.budget is None else f"{row.judged} <= {number(row.budget)}",
        "" if row.bare is None else number(row.bare),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.ratio_budget is None else f"<= {number(row.ratio_budget)}",
        met,
        row.note,
    )
