"""Build the JSON of a Grafana dashboard from rows of panels.

The JSON is Grafana's classic model (schema version 39, which Grafana 10.3 and later read).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 39

Json = dict[str, Any]

GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"
WIDTH = 24


@dataclass(frozen=True)
class Show:
    """One panel: its title, queries, description and kind, its width and height (a row has 24 columns), and its unit."""

    title: str
    queries: Mapping[str, str]
    """PromQL queries by the legend of their series. In a table, by the heading of their column."""
    description: str
    kind: str = "timeseries"
    width: int | None = None
    """None: the panel has the width that its row sets for panels."""
    height: int = 8
    unit: str = "short"
    thresholds: Sequence[tuple[float | None, str]] = ()
    mappings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    top: float | None = None
    """The maximum of the scale. None: Grafana sets the scale."""
    below_zero: bool = False
    stacked: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    """Headings of a table by the name of the column, in order. Other columns are hidden."""
    units: Mapping[str, str] = field(default_factory=dict)
    """Units of a table's columns by heading."""

    @property
    def of_now(self) -> bool:
        """True if the panel shows only the present value, not a range of time."""
        return self.kind in ("table", "stat")


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Show]
    open: bool = True
    width: int = 8


HEADINGS: Mapping[str, str] = {"index": "GPU", "pci_bus_id": "bus id", "Value": "verdict", "by": "order"}
"""Headings of table columns whose heading differs from their label."""


def number(title: str, query: str, description: str, **look: Any) -> Show:
    """Return a panel that shows one number."""
    return Show(title, {"": query}, description, kind="stat", width=3, height=4, **look)


def table(
    title: str, queries: str | Mapping[str, str], description: str, labels: str, width: int = WIDTH, **look: Any
) -> Show:
    """Return a table. It has a column for each of `labels` and, if there are several queries, one for each query's value."""
    columns = {label: HEADINGS.get(label, label) for label in labels.split()}
    if isinstance(queries, str):
        queries = {"": queries}
    else:
        columns |= {f"Value #{_letter(at)}": heading for at, heading in enumerate(queries)}
    return Show(title, queries, description, kind="table", width=width, columns=columns, **look)


YES_OR_NO = ("driver", "registered", "state written")
YES = {"0": ("no", RED), "1": ("yes", GREEN)}

SOURCE: Mapping[str, str] = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(
    uid: str, title: str, description: str, tags: Sequence[str], rows: Sequence[Row], variables: Mapping[str, str]
) -> Json:
    """Return the dashboard in the form that Grafana imports. `variables` has a query for the values of each variable.

    The choice "All" of a variable is `.*`, which also matches series without the label.
    """
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": [*tags],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "1m",
        "timezone": "browser",
        "templating": {"list": [*_variables(variables)]},
        "panels": [*_panels(rows)],
    }


def _variables(queries: Mapping[str, str]) -> Iterator[Json]:
    yield {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus", "refresh": 1}
    for name, query in queries.items():
        yield {
            "name": name,
            "label": "GPU" if name == "gpu" else name,
            "type": "query",
            "datasource": dict(SOURCE),
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 7,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def _panels(rows: Sequence[Row]) -> Iterator[Json]:
    count, y = 0, 0
    for row in rows:
        count += 1
        heading = {
            "id": count,
            "type": "row",
            "title": row.title,
            "collapsed": not row.open,
            "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
        }
        y += 1
        inside: list[Json] = []
        x = height = 0
        for show in row.panels:
            count += 1
            width = show.width or row.width
            if x + width > WIDTH:
                x, y, height = 0, y + height, 0
            inside.append(_panel(show, count, {"h": show.height, "w": width, "x": x, "y": y}))
            x, height = x + width, max(height, show.height)
        y += height
        # A closed row contains its panels. The panels of an open row follow the row.
        yield heading | {"panels": [] if row.open else inside}
        if row.open:
            yield from inside


def _panel(show: Show, count: int, place: Json) -> Json:
    defaults: Json = {"unit": show.unit, "color": {"mode": "thresholds" if show.thresholds else "palette-classic"}}
    if show.thresholds:
        steps = [{"value": value, "color": color} for value, color in show.thresholds]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if show.mappings:
        shown = {value: {"text": text, "color": color} for value, (text, color) in show.mappings.items()}
        defaults["mappings"] = [{"type": "value", "options": shown}]
        defaults["color"] = {"mode": "thresholds"}
    if show.top is not None:
        defaults |= {"min": 0, "max": show.top}
    panel: Json = {
        "id": count,
        "type": show.kind,
        "title": show.title,
        "description": show.description,
        "datasource": dict(SOURCE),
        "gridPos": place,
        "targets": [_target(show, at, *query) for at, query in enumerate(show.queries.items())],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": dict(_OPTIONS[show.kind]),
    }
    if show.kind == "timeseries":
        stacking = {"mode": "normal" if show.stacked else "none", "group": "A"}
        defaults["custom"] = {"fillOpacity": 30 if show.stacked else 0, "showPoints": "never", "stacking": stacking}
        if not show.below_zero:
            defaults["min"] = 0
    if show.kind == "table":
        panel["transformations"] = [*_transformations(show)]
        panel["fieldConfig"]["overrides"] = [*_overrides(show)]
    return panel


_OPTIONS: Mapping[str, Json] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "textMode": "value",
        "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
    "state-timeline": {
        "mergeValues": True,
        "showValue": "never",
        "rowHeight": 0.9,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    },
}


def _letter(at: int) -> str:
    """Return Grafana's name of the query at index `at`."""
    return chr(ord("A") + at)


def _target(show: Show, at: int, legend: str, query: str) -> Json:
    return {
        "refId": _letter(at),
        "datasource": dict(SOURCE),
        "expr": query,
        "legendFormat": "__auto" if show.of_now else legend,
        "instant": show.of_now,
        "range": not show.of_now,
        "format": "table" if show.kind == "table" else "time_series",
        "editorMode": "code",
    }


def _transformations(show: Show) -> Iterator[Json]:
    if len(show.queries) > 1:
        yield {"id": "merge", "options": {}}
    by_name = dict.fromkeys(show.columns, True)
    yield {"id": "filterFieldsByName", "options": {"include": {"names": list(by_name)}}}
    yield {
        "id": "organize",
        "options": {
            "excludeByName": {},
            "indexByName": {name: at for at, name in enumerate(show.columns)},
            "renameByName": {name: heading for name, heading in show.columns.items() if name != heading},
        },
    }


def _overrides(show: Show) -> Iterator[Json]:
    for heading, unit in show.units.items():
        yield {"matcher": {"id": "byName", "options": heading}, "properties": [{"id": "unit", "value": unit}]}
    for heading in (name for name in show.columns.values() if name in YES_OR_NO):
        yield {
            "matcher": {"id": "byName", "options": heading},
            "properties": [
                {
                    "id": "mappings",
                    "value": [
                        {
                            "type": "value",
                            "options": {value: {"text": text, "color": color} for value, (text, color) in YES.items()},
                        }
                    ],
                },
                {"id": "custom.cellOptions", "value": {"type": "color-text"}},
            ],
        }
    if show.mappings:
        yield {
            "matcher": {"id": "byName", "options": "verdict"},
            "properties": [{"id": "custom.cellOptions", "value": {"type": "color-background"}}],
        }
