"""Families of metrics, and their text: Prometheus' format 0.0.4, and OpenMetrics 1.0 for those who ask for it.

prometheus.io/docs/instrumenting/exposition_formats, and github.com/prometheus/OpenMetrics (specification/OpenMetrics.md).
Own code, since the client library costs 2.6 MiB on every node for a writer of these few lines; the tests have its parsers read
what is written here. Samples are made as they are written, so that whoever writes can let others go first: a full node has tens
of thousands.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import msgspec

UNITS = ("celsius", "watts", "joules", "bytes", "seconds", "ratio")
"""What names of families end in; OpenMetrics says it once more."""


_ENDINGS = {"counter": "_total", "info": "_info"}
"""What the names of families end in that are of these kinds, in Prometheus' format."""

Sample = tuple[str, str, float]
"""One line: what the family's name ends in here, the labels as `labelled` gives them, and the value. Thousands: a bare tuple."""


class Family(NamedTuple):
    """`name` is without the ending that its kind has. `help` is a sentence without quotes and backslashes.

    `kind` is a word of both formats: gauge, counter, histogram, info. `samples` can be gone through once.
    """

    name: str
    kind: str
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
    return Family(name, "gauge", about, _taken("", samples))


def counter(name: str, about: str, samples: Labelled) -> Family:
    """What only grows, until whoever counts begins again. `name` ends in _total. A driver that counts below 0 is not repeated."""
    counted = (sample for sample in _taken("_total", samples) if sample[2] >= 0)
    return Family(name.removesuffix("_total"), "counter", about, counted)


def info(name: str, about: str, samples: Iterable[str]) -> Family:
    """What something is, in labels; the value is 1. `name` ends in _info."""
    return Family(name.removesuffix("_info"), "info", about, (("_info", labels, 1) for labels in samples))


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
    return Family(name, "histogram", about, samples)


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


class Format(msgspec.Struct, frozen=True):
    """A format of exposition: its content type, and its last line."""

    content_type: str
    openmetrics: bool
    end: str = ""


PROMETHEUS = Format("text/plain; version=0.0.4; charset=utf-8", openmetrics=False)
OPENMETRICS = Format("application/openmetrics-text; version=1.0.0; charset=utf-8", openmetrics=True, end="# EOF\n")

_OPENMETRICS_VERSIONS = ("1.0.0", "")
"""Those that are written here, by what a request calls them; without a version any will do."""


def wanted(accept: str) -> Format:
    """The format that an Accept header (RFC 9110, 12.5.1) asks for; Prometheus' own wherever it does not ask for the other."""
    open_metrics, plain = 0.0, 0.0
    for part in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        told = dict(parameter.partition("=")[::2] for parameter in parameters)
        quality = _quality(told.get("q", "1"))
        if kind == "application/openmetrics-text" and told.get("version", "").strip('"') in _OPENMETRICS_VERSIONS:
            open_metrics = max(open_metrics, quality)
        elif kind in ("text/plain", "text/*"):
            plain = max(plain, quality)
    return OPENMETRICS if open_metrics > 0 and open_metrics >= plain else PROMETHEUS


def lines(family: Family, form: Format) -> Iterator[str]:
    """A family's lines; none where it has no sample."""
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


def _quality(told: str) -> float:
    try:
        quality = float(told)
    except ValueError:
        return 0.0
    return quality if 0.0 <= quality <= 1.0 else 0.0
