"""The status page as HTML, made of `page_data`, in parts that can be replaced one by one. Pure.

Every text of others goes through `xml`, which leaves it a text whatever it holds. There is no style and no script in the page
itself, so its Content-Security-Policy forbids both, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from gpu_plugin.listener.page_data import ATTENTION, OK, UNHEALTHY
from gpu_plugin.placement.svg import xml

Data = Mapping[str, Any]

NAMED = 3
"""Containers that are named in the row of a GPU; all of them are in the list of its devices."""

CELLS = 64
"""Devices of a GPU that are drawn one by one; of more there are numbers alone."""

CELL, ACROSS = 11, 14
"""Width of a device's cell with the gap after it, and cells in a row."""

SIGNS: Mapping[str, str] = {
    OK: "✓",
    "healthy": "✓",
    ATTENTION: "▲",
    "degraded": "▲",
    UNHEALTHY: "✕",
}
"""What stands before each state, for those who tell colours badly."""

WORDS: Mapping[str, str] = {"healthy": "Healthy", "degraded": "Healthy, degraded", "unhealthy": "Unhealthy"}

_NONE = '<span class="none" aria-hidden="true">-</span><span class="unseen">not known</span>'


def parts(data: Data) -> dict[str, str]:
    """The content of each part of the page, by the id of its element."""
    return {
        "summary": _summary(data),
        "complaints": _complaints(data),
        "node": _node(data),
        "gpus": _gpus(data),
        "pods": _pods(data),
        "devices": _devices(data),
        "links": _links(data),
        "events": _events(data),
    }


SECTIONS: Sequence[tuple[str, str]] = (
    ("complaints", "Needs attention"),
    ("node", "Node"),
    ("gpus", "GPUs"),
    ("pods", "Pods"),
    ("devices", "Devices"),
    ("links", "Links"),
    ("events", "Events"),
)
"""The parts that are sections, with their headings."""


def page(data: Data, filled: Mapping[str, str], at: float, assets: str) -> str:
    """The whole page: `filled` are its parts, `at` is the Unix time that they are of, `assets` the version of its files."""
    menu = "".join(f'<li><a href="#{name}-section">{heading}</a></li>' for name, heading in SECTIONS)
    sections = "".join(
        f'<section id="{name}-section" aria-labelledby="{name}-heading"><h2 id="{name}-heading">{heading}</h2>'
        f'<div id="{name}">{filled[name]}</div></section>\n'
        for name, heading in SECTIONS
    )
    title = f"{data['headline']} - {data['node'] or 'gpu-plugin'}"
    return f"""<!DOCTYPE html>
<html lang="en" data-assets="{xml(assets)}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{xml(title)}</title>
<link rel="icon" href="icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="page.css">
<script src="page.js" defer></script>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header>
<div id="summary">{filled["summary"]}</div>
<p id="connection" class="still"><span id="connection-state">This page does not update itself.</span>
<span class="as-of">As of <time id="as-of" datetime="{_iso(at)}">{_utc(at)}</time></span></p>
<noscript><p class="note">Without JavaScript, reload the page to see what has changed.</p></noscript>
</header>
<nav aria-label="Sections"><ul>{menu}</ul></nav>
<main id="main" tabindex="-1">
{sections}</main>
<p id="announcement" class="unseen" role="status" aria-live="polite"></p>
<footer><p>The same for programs: <a href="status.json">status.json</a>, <a href="metrics">metrics</a>.
Probes: <a href="livez">livez</a>, <a href="readyz">readyz</a>.</p></footer>
</body>
</html>
"""


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _time(at: float | None) -> str:
    """A moment; a script adds how long ago that was."""
    if at is None:
        return ""
    return f'<time datetime="{_iso(at)}">{_utc(at)}</time><span class="age" data-since="{at:.0f}"></span>'


def _since(at: float | None) -> str:
    return "" if at is None else f' <span class="since">since {_time(at)}</span>'


def _badge(state: str, text: str) -> str:
    return f'<span class="badge {xml(state)}"><span aria-hidden="true">{SIGNS[state]}</span> {xml(text)}</span>'


def _summary(data: Data) -> str:
    name = f" <span>{xml(data['node'])}</span>" if data["node"] else ""
    return (
        f'<h1>GPUs of node{name}</h1><p id="headline" class="headline {data["verdict"]}" data-title="{xml(data["node"])}">'
        f'<span aria-hidden="true">{SIGNS[data["verdict"]]}</span> <span id="headline-text">{xml(data["headline"])}</span></p>'
    )


# What needs attention


def _complaints(data: Data) -> str:
    if not data["complaints"]:
        return '<p class="fine">Nothing is wrong.</p>'
    gpus = {gpu["uuid"]: gpu for gpu in data["gpus"]}
    shown = "".join(
        _trouble(complaint) if complaint["gpu"] is None else _sick(complaint, gpus[complaint["gpu"]])
        for complaint in data["complaints"]
    )
    return f'<ul class="cards">{shown}</ul>'


def _trouble(complaint: Data) -> str:
    severity = complaint["severity"]
    return f'<li class="card {severity}"><p>{_badge(severity, "Node")} {xml(complaint["text"])}</p></li>'


def _sick(complaint: Data, gpu: Data) -> str:
    state = complaint["severity"]
    what = f"<p>{_bus_and_model(gpu)}</p>"
    reasons = "".join(_reason(signal) for signal in gpu["signals"])
    reasons += "".join(f"<li><p><strong>not handed out: {xml(why)}</strong></p></li>" for why in gpu["withheld"])
    return (
        f'<li class="card {state}"><h3>{_badge(state, complaint["text"])}'
        f'</h3>{what}<ul class="reasons">{reasons}</ul><p class="hits">{_hit(gpu)}</p></li>'
    )


def _reason(signal: Data) -> str:
    where = f" (MIG device {xml(signal['device'])})" if signal["device"] else ""
    told = f"<p><strong>{xml(signal['detail'])}{where}</strong>{_since(signal['since'])}</p><dl>"
    if signal["action"]:
        told += f"<dt>What to do</dt><dd>{xml(signal['action'])}</dd>"
    if signal["clears"]:
        told += f"<dt>What ends it</dt><dd>{xml(signal['clears'])}</dd>"
    return f"<li>{told}</dl></li>"


def _hit(gpu: Data) -> str:
    """Whom a fault hits: the containers that hold a device of the GPU."""
    if gpu["held"] is None:
        return "Whom it hits is not known."
    holders = [holder for device in gpu["devices"] for holder in device["holders"]]
    if not holders:
        return "No pod holds it."
    names = list(dict.fromkeys(f"{holder['namespace']}/{holder['pod']} ({holder['container']})" for holder in holders))
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"<b>Hits</b> {', '.join(map(xml, names[:20]))}{more}"


def _anchor(gpu: Data) -> str:
    return xml(quote(gpu["uuid"], errors="replace"))


def _bus_and_model(gpu: Data) -> str:
    bus = f'<code class="muted">{xml(gpu["bus_id"])}</code> ' if gpu["bus_id"] else ""
    return f'{bus}<span class="who">{xml(gpu["model"] or "unknown model")}</span>'


# The node


def _node(data: Data) -> str:
    if data["daemon"] is None:
        return '<p class="none">The daemon has not begun to serve this node.</p>'
    daemon, driver, configuration = data["daemon"], data["driver"], data["configuration"]
    facts = [
        ("gpu-plugin", f"{xml(daemon['version'])}{_since(daemon['started'])}"),
        ("Driver", _with_trouble(xml(driver["version"] or "not known yet"), driver["trouble"])),
        (
            "Configuration",
            _with_trouble(
                f"{xml(configuration['file'] or 'flags and environment')}{_since(configuration['since'])}",
                *(f"{how}: {configuration[key]}" for key, how in _CONFIGURATION if configuration[key]),
            ),
        ),
        ("Device list strategy", xml(", ".join(data["strategy"]["used"]) + _in_brackets(data["strategy"]["reason"]))),
    ]
    shown = "".join(f"<div><dt>{term}</dt><dd>{told}</dd></div>" for term, told in facts)
    return f'<dl class="facts">{shown}</dl>{_resources(data)}'


_CONFIGURATION = (("wanted", "asked for"), ("refused", "refused"), ("unheard", "not watched"))


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _with_trouble(told: str, *troubles: str) -> str:
    return told + "".join(f'<br><strong class="bad">{xml(trouble)}</strong>' for trouble in troubles if trouble)


def _resources(data: Data) -> str:
    if not data["resources"]:
        return '<p class="none">No resource is served.</p>'
    registered = {each["resource"]: each for each in data["registrations"]}
    rows = "".join(_resource(each, registered.get(each["name"])) for each in data["resources"])
    heads = (("Resource", ""), ("Devices", "number"), ("Healthy", "number"), ("Held", "number"), ("Kubelet", ""))
    return _table("Resources served to the kubelet", heads, rows)


def _resource(resource: Data, registration: Data | None) -> str:
    healthy, devices = resource["healthy"], resource["devices"] - resource["retired"]
    shared = (
        f' <span class="muted">shared by {xml(" and ".join(resource["sharing"]))}</span>' if resource["sharing"] else ""
    )
    gone = f' <span class="muted">and {resource["retired"]} gone</span>' if resource["retired"] else ""
    if registration is None:
        told = '<span class="muted">not registered, as asked for</span>'
    elif registration["registered"]:
        told = f"{_badge(OK, 'registered')}{_since(registration['since'])}"
    else:
        told = f"{_badge(UNHEALTHY, 'not registered')} {xml(registration['why'])}{_since(registration['since'])}"
    few = "" if healthy == devices else ' class="bad"'
    held = _NONE if resource["held"] is None else resource["held"]
    return _row(
        ("Resource", xml(resource["name"]) + shared, "head"),
        ("Devices", f"{devices}{gone}", "number"),
        ("Healthy", f"<span{few}>{healthy}</span>", "number"),
        ("Held", f"{held}", "number"),
        ("Kubelet", told, ""),
    )


# GPUs


def _gpus(data: Data) -> str:
    if not data["gpus"]:
        return '<p class="none">No GPU is known yet.</p>'
    heads = (
        ("GPU", ""),
        ("Health", ""),
        ("Temperature", "number"),
        ("Power", "number"),
        ("Use", "number"),
        ("Memory", "number"),
        ("Devices", ""),
        ("Held by", ""),
    )
    return _table("GPUs of this node", heads, "".join(map(_gpu, data["gpus"])), "gpus")


def _gpu(gpu: Data) -> str:
    readings = gpu["readings"]
    return _row(
        ("GPU", f"<b>{gpu['index']}</b> {_bus_and_model(gpu)}", "head"),
        ("Health", _health(gpu), "health"),
        ("Temperature", _temperature(readings), "number"),
        ("Power", _share(readings["power_watts"], readings["power_limit_watts"], 1, "W"), "number"),
        ("Use", _NONE if readings["utilization_ratio"] is None else f"{readings['utilization_ratio']:.0%}", "number"),
        ("Memory", _share(readings["memory_used_bytes"], readings["memory_total_bytes"], 2**30, "GiB"), "number"),
        ("Devices", _strip(gpu), "strip"),
        ("Held by", _held_by(gpu), "holders"),
        state=gpu["state"],
    )


def _health(gpu: Data) -> str:
    told = _badge(gpu["state"], WORDS[gpu["state"]])
    reasons = [(signal["detail"], signal["since"]) for signal in gpu["signals"]]
    reasons += [(f"not handed out: {why}", None) for why in gpu["withheld"]]
    return told + "".join(f'<br><span class="why">{xml(why)}</span>{_since(since)}' for why, since in reasons)


def _temperature(readings: Data) -> str:
    now, slow, off = (readings[f"{name}_celsius"] for name in ("temperature", "slowdown", "shutdown"))
    if now is None:
        return _NONE
    told = f"{now:.0f} °C"
    if slow is not None and now >= slow:
        told = f'<strong class="bad">{told}, at slowdown</strong>'
    limits = [f"{how} {at:.0f}" for how, at in (("slows at", slow), ("off at", off)) if at is not None]
    if not limits:
        return told
    top = max(at for at in (slow, off) if at is not None)
    high = slow if slow is not None else top
    bar = (
        f'<meter min="0" max="{top:.0f}" low="{high - 10:.0f}" high="{high:.0f}" optimum="0" value="{min(now, top):.0f}"'
        ' aria-hidden="true"></meter>'
    )
    return f'{told}{bar}<span class="muted">{", ".join(limits)}</span>'


def _share(used: float | None, whole: float | None, unit: int, name: str) -> str:
    """How much of how much; either may not be known."""
    if used is None:
        return _NONE
    told = f"{used / unit:.0f}"
    if whole is None:
        return f"{told} {name}"
    bar = f'<meter min="0" max="{max(whole, 1):.0f}" value="{min(used, whole):.0f}" aria-hidden="true"></meter>'
    return f'{told} {name}{bar}<span class="muted">of {whole / unit:.0f}</span>'


def _strip(gpu: Data) -> str:
    """A cell for each device: held ones are filled, those that cannot be handed out are crossed."""
    counts = _kinds(gpu["devices"])
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    if not told:
        return '<span class="none">none</span>'
    total = sum(counts.values())
    if total > CELLS:
        return f"{total}: {told}"
    drawn, at = "", 0
    for name, count in counts.items():
        if count:
            places = [(CELL * (place % ACROSS), CELL * (place // ACROSS)) for place in range(at, at + count)]
            boxes = "".join(f"M{x + 1} {y + 1}h8v8h-8z" for x, y in places)
            drawn += f'<path class="{name.replace(" ", "-").replace(",", "")}" d="{boxes}"/>'
            if "unusable" in name:
                crosses = "".join(f"M{x + 1} {y + 1}l8 8M{x + 9} {y + 1}l-8 8" for x, y in places)
                drawn += f'<path class="cross" d="{crosses}"/>'
            at += count
    width, height = CELL * min(total, ACROSS), CELL * -(-total // ACROSS)
    return (
        f'<svg class="cells" width="{width}" height="{height}" viewBox="0 0 {width} {height}" aria-hidden="true">{drawn}</svg>'
        f'<span class="count">{told}</span>'
    )


def _kinds(devices: Iterable[Data]) -> dict[str, int]:
    counts = {"held": 0, "held, unusable": 0, "free": 0, "usable": 0, "unusable": 0}
    for device in devices:
        listed, healthy = device["listed"], device["healthy"]
        if device["held"] is None:
            counts["usable"] += healthy
            counts["unusable"] += listed - healthy
            continue
        held_well = min(device["held"], healthy)
        held_badly = min(device["held"] - held_well, listed - healthy)
        counts["held"] += held_well
        counts["held, unusable"] += held_badly
        counts["free"] += healthy - held_well
        counts["unusable"] += listed - healthy - held_badly
    return counts


def _held_by(gpu: Data) -> str:
    if gpu["held"] is None:
        return _NONE
    holders = [holder for device in gpu["devices"] for holder in device["holders"]]
    names = list(dict.fromkeys(f"{holder['namespace']}/{holder['pod']}" for holder in holders))
    if not names:
        return '<span class="none">nobody</span>'
    more = f'<li><a href="#devices-{_anchor(gpu)}">and {len(names) - NAMED} more</a></li>' if len(names) > NAMED else ""
    return f'<ul class="plain">{"".join(f"<li>{xml(name)}</li>" for name in names[:NAMED])}{more}</ul>'


# Pods and devices


def _pods(data: Data) -> str:
    pods = data["pods"]
    if not pods["known"]:
        return (
            f'<p class="none">Which pods hold devices is not known: {xml(pods["why"] or "nobody has said so yet")}.</p>'
        )
    if not pods["containers"]:
        return '<p class="none">No pod holds a device.</p>'
    rows = "".join(
        _row(
            ("Pod", f"{xml(each['namespace'])}/<b>{xml(each['pod'])}</b>", "head"),
            ("Container", xml(each["container"]), ""),
            ("GPU", f"{each['gpu']}", "number"),
            ("Devices", ", ".join(f"{count} x {xml(name)}" for name, count in each["resources"].items()), ""),
            ("GPU's health", _badge(each["state"], WORDS[each["state"]]), ""),
            state=each["state"],
        )
        for each in pods["containers"]
    )
    heads = (("Pod", ""), ("Container", ""), ("GPU", "number"), ("Devices", ""), ("GPU's health", ""))
    count = len({(each["namespace"], each["pod"]) for each in pods["containers"]})
    summary = f"{count} pod{'' if count == 1 else 's'} hold{'s' if count == 1 else ''} devices"
    more = f'<p class="none">{pods["left_out"]} more are left out.</p>' if pods["left_out"] else ""
    listed = _table("Pods that hold devices", heads, rows) + more
    return f'<details id="pods-all"><summary>{summary}</summary>{listed}</details>'


def _devices(data: Data) -> str:
    if not data["gpus"]:
        return '<p class="none">No GPU is known yet.</p>'
    return "".join(map(_devices_of, data["gpus"]))


def _devices_of(gpu: Data) -> str:
    count = gpu["listed"]
    held = "" if gpu["held"] is None else f", {gpu['held']} held"
    summary = f"GPU {gpu['index']}: {count} device{'' if count == 1 else 's'}{held}"
    rows = "".join(map(_device, gpu["devices"]))
    heads = (("Device", ""), ("Resource", ""), ("Listed", "number"), ("State", ""), ("Held by", ""))
    table = _table(f"Devices of GPU {gpu['index']}", heads, rows) if rows else '<p class="none">None is served.</p>'
    uuid = f'<p class="muted"><code>{xml(gpu["uuid"])}</code></p>'
    return f'<details id="devices-{xml(gpu["uuid"])}"><summary>{summary}</summary>{uuid}{table}</details>'


def _device(device: Data) -> str:
    kind = "GPU" if device["kind"] == "gpu" else "MIG device"
    shared = f' <span class="muted">shared by {xml(device["shared"])}</span>' if device["shared"] else ""
    present = device["listed"] - device["retired"]
    if device["healthy"]:
        state = _badge("healthy", "Healthy")
    else:
        state = f"{_badge('unhealthy', 'gone' if not present else 'Unhealthy')} {xml(device['reason'])}"
    gone = f" and {device['retired']} gone" if device["retired"] and present else ""
    return _row(
        ("Device", f'{kind} {xml(device["index"])}<br><code class="muted">{xml(device["id"])}</code>', "head"),
        ("Resource", xml(device["resource"]) + shared, ""),
        ("Listed", f"{device['listed']}{gone}", "number"),
        ("State", state, ""),
        ("Held by", _holders(device), "holders"),
    )


def _holders(device: Data) -> str:
    if device["held"] is None:
        return _NONE
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


# Links


def _links(data: Data) -> str:
    links = data["links"]
    if links is None:
        return '<p class="none">Links are shown where two GPUs or more are known.</p>'
    words = "".join(f"<li>{xml(told)}</li>" for told in links["words"])
    heads = [("", ""), *((f"GPU {index}", "") for index in links["gpus"])]
    rows = "".join(
        _row(
            (f"GPU {index}", f"GPU {index}", "head"),
            *((f"GPU {other}", xml(word), "") for other, word in zip(links["gpus"], row, strict=True)),
        )
        for index, row in zip(links["gpus"], links["rows"], strict=True)
    )
    legend = "".join(
        f"<div><dt>{xml(term)}</dt><dd>{xml(meaning)}</dd></div>" for term, meaning in links["legend"].items()
    )
    return (
        '<div class="wide" role="group" aria-label="Picture of the links" tabindex="0">'
        f'<img src="links.svg?{xml(links["version"])}" alt="How the GPUs are linked; the list below says the same."></div>'
        f'<ul class="words">{words}</ul><details id="links-table"><summary>As a table</summary>'
        f'<div class="wide matrix" role="group" aria-label="Table of the links" tabindex="0">'
        f'{_table("What lies between every two GPUs", heads, rows)}</div><dl class="legend">{legend}</dl></details>'
    )


# Events


def _events(data: Data) -> str:
    if not data["events"]:
        return '<p class="none">Nothing has happened yet.</p>'
    rows = "".join(map(_event, data["events"]))
    return _table(
        "The newest events, the newest first", (("Time", ""), ("Kind", ""), ("What happened", "")), rows, "events"
    )


def _event(event: Data) -> str:
    by = f' <span class="muted">by {xml(event["by"])}</span>' if event["by"] else ""
    why = f' <span class="muted">reason: {xml(event["reason"])}</span>' if event["reason"] else ""
    kind = _VERDICTS.get(event["verdict"], "")
    sign = f'<span class="{kind}" aria-hidden="true">{SIGNS[kind]}</span> ' if kind else ""
    return _row(
        ("Time", _time(event["at"]), "head when"),
        ("Kind", xml(event["kind"]), "kind"),
        ("What happened", f"{sign}{xml(event['text'])}{by}{why}", ""),
    )


_VERDICTS: Mapping[str, str] = {"FATAL": UNHEALTHY, "DEGRADED": ATTENTION, "OK": OK}


# Tables. Their roles are spelled out, since a browser forgets them where a style sheet lays rows out as blocks.


def _table(caption: str, heads: Iterable[tuple[str, str]], rows: str, kind: str = "") -> str:
    cells = "".join(
        f'<th scope="col" role="columnheader" class="{style}">{xml(head)}</th>' if head else '<td role="cell"></td>'
        for head, style in heads
    )
    return (
        f'<table role="table" class="{kind}"><caption class="unseen">{xml(caption)}</caption>'
        f'<thead role="rowgroup"><tr role="row">{cells}</tr></thead><tbody role="rowgroup">{rows}</tbody></table>'
    )


def _row(*cells: tuple[str, str, str], state: str = "") -> str:
    """A row: the heading, content and style of each cell. The heading stands in the cell where the table is too wide."""
    shown = "".join(
        f'<th scope="row" role="rowheader" class="{style}">{content}</th>'
        if style.startswith("head")
        else f'<td role="cell" class="{style}" data-head="{xml(head)}"><div>{content}</div></td>'
        for head, content, style in cells
    )
    return f'<tr role="row" class="{xml(state)}">{shown}</tr>'
