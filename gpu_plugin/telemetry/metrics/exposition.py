"""Families of metrics as text: Prometheus' format 0.0.4, and OpenMetrics 1.0 for those who ask for it.

prometheus.io/docs/instrumenting/exposition_formats, and github.com/prometheus/OpenMetrics (specification/OpenMetrics.md).
Own code, since the client library costs 2.6 MiB on every node for a writer of these few lines; the tests have its parsers read
what is written here.
"""

from collections.abc import Iterator
from itertools import chain

import msgspec

from gpu_plugin.telemetry.metrics.family import Family, Kind

UNITS = ("celsius", "watts", "joules", "bytes", "seconds", "ratio")
"""What names of families end in; OpenMetrics says it once more."""


class Format(msgspec.Struct, frozen=True):
    """One of the two: its content type, and what its last line is."""

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
        called, type_name = name, kind.value
    else:
        ending = {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(kind, "")
        called, type_name = f"{name}{ending}", "gauge" if kind is Kind.INFO else kind.value
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
