"""Families of metrics, and their text: in Prometheus' format 0.0.4, or in OpenMetrics 1.0 if requested.

prometheus.io/docs/instrumenting/exposition_formats, and github.com/prometheus/OpenMetrics (specification/OpenMetrics.md).
Prometheus' client library would cost 2.6 MiB on each node for these few lines of code; tests parse the text with that library.
Samples are iterators, so that writing can pause for other tasks: a full node has tens of thousands of samples.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import msgspec

# Units at the end of families' names. OpenMetrics has an additional line with the unit.
UNITS = ("celsius", "watts", "joules", "bytes", "seconds", "ratio")


_ENDINGS = {"counter": "_total", "info": "_info"}  # the ending of families' names by kind, in Prometheus' format

# One line: the suffix of the family's name, the labels from `labelled`, and the value. A tuple, since there are thousands.
Sample = tuple[str, str, float]


class Family(NamedTuple):
    """`name` is without the ending of its kind. `help` is a sentence without quotes and backslashes.

    `kind` is in both formats: gauge, counter, histogram or info. `samples` can be iterated over once.
    """

    name: str
    kind: str
    help: str
    samples: Iterable[Sample]


# For each sample its labels as text, and its number or None for no sample. A bare number is a sample without labels.
Labelled = Iterable[tuple[str, Any]] | float | None

_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def labelled(**labels: object) -> str:
    """Return labels as escaped text for both formats, without braces. Text that is not valid in UTF-8 is shown as `?`."""
    return ",".join([f'{name}="{_escaped(str(value))}"' for name, value in labels.items()])


def gauge(name: str, about: str, samples: Labelled) -> Family:
    """Return a family of values that go up and down."""
    return Family(name, "gauge", about, _samples("", samples))


def counter(name: str, about: str, samples: Labelled) -> Family:
    """Return a family of values that only grow until a restart. `name` ends in _total. Negative values are left out."""
    counted = (sample for sample in _samples("_total", samples) if sample[2] >= 0)
    return Family(name.removesuffix("_total"), "counter", about, counted)


def info(name: str, about: str, samples: Iterable[str]) -> Family:
    """Return a family of facts in labels, with value 1. `name` ends in _info."""
    return Family(name.removesuffix("_info"), "info", about, (("_info", labels, 1) for labels in samples))


def histogram(name: str, about: str, durations: Iterable[tuple[str, Mapping[str, Any]]]) -> Family:
    """Return a family of durations in seconds from the results of `Histogram.as_data`, each with its labels."""
    samples: list[Sample] = []
    for labels, each in durations:
        comma = "," if labels else ""
        total = 0
        for bound, count in zip((*map(repr, map(float, each["bounds"])), "+Inf"), each["counts"], strict=True):
            total += count
            samples.append(("_bucket", f'{labels}{comma}le="{bound}"', total))
        samples += [("_count", labels, total), ("_sum", labels, each["sum"])]
    return Family(name, "histogram", about, samples)


def _samples(suffix: str, samples: Labelled) -> Iterator[Sample]:
    if samples is None or isinstance(samples, int | float):
        samples = [("", samples)]
    return ((suffix, labels, +value) for labels, value in samples if value is not None)  # + converts a bool to a number


def _escaped(text: str) -> str:
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode("utf-8")
    if "\\" in text or '"' in text or "\n" in text:  # three searches take a tenth of the time of a translation
        return text.translate(_ESCAPED)
    return text


class Format(msgspec.Struct, frozen=True):
    """An exposition format: its content type, and its last line."""

    content_type: str
    openmetrics: bool
    end: str = ""


PROMETHEUS = Format("text/plain; version=0.0.4; charset=utf-8", openmetrics=False)
OPENMETRICS = Format("application/openmetrics-text; version=1.0.0; charset=utf-8", openmetrics=True, end="# EOF\n")

# Supported versions, by their names in requests. A request without a version accepts any version.
_OPENMETRICS_VERSIONS = ("1.0.0", "")


def wanted(accept: str) -> Format:
    """Return the format that an Accept header (RFC 9110, 12.5.1) requests. The default is Prometheus' own."""
    open_metrics, plain = 0.0, 0.0
    for part in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        values = dict(parameter.partition("=")[::2] for parameter in parameters)
        quality = _quality(values.get("q", "1"))
        if kind == "application/openmetrics-text" and values.get("version", "").strip('"') in _OPENMETRICS_VERSIONS:
            open_metrics = max(open_metrics, quality)
        elif kind in ("text/plain", "text/*"):
            plain = max(plain, quality)
    return OPENMETRICS if open_metrics > 0 and open_metrics >= plain else PROMETHEUS


def lines(family: Family, form: Format) -> Iterator[str]:
    """Return a family's lines; empty if it has no sample."""
    name, kind, about, _ = family
    samples = iter(family.samples)
    first = next(samples, None)
    if first is None:
        return
    if form.openmetrics:
        called, type_name = name, kind
    else:
        called, type_name = f"{name}{_ENDINGS.get(kind, '')}", "gauge" if kind == "info" else kind
    yield f"# HELP {called} {about}"
    yield f"# TYPE {called} {type_name}"
    unit = name.rpartition("_")[2]
    if form.openmetrics and unit in UNITS:
        yield f"# UNIT {called} {unit}"
    for suffix, labels, value in chain((first,), samples):
        yield f"{name}{suffix}{{{labels}}} {value}" if labels else f"{name}{suffix} {value}"


def _quality(text: str) -> float:
    try:
        quality = float(text)
    except ValueError:
        return 0.0
    return quality if 0.0 <= quality <= 1.0 else 0.0
