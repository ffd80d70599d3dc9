"""HTML of the status page for GPUs, their devices and the holders of devices, and pieces for all sections. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any
from urllib.parse import quote

from gpu_plugin.config.times import rfc3339, utc
from gpu_plugin.config.words import counted
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
"""The sign before each state, for people who cannot distinguish colours well."""

WORDS: Mapping[str, str] = {"healthy": "Healthy", "degraded": "Healthy, degraded", "unhealthy": "Unhealthy"}

NONE = '<span class="none" aria-hidden="true">-</span><span class="unseen">not known</span>'

Cell = tuple[str, str, str]
"""The heading of its column, its content, and its style: `head` if it is the heading of its row."""

MAX_NAMED_PODS = 3
"""Largest number of containers that are named in the row of a GPU; the list of its devices has all of them."""

MAX_CELLS = 64
"""Largest number of a GPU's devices that are drawn as cells; with more devices, only numbers are shown."""

# Width of a device's cell including the gap, and the number of cells in a row.
CELL = 11
ACROSS = 14


def gpus(data: Data) -> str:
    """The table of GPUs."""
    if not data["gpus"]:
        return '<p class="none">No GPU is known yet.</p>'
    return table("GPUs of this node", [*map(_gpu, data["gpus"])], "gpus", (gpu["state"] for gpu in data["gpus"]))


def _gpu(gpu: Data) -> Sequence[Cell]:
    readings = gpu["readings"]
    return (
        ("GPU", f"<b>{gpu['index']}</b> {bus_and_model(gpu)}", "head"),
        ("Health", _health(gpu), "health"),
        ("Temperature", _temperature(readings), "number"),
        ("Power", _share(readings["power_watts"], readings["power_limit_watts"], 1, "W"), "number"),
        ("Use", NONE if readings["utilization_ratio"] is None else f"{readings['utilization_ratio']:.0%}", "number"),
        ("Memory", _share(readings["memory_used_bytes"], readings["memory_total_bytes"], 2**30, "GiB"), "number"),
        ("Devices", _strip(gpu), "strip"),
        ("Held by", _held_by(gpu), "holders"),
    )


def _health(gpu: Data) -> str:
    html = badge(gpu["state"], WORDS[gpu["state"]])
    reasons = [(signal["detail"], signal["since"]) for signal in gpu["signals"]]
    reasons += [(f"withheld: {why}", None) for why in gpu["withheld"]]
    return html + "".join(f'<br><span class="why">{xml(why)}</span>{since(when)}' for why, when in reasons)


def _temperature(readings: Data) -> str:
    now, slow, off = (readings[f"{name}_celsius"] for name in ("temperature", "slowdown", "shutdown"))
    if now is None:
        return NONE
    html = f"{now:.0f} °C"
    if off is not None and now >= off:
        html = f'<strong class="bad">{html}, beyond shutdown</strong>'
    elif slow is not None and now >= slow:
        html = f'<strong class="bad">{html}, at slowdown</strong>'
    limits = [f"{how} {at:.0f}" for how, at in (("slows at", slow), ("off at", off)) if at is not None]
    if not limits:
        return html
    top = max(at for at in (slow, off) if at is not None)
    high = slow if slow is not None else top
    bar = (
        f'<meter min="0" max="{top:.0f}" low="{high - 10:.0f}" high="{high:.0f}" optimum="0" value="{min(now, top):.0f}"'
        ' aria-hidden="true"></meter>'
    )
    return f'{html}{bar}<span class="muted">{", ".join(limits)}</span>'


def _share(used: float | None, whole: float | None, unit: int, name: str) -> str:
    """Show a reading and its limit as a bar. Both may be unknown."""
    if used is None:
        return NONE
    html = f"{used / unit:.0f}"
    if whole is None:
        return f"{html} {name}"
    bar = f'<meter min="0" max="{max(whole, 1):.0f}" value="{min(used, whole):.0f}" aria-hidden="true"></meter>'
    return f'{html} {name}{bar}<span class="muted">of {whole / unit:.0f}</span>'


def _strip(gpu: Data) -> str:
    """Draw a cell for each device: cells of held devices are filled, cells of unusable devices are crossed."""
    counts = _kinds(gpu["devices"])
    html = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    if not html:
        return '<span class="none">none</span>'
    total = sum(counts.values())
    if total > MAX_CELLS:
        return f"{total}: {html}"
    drawn, at = "", 0
    for name, count in counts.items():
        if count:
            places = [(CELL * (place % ACROSS), CELL * (place // ACROSS)) for place in range(at, at + count)]
            boxes = "".join(f"M{x + 1} {y + 1}h8v8h-8z" for x, y in places)
            drawn += f'<path class="{name.replace(" ", "-")}" d="{boxes}"/>'
            if "unusable" in name:
                crosses = "".join(f"M{x + 1} {y + 1}l8 8M{x + 9} {y + 1}l-8 8" for x, y in places)
                drawn += f'<path class="cross" d="{crosses}"/>'
            at += count
    width, height = CELL * min(total, ACROSS), CELL * -(-total // ACROSS)
    return (
        f'<svg class="cells" width="{width}" height="{height}" viewBox="0 0 {width} {height}" aria-hidden="true">{drawn}</svg>'
        f'<span class="count">{html}</span>'
    )


def _kinds(devices: Iterable[Data]) -> dict[str, int]:
    counts = {"held": 0, "held but unusable": 0, "free": 0, "usable": 0, "unusable": 0}
    for device in devices:
        listed, healthy = device["listed"], device["healthy"]
        if device["held"] is None:
            counts["usable"] += healthy
            counts["unusable"] += listed - healthy
            continue
        held_well = min(device["held"], healthy)
        held_badly = min(device["held"] - held_well, listed - healthy)
        counts["held"] += held_well
        counts["held but unusable"] += held_badly
        counts["free"] += healthy - held_well
        counts["unusable"] += listed - healthy - held_badly
    return counts


def _held_by(gpu: Data) -> str:
    if gpu["held"] is None:
        return NONE
    holders = [holder for device in gpu["devices"] for holder in device["holders"]]
    names = list(dict.fromkeys(f"{holder['namespace']}/{holder['pod']}" for holder in holders))
    if not names:
        return '<span class="none">nobody</span>'
    shown = "".join(f"<li>{xml(name)}</li>" for name in names[:MAX_NAMED_PODS])
    if (more := len(names) - MAX_NAMED_PODS) > 0:
        address = xml(quote(gpu["uuid"], errors="replace"))
        shown += f'<li><a href="#devices-{address}">and {more} more</a></li>'
    return f'<ul class="plain">{shown}</ul>'


def pods(data: Data) -> str:
    """Return the collapsed list of pods that hold devices."""
    held = data["pods"]
    if not held["known"]:
        return (
            f'<p class="none">Which pods hold devices is not known: {xml(held["why"] or "there is no answer yet")}.</p>'
        )
    if not held["containers"]:
        return '<p class="none">No pod holds a device.</p>'
    rows = [
        (
            ("Pod", f"{xml(each['namespace'])}/<b>{xml(each['pod'])}</b>", "head"),
            ("Container", xml(each["container"]), ""),
            ("GPUs", ", ".join(map(_gpu_of, each["gpus"])), ""),
            ("Devices", ", ".join(f"{count} x {xml(name)}" for name, count in each["resources"].items()), ""),
            ("Their health", badge(each["state"], WORDS[each["state"]]), ""),
        )
        for each in held["containers"]
    ]
    count = len({(each["namespace"], each["pod"]) for each in held["containers"]})
    summary = f"{counted(count, 'pod')} hold{'s' if count == 1 else ''} devices"
    more = f'<p class="none">{held["left_out"]} more are left out.</p>' if held["left_out"] else ""
    listed = table("Pods that hold devices", rows, states=(each["state"] for each in held["containers"])) + more
    return f'<details id="pods-all"><summary>{summary}</summary>{listed}</details>'


def _gpu_of(gpu: Data) -> str:
    sign = "" if gpu["state"] == "healthy" else f'<span class="{gpu["state"]}">{SIGNS[gpu["state"]]}</span> '
    return f"{sign}{gpu['index']}"


def devices(data: Data) -> str:
    """Return the collapsed lists of the devices of each GPU."""
    if not data["gpus"]:
        return '<p class="none">No GPU is known yet.</p>'
    return "".join(map(_devices_of, data["gpus"]))


def _devices_of(gpu: Data) -> str:
    held = "" if gpu["held"] is None else f", {gpu['held']} held"
    summary = f"GPU {gpu['index']}: {counted(gpu['listed'], 'device')}{held}"
    rows = [*map(_device, gpu["devices"])]
    listed = table(f"Devices of GPU {gpu['index']}", rows) if rows else '<p class="none">None is served.</p>'
    uuid = f'<p class="muted"><code>{xml(gpu["uuid"])}</code></p>'
    return f'<details id="devices-{xml(gpu["uuid"])}"><summary>{summary}</summary>{uuid}{listed}</details>'


def _device(device: Data) -> Sequence[Cell]:
    kind = "GPU" if device["kind"] == "gpu" else "MIG device"
    shared = f' <span class="muted">shared by {xml(device["shared"])}</span>' if device["shared"] else ""
    present = device["listed"] - device["retired"]
    if device["healthy"]:
        state = badge("healthy", "Healthy")
    else:
        state = f"{badge('unhealthy', 'gone' if not present else 'Unhealthy')} {xml(device['reason'])}"
    gone = f" and {device['retired']} gone" if device["retired"] and present else ""
    return (
        ("Device", f'{kind} {xml(device["index"])}<br><code class="muted">{xml(device["id"])}</code>', "head"),
        ("Resource", xml(device["resource"]) + shared, ""),
        ("Listed", f"{device['listed']}{gone}", "number"),
        ("State", state, ""),
        ("Held by", _holders(device), "holders"),
    )


def _holders(device: Data) -> str:
    if device["held"] is None:
        return NONE
    if not device["holders"]:
        return '<span class="none">nobody</span>'
    shown = "".join(
        f'<li>{xml(each["namespace"])}/{xml(each["pod"])} <span class="muted">({xml(each["container"])})</span>'
        f"{_times(each['devices'])}</li>"
        for each in device["holders"]
    )
    more = f"<li>and {device['left_out']} more</li>" if device["left_out"] else ""
    return f'<ul class="plain">{shown}{more}</ul>'


def _times(count: int) -> str:
    return f" x {count}" if count > 1 else ""


# Pieces


def moment(at: float | None) -> str:
    """Show a time. A script adds its age."""
    if at is None:
        return ""
    try:
        html = f'<time datetime="{rfc3339(at)}">{utc(at)}</time>'
    except (OverflowError, ValueError, OSError):
        return utc(at)
    return f'{html}<span class="age" data-since="{at:.0f}"></span>'


def since(at: float | None) -> str:
    """Show the time since which something is the case; empty if it is not known."""
    return "" if at is None else f' <span class="since">since {moment(at)}</span>'


def badge(state: str, text: str) -> str:
    """Show a state as a word with its sign."""
    return f'<span class="badge {xml(state)}"><span aria-hidden="true">{SIGNS[state]}</span> {xml(text)}</span>'


def bus_and_model(gpu: Data) -> str:
    """Identify a GPU in addition to its index."""
    bus = f'<code class="muted">{xml(gpu["bus_id"])}</code> ' if gpu["bus_id"] else ""
    return f'{bus}<span class="who">{xml(gpu["model"] or "unknown model")}</span>'


# Tables. Roles are given explicitly, since browsers drop them if a style sheet displays rows as blocks.


def table(caption: str, rows: Sequence[Sequence[Cell]], kind: str = "", states: Iterable[str] = repeat("")) -> str:
    """Return a table of these rows, of which there must be at least one. `states` are the styles of whole rows."""
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
    """Return a row. Each cell has its heading too, which is shown if the table is too wide."""
    shown = "".join(
        f'<th scope="row" role="rowheader" class="{style}">{content}</th>'
        if style.startswith("head")
        else f'<td role="cell" class="{style}" data-head="{xml(head)}"><div>{content}</div></td>'
        for head, content, style in cells
    )
    return f'<tr role="row" class="{xml(state)}">{shown}</tr>'
