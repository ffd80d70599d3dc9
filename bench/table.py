"""Figures against their budgets, as rows of one table. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Judged(StrEnum):
    """Which of a row's values its budget is for."""

    P50 = "p50"
    P99 = "p99"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    `p50` and `p99` are in `unit`, `p99` None where it says nothing; `budget`, in `unit`, is for the value that `judged`
    names. `bare` is the same as `p50` for what stands beside it as a comparison, `ratio` how many times as much the
    figure is, and `ratio_budget` how many times it may be. `series` are the values behind it, by what they are of.
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
        """What is held against the budget."""
        return self.p50 if self.judged is Judged.P50 or self.p99 is None else self.p99

    @property
    def budgets(self) -> int:
        """How many budgets it has: none, one or two."""
        return (self.budget is not None) + (self.ratio is not None and self.ratio_budget is not None)

    def missed(self) -> list[str]:
        """What it misses, each in words."""
        words = []
        if self.budget is not None and self.value > self.budget:
            beside = "" if self.bare is None else f" (bare {number(self.bare)})"
            words.append(
                f"{self.figure} {self.judged} {number(self.value)} {self.unit} > {number(self.budget)}{beside}"
            )
        if self.ratio is not None and self.ratio_budget is not None and self.ratio > self.ratio_budget:
            words.append(f"{self.figure} {self.ratio:.2f} x bare > {number(self.ratio_budget)}")
        return words


HEAD = ("figure", "n", "p50", "p99", "unit", "budget", "bare", "x bare", "budget", "met", "")


def number(value: float) -> str:
    """A value to three significant digits, more before the point; never in exponents."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def render(rows: Iterable[Row]) -> str:
    """The table, one line a row, numbers to the right."""
    lines = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    left = {0, 4, len(HEAD) - 1}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def verdict(rows: Sequence[Row], unmeasured: Sequence[str] = ()) -> str:
    """The last line: how many budgets are missed, and which."""
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
