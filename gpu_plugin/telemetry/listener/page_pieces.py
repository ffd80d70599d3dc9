"""Pieces that the parts of the status page are made of: moments, badges, tables. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any
from urllib.parse import quote

from gpu_plugin.config.times import rfc3339, utc
from gpu_plugin.placement.views.svg import xml
from gpu_plugin.telemetry.listener.page_data import ATTENTION, OK, UNHEALTHY

Data = Mapping[str, Any]

SIGNS: Mapping[str, str] = {
    OK: "✓",
    "healthy": "✓",
    ATTENTION: "▲",
    "degraded": "▲",
    UNHEALTHY: "✕",
}
"""What stands before each state, for those who tell colours badly."""

WORDS: Mapping[str, str] = {"healthy": "Healthy", "degraded": "Healthy, degraded", "unhealthy": "Unhealthy"}

NONE = '<span class="none" aria-hidden="true">-</span><span class="unseen">not known</span>'


def moment(at: float | None) -> str:
    """A moment; a script adds how long ago that was."""
    if at is None:
        return ""
    try:
        told = f'<time datetime="{rfc3339(at)}">{utc(at)}</time>'
    except (OverflowError, ValueError, OSError):
        return utc(at)
    return f'{told}<span class="age" data-since="{at:.0f}"></span>'


def since(at: float | None) -> str:
    """Since when something is so; nothing where nobody knows."""
    return "" if at is None else f' <span class="since">since {moment(at)}</span>'


def badge(state: str, text: str) -> str:
    """A state in a word, with its sign."""
    return f'<span class="badge {xml(state)}"><span aria-hidden="true">{SIGNS[state]}</span> {xml(text)}</span>'


def anchor(gpu: Data) -> str:
    """A GPU's uuid as a part of an address."""
    return xml(quote(gpu["uuid"], errors="replace"))


def bus_and_model(gpu: Data) -> str:
    """Which GPU it is, beside its index."""
    bus = f'<code class="muted">{xml(gpu["bus_id"])}</code> ' if gpu["bus_id"] else ""
    return f'{bus}<span class="who">{xml(gpu["model"] or "unknown model")}</span>'


# Tables. Their roles are spelled out, since a browser forgets them where a style sheet lays rows out as blocks.


Cell = tuple[str, str, str]
"""The heading of its column, its content, and its style: `head` of those that head their row."""


def table(caption: str, rows: Sequence[Sequence[Cell]], kind: str = "", states: Iterable[str] = repeat("")) -> str:
    """A table of these rows, one at least; `states` are the styles of whole rows."""
    heads = "".join(
        f'<th scope="col" role="columnheader" class="{style if style == "number" else ""}">{xml(head)}</th>'
        if head
        else '<td role="cell"></td>'
        for head, _, style in rows[0]
    )
    return (
        f'<table role="table" class="{kind}"><caption class="unseen">{xml(caption)}</caption>'
        f'<thead role="rowgroup"><tr role="row">{heads}</tr></thead>'
        f'<tbody role="rowgroup">{"".join(map(_row, rows, states))}</tbody></table>'
    )


def _row(cells: Iterable[Cell], state: str) -> str:
    """A row. The heading stands in each cell, for where the table is too wide."""
    shown = "".join(
        f'<th scope="row" role="rowheader" class="{style}">{content}</th>'
        if style.startswith("head")
        else f'<td role="cell" class="{style}" data-head="{xml(head)}"><div>{content}</div></td>'
        for head, content, style in cells
    )
    return f'<tr role="row" class="{xml(state)}">{shown}</tr>'
