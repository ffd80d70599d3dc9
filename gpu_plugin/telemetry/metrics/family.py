"""A family of metrics: its name, what it is, and its samples, with labels that are text already.

Samples are made as they are written, so that whoever writes can let others go first: a full node has tens of thousands.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

__all__ = ["Family", "Kind", "Sample", "counter", "gauge", "histogram", "info", "labelled"]


class Kind(Enum):
    """What a family is, in the words of both formats."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


Sample = tuple[str, str, float]
"""One line: what the family's name ends in here, the labels as `labelled` gives them, and the value. Thousands: a bare tuple."""


class Family(NamedTuple):
    """`name` is without the ending that its kind has: `_total`, `_info`. `help` is a sentence without quotes and backslashes.

    `samples` can be gone through once.
    """

    name: str
    kind: Kind
    help: str
    samples: Iterable[Sample]


Labelled = Iterable[tuple[str, Any]] | float | None
"""Labels as text, and the value of each sample: a number, or None where there is none to give. A value alone has no labels."""

_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def labelled(**labels: object) -> str:
    """Labels as text, escaped as both formats have it, without braces. What is not text in UTF-8 is shown as `?`."""
    return ",".join([f'{name}="{_escaped(str(value))}"' for name, value in labels.items()])


def gauge(name: str, about: str, samples: Labelled) -> Family:
    """What goes up and down."""
    return Family(name, Kind.GAUGE, about, _taken("", samples))


def counter(name: str, about: str, samples: Labelled) -> Family:
    """What only grows, until whoever counts begins again. `name` ends in _total. A driver that counts below 0 is not repeated."""
    counted = (sample for sample in _taken("_total", samples) if sample[2] >= 0)
    return Family(name.removesuffix("_total"), Kind.COUNTER, about, counted)


def info(name: str, about: str, samples: Iterable[str]) -> Family:
    """What something is, in labels; the value is 1. `name` ends in _info."""
    return Family(name.removesuffix("_info"), Kind.INFO, about, (("_info", labels, 1) for labels in samples))


def histogram(name: str, about: str, told: Iterable[tuple[str, Mapping[str, Any]]]) -> Family:
    """How long things took, in seconds, by labels: what `Histogram.told` gives."""
    samples: list[Sample] = []
    for labels, each in told:
        comma = "," if labels else ""
        total = 0
        for bound, count in zip((*map(repr, map(float, each["bounds"])), "+Inf"), each["counts"], strict=True):
            total += count
            samples.append(("_bucket", f'{labels}{comma}le="{bound}"', total))
        samples += [("_count", labels, total), ("_sum", labels, each["sum"])]
    return Family(name, Kind.HISTOGRAM, about, samples)


def _taken(suffix: str, samples: Labelled) -> Iterator[Sample]:
    if samples is None or isinstance(samples, int | float):
        samples = [("", samples)]
    return ((suffix, labels, +value) for labels, value in samples if value is not None)  # + makes a number of a bool


def _escaped(text: str) -> str:
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")
    if "\\" in text or '"' in text or "\n" in text:  # three looks are a tenth of a translation
        return text.translate(_ESCAPED)
    return text
