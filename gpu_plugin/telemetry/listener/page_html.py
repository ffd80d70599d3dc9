"""The status page as HTML, made from `page_data`, in parts that can be replaced separately. Pure.

All texts from outside are escaped by `xml`. The page itself has no style and no script, so its Content-Security-Policy forbids
both.
"""

from collections.abc import Callable, Mapping, Sequence

from gpu_plugin.config.times import rfc3339, utc
from gpu_plugin.placement.views.svg import xml
from gpu_plugin.telemetry.listener.page_data import ATTENTION, OK, UNHEALTHY
from gpu_plugin.telemetry.listener.page_gpus import (
    NONE,
    SIGNS,
    Cell,
    Data,
    badge,
    bus_and_model,
    devices,
    gpus,
    moment,
    pods,
    since,
    table,
)


def page(data: Data, filled: Mapping[str, str], at: float, assets: str) -> str:
    """Return the whole page. `filled` are its parts, `at` is their Unix time, and `assets` is the version of its files."""
    menu = "".join(f'<li><a href="#{name}-section">{heading}</a></li>' for name, (heading, _) in SECTIONS.items())
    sections = "".join(
        f'<section id="{name}-section" aria-labelledby="{name}-heading"><h2 id="{name}-heading">{heading}</h2>'
        f'<div id="{name}">{filled[name]}</div></section>\n'
        for name, (heading, _) in SECTIONS.items()
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
<span class="as-of">As of <time id="as-of" datetime="{rfc3339(at)}">{utc(at)}</time></span></p>
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


def _summary(data: Data) -> str:
    name = f"node <span>{xml(data['node'])}</span>" if data["node"] else "this node"
    return (
        f'<h1>GPUs of {name}</h1><p id="headline" class="headline {data["verdict"]}" data-title="{xml(data["node"])}">'
        f'<span aria-hidden="true">{SIGNS[data["verdict"]]}</span> <span id="headline-text">{xml(data["headline"])}</span></p>'
    )


# What needs attention


def _complaints(data: Data) -> str:
    if not data["complaints"]:
        return '<p class="fine">No problems found.</p>'
    known = {gpu["uuid"]: gpu for gpu in data["gpus"]}
    shown = "".join(_card(complaint, known.get(complaint["gpu"])) for complaint in data["complaints"])
    return f'<ul class="cards">{shown}</ul>'


def _card(complaint: Data, gpu: Data | None) -> str:
    """Show the problem of a GPU, or a problem of the node other than its GPUs."""
    state = complaint["severity"]
    if gpu is None:
        return f'<li class="card {state}"><p>{badge(state, "Node")} {xml(complaint["text"])}</p></li>'
    what = f"<p>{bus_and_model(gpu)}</p>"
    reasons = "".join(_reason(signal) for signal in gpu["signals"])
    reasons += "".join(f"<li><p><strong>withheld: {xml(why)}</strong></p></li>" for why in gpu["withheld"])
    return (
        f'<li class="card {state}"><h3>{badge(state, complaint["text"])}'
        f'</h3>{what}<ul class="reasons">{reasons}</ul><p class="hits">{_affected_pods(gpu)}</p></li>'
    )


def _reason(signal: Data) -> str:
    where = f" (MIG device {xml(signal['device'])})" if signal["device"] else ""
    html = f"<p><strong>{xml(signal['detail'])}{where}</strong>{since(signal['since'])}</p><dl>"
    if signal["action"]:
        html += f"<dt>What to do</dt><dd>{xml(signal['action'])}</dd>"
    if signal["clears"]:
        html += f"<dt>Recovers after</dt><dd>{xml(signal['clears'])}</dd>"
    return f"<li>{html}</dl></li>"


def _affected_pods(gpu: Data) -> str:
    """Name the containers that hold a device of the GPU."""
    if gpu["held"] is None:
        return "The affected pods are not known."
    holders = [holder for device in gpu["devices"] for holder in device["holders"]]
    if not holders:
        return "No pod holds it."
    names = list(dict.fromkeys(f"{holder['namespace']}/{holder['pod']} ({holder['container']})" for holder in holders))
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"<b>Affected pods</b> {', '.join(map(xml, names[:20]))}{more}"


# The node


def _node(data: Data) -> str:
    if data["daemon"] is None:
        return '<p class="none">The daemon has not begun to serve this node.</p>'
    daemon, driver, configuration, strategy = (data[key] for key in ("daemon", "driver", "configuration", "strategy"))
    reason = f" ({strategy['reason']})" if strategy["reason"] else ""
    facts = [
        ("gpu-plugin", f"{xml(daemon['version'])}{since(daemon['started'])}"),
        ("Driver", _with_trouble(xml(driver["no_gpu"] or driver["version"] or "not known yet"), driver["trouble"])),
        (
            "Configuration",
            _with_trouble(
                f"{xml(configuration['file'] or 'flags and environment')}{since(configuration['since'])}",
                *(f"{how}: {configuration[key]}" for key, how in _CONFIGURATION if configuration[key]),
            ),
        ),
        ("Device list strategy", xml(", ".join(strategy["used"]) + reason)),
    ]
    shown = "".join(f"<div><dt>{term}</dt><dd>{html}</dd></div>" for term, html in facts)
    return f'<dl class="facts">{shown}</dl>{_resources(data)}'


_CONFIGURATION = (("wanted", "asked for"), ("refused", "refused"), ("unheard", "not watched"))


def _with_trouble(html: str, *troubles: str) -> str:
    return html + "".join(f'<br><strong class="bad">{xml(trouble)}</strong>' for trouble in troubles if trouble)


def _resources(data: Data) -> str:
    if not data["resources"]:
        return '<p class="none">No resource is served.</p>'
    registered = {each["resource"]: each for each in data["registrations"]}
    rows = [_resource(each, registered.get(each["name"])) for each in data["resources"]]
    return table("Resources served to the kubelet", rows)


def _resource(resource: Data, registration: Data | None) -> Sequence[Cell]:
    healthy, devices = resource["healthy"], resource["devices"] - resource["retired"]
    shared = (
        f' <span class="muted">shared by {xml(" and ".join(resource["sharing"]))}</span>' if resource["sharing"] else ""
    )
    gone = f' <span class="muted">and {resource["retired"]} gone</span>' if resource["retired"] else ""
    if registration is None:
        html = '<span class="muted">not registered, as asked for</span>'
    elif registration["registered"]:
        html = f"{badge(OK, 'registered')}{since(registration['since'])}"
    else:
        html = f"{badge(UNHEALTHY, 'not registered')} {xml(registration['why'])}{since(registration['since'])}"
    few = "" if healthy == devices else ' class="bad"'
    held = NONE if resource["held"] is None else resource["held"]
    return (
        ("Resource", xml(resource["name"]) + shared, "head"),
        ("Devices", f"{devices}{gone}", "number"),
        ("Healthy", f"<span{few}>{healthy}</span>", "number"),
        ("Held", f"{held}", "number"),
        ("Kubelet", html, ""),
    )


# Links


def _links(data: Data) -> str:
    links = data["links"]
    if links is None:
        return '<p class="none">Links are shown where two GPUs or more are known.</p>'
    words = "".join(f"<li>{xml(sentence)}</li>" for sentence in links["words"])
    rows = [
        [
            ("", f"GPU {index}", "head"),
            *((f"GPU {other}", xml(word), "") for other, word in zip(links["gpus"], words_of, strict=True)),
        ]
        for index, words_of in zip(links["gpus"], links["rows"], strict=True)
    ]
    legend = "".join(
        f"<div><dt>{xml(term)}</dt><dd>{xml(meaning)}</dd></div>" for term, meaning in links["legend"].items()
    )
    return (
        '<div class="wide" role="group" aria-label="Picture of the links" tabindex="0">'
        f'<img src="links.svg?{xml(links["version"])}" alt="How the GPUs are linked; the list below says the same."></div>'
        f'<p class="muted"><a href="links.svg?{xml(links["version"])}">Open the picture by itself</a></p>'
        f'<ul class="words">{words}</ul><details id="links-table"><summary>As a table</summary>'
        f'<div class="wide matrix" role="group" aria-label="Table of the links" tabindex="0">'
        f'{table("Links between GPUs", rows)}</div><dl class="legend">{legend}</dl></details>'
    )


# Events


def _events(data: Data) -> str:
    if not data["events"]:
        return '<p class="none">Nothing has happened yet.</p>'
    return table("The newest events, the newest first", [*map(_event, data["events"])], "events")


def _event(event: Data) -> Sequence[Cell]:
    by = f' <span class="muted">by {xml(event["by"])}</span>' if event["by"] else ""
    why = f' <span class="muted">reason: {xml(event["reason"])}</span>' if event["reason"] else ""
    kind = _VERDICTS.get(event["verdict"], "")
    sign = f'<span class="{kind}" aria-hidden="true">{SIGNS[kind]}</span> ' if kind else ""
    return (
        ("Time", moment(event["at"]), "head when"),
        ("Kind", xml(event["kind"]), "kind"),
        ("What happened", f"{sign}{xml(event['text'])}{by}{why}", ""),
    )


_VERDICTS: Mapping[str, str] = {"FATAL": UNHEALTHY, "DEGRADED": ATTENTION, "OK": OK}


SECTIONS: Mapping[str, tuple[str, Callable[[Data], str]]] = {
    "complaints": ("Needs attention", _complaints),
    "node": ("Node", _node),
    "gpus": ("GPUs", gpus),
    "pods": ("Pods", pods),
    "devices": ("Devices", devices),
    "links": ("Links", _links),
    "events": ("Events", _events),
}
"""The parts that are sections, with their headings and functions, by the id of their element."""

PARTS: Mapping[str, Callable[[Data], str]] = {"summary": _summary} | {
    name: made for name, (_, made) in SECTIONS.items()
}
"""The function for each part of the page, by the id of its element."""
