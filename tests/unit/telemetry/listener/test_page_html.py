"""The status page as HTML: complete, and safe for hostile texts."""

from html.parser import HTMLParser

import pytest
from gpu_plugin.telemetry.listener.page_data import awaiting, links, page_data
from gpu_plugin.telemetry.listener.page_html import PARTS, SECTIONS, page
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cli.test_status import STATUS, gpu
from tests.unit.telemetry.listener.page_material import (
    GPU,
    HOSTILE,
    READINGS,
    crowded,
    hardware,
    holder,
    material,
    signal,
    topology,
)

VOID = {"meta", "link", "img", "br"}


def parts(data):
    return {name: made(data) for name, made in PARTS.items()}


class Tree(HTMLParser):
    """Checks that elements are nested as they should, and collects names, attributes and texts."""

    def __init__(self, text):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.ids: list[str | None] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def linked(report):
    """The links in a report, as the page gets them."""
    told = links(report)
    assert told is not None
    return {**told, "version": "1"}


def whole(told, linked=None):
    data = page_data(told, linked)
    return Tree(page(data, parts(data), 3661.0, "abc"))


def hostile(text):
    """A node of which every text that others choose is this one."""
    gpus = [
        gpu(0, "unhealthy", "FATAL", text, bus_id=text, model=text, uuid=text, withheld=[text], readings=READINGS),
    ]
    status = {
        **STATUS,
        "driver": {"version": text, "trouble": text},
        "configuration": {**STATUS["configuration"], "file": text, "refused": text, "wanted": text, "unheard": text},
        "device_list_strategy": {"used": [text], "reason": text},
        "kubelet": {**STATUS["kubelet"], "resources": {text: {"registered": False, "since": None, "why": text}}},
        "resources": {text: {"devices": 2, "healthy": 1, "retired": 1, "sharing": [text]}},
        "health": {**STATUS["health"], "gpus": gpus},
    }
    told = topology(
        2,
        [hardware(0, gpu=text, visible_id=text, index=text, reason=text, shared=text, healthy=0, listed=2, retired=1)],
    )
    told["resources"][0]["name"] = text
    return material(
        node=text,
        status=status,
        troubles=(text,),
        explained=[{"uuid": text, "signals": [signal(text, action=text, clears=text, device=text)]}],
        topology=told,
        events=[{"at": 1.0, "kind": text, "text": text, "by": text, "reason": text, "verdict": text}],
        held={(text, text): frozenset({holder(text, text, text)})},
    )


ALLOWED = {
    "html", "head", "meta", "title", "link", "script", "body", "a", "header", "div", "h1", "h2", "h3", "p", "span", "time",
    "noscript", "nav", "ul", "li", "main", "section", "footer", "dl", "dt", "dd", "br", "strong", "b", "code", "table",
    "caption", "thead", "tbody", "tr", "th", "td", "meter", "svg", "path", "details", "summary", "img",
}  # fmt: skip


def harmless(tree):
    assert tree.tags <= ALLOWED
    names = {name for name, _ in tree.attributes}
    assert not {name for name in names if name.startswith("on")}
    assert "style" not in names
    links_ = {value for name, value in tree.attributes if name in ("href", "src")}
    assert all(link.startswith("#") or link.partition("?")[0] in LINKS for link in links_)
    assert len(tree.ids) == len(set(tree.ids))


LINKS = {"icon.svg", "page.css", "page.js", "status.json", "metrics", "livez", "readyz", "links.svg"}


def test_no_text_of_others_is_more_than_a_text():
    told = hostile(HOSTILE)
    tree = whole(told, linked({**told.topology, "gpus": topology(2, [])["gpus"]}))
    harmless(tree)
    assert tree.text.count("<script>alert(1)</script>") > 15
    assert "\x1b" not in tree.text
    assert "\u202e" not in tree.text


@given(st.text(max_size=60))
def test_any_text_is_harmless(text):
    harmless(whole(hostile(text)))


@pytest.mark.parametrize("told", [material(), material(held=None, why_unknown="why"), crowded(), crowded(2, 500, 900)])
def test_the_page_is_whole_and_has_its_landmarks(told):
    tree = whole(told, linked(told.topology))
    harmless(tree)
    assert {"header", "nav", "main", "footer", "h1", "table", "caption"} <= tree.tags
    for name, (heading, _) in SECTIONS.items():
        assert {f"{name}-section", f"{name}-heading", name} <= set(tree.ids)
        assert heading in tree.text
    assert ("aria-live", "polite") in tree.attributes
    assert ("lang", "en") in tree.attributes


def test_what_it_says_of_a_sick_gpu():
    text = whole(material()).text
    for told in (
        "1 of 2 GPUs is Unhealthy",
        "Xid 79 since 1970-01-01 01:00:00 UTC",
        "What to do drain the node and reboot it",
        "Affected pods team-a/train-1 (main)",
        "0000:11:00.0",
        "61 °C slows at 89, off at 95",
        "312 W of 700",
        "87%",
        "40 GiB of 80",
        "1 held but unusable",
    ):
        assert told in text


@pytest.mark.parametrize(
    ("celsius", "told"),
    [(88, "88 °C slows at"), (89, "89 °C, at slowdown"), (94, "94 °C, at slowdown"), (95, "95 °C, beyond shutdown")],
)
def test_a_gpu_at_its_limit_says_so_in_words(celsius, told):
    gpus = [gpu(0, readings={**READINGS, "temperature_celsius": celsius})]
    text = whole(material(status={**STATUS, "health": {**STATUS["health"], "gpus": gpus}})).text
    assert told in text


@pytest.mark.parametrize("at", [1e18, -1e18, float("inf"), float("nan")])
def test_a_moment_that_no_calendar_has_costs_itself_alone(at):
    event = {"at": at, "kind": "daemon", "text": "something strange"}
    text = whole(material(events=[event])).text
    assert "something strange" in text
    assert "s after 1970-01-01 UTC" in text


def test_every_state_has_a_sign_and_a_word():
    gpus = [gpu(0), gpu(1, "degraded", "DEGRADED", "a"), gpu(2, "unhealthy", "FATAL", "b")]
    text = whole(material(status={**STATUS, "health": {**STATUS["health"], "gpus": gpus}})).text
    for told in ("✓ Healthy", "▲ Healthy, degraded", "✕ Unhealthy"):
        assert told in text


def test_each_device_has_its_cell_where_they_are_few_enough():
    few = parts(page_data(crowded(1, 28, 3)))["gpus"]
    assert few.count("h8v8h-8z") == 28
    assert "3 held, 25 free" in few
    many = parts(page_data(crowded(1, 400, 3)))["gpus"]
    assert "<svg" not in many
    assert "400: 3 held, 397 free" in many


def test_more_holders_than_fit_lead_to_all_of_them():
    told = parts(page_data(crowded(1, 28, 20)))
    assert 'href="#devices-GPU-0">and 17 more' in told["gpus"]
    assert 'id="devices-GPU-0"' in told["devices"]
    assert told["devices"].count("research/train-") == 20


def test_before_there_is_a_daemon_it_says_what_is_waited_for():
    data = awaiting("waiting for the node's label")
    text = Tree(page(data, parts(data), 0.0, "abc")).text
    assert "waiting for the node's label" in text
    assert "Nothing is served yet" in text


def test_448_devices_of_100_pods_stay_a_small_page():
    told = crowded()
    data = page_data(told, linked(told.topology))
    assert len(page(data, parts(data), 0.0, "abc").encode()) < 200_000
    assert GPU in parts(data)["devices"]
