"""The picture: well-formed, complete, and nothing on top of anything else."""

from itertools import combinations, pairwise
from operator import itemgetter
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views.groups import LinkGroups, spans
from gpu_plugin.placement.views.picture import AREA, DARK, EDGE, FEW, FRAME_EDGE, GREY, INK, MANY, PALE, PAPER, picture
from tests.unit.placement.nodes import dgx1, mesh, node, random_nodes, two_sockets

SVG = "{http://www.w3.org/2000/svg}"


def number(element, name, default="nan"):
    return float(element.get(name, default))


def rect_of(element):
    """Its left, top, right and bottom."""
    x, y = number(element, "x", "0"), number(element, "y", "0")
    return x, y, x + number(element, "width"), y + number(element, "height")


class Seen:
    """A picture as a viewer has it."""

    root: Any

    def __init__(self, made, name="node"):
        self.text = picture(LinkGroups.of(made), Topology.of(made), name)
        self.root = ET.fromstring(self.text)

    def of_class(self, name):
        return [each for each in self.root.iter() if each.get("class") == name]

    def texts(self):
        return [each.text for each in self.root.iter(f"{SVG}text")]

    def gpus(self):
        return {int(each.get("data-gpu")): each for each in self.of_class("gpu")}

    def titles(self, name):
        return [each.find(f"{SVG}title").text for each in self.of_class(name)]

    def boxes(self):
        """The GPUs' boxes from left to right: index, left and right edge, top."""
        boxes = [
            (number(each, "x"), number(each, "x") + number(each, "width"), number(each, "y"), index)
            for index, each in self.gpus().items()
        ]
        return sorted(boxes)

    def rects(self):
        """All frames and areas: left, top, right, bottom."""
        yield from map(rect_of, self.root.iter(f"{SVG}rect"))


def test_every_gpu_and_every_nvlink_pair_of_the_cube_mesh_is_there():
    seen = Seen(dgx1(), "dgx1")
    assert seen.root.find(f"{SVG}title").text == "dgx1: 8 x GPU of unknown model"
    assert sorted(seen.gpus()) == list(range(8))
    pairs = [each.get("data-pair") for each in seen.of_class("nvlink")]
    assert sorted(pairs) == (
        "0-1 0-2 0-3 0-4 1-2 1-3 1-5 2-3 2-6 3-7 4-5 4-6 4-7 5-6 5-7 6-7".split()  # noqa: SIM905 - as people write it
    )
    assert "GPU 0 and GPU 3: NV2, by PCIe PHB; score 230" in seen.titles("nvlink")
    widths = {each.get("data-pair"): number(each, "stroke-width") for each in seen.of_class("nvlink")}
    assert widths["0-3"] == 2 * widths["0-1"]
    assert seen.texts().count("NV2") == sum(width == 4 for width in widths.values()) == 8
    assert {"NUMA node 0", "NUMA node 1", "host bridge"} <= set(seen.texts())


def test_a_mesh_of_switches_is_a_bar_and_a_line_from_each_gpu():
    links = mesh(range(8), Link(18, 40, switched=True)) | {(0, 1): Link(18, 10, switched=True)}
    seen = Seen(node([0] * 4 + [1] * 4, links))
    assert seen.of_class("nvlink") == []
    lines = seen.of_class("switched")
    assert sorted(int(each.get("data-gpu")) for each in lines) == list(range(8))
    assert seen.titles("switched")[0] == "GPU 0 through switches: score 1850 with GPU 1, 1820 with GPUs 2-7"
    assert seen.titles("mesh") == ["NVSwitch mesh: GPUs 0-7"]
    assert seen.texts().count("NV18") == 8


@pytest.mark.parametrize(
    ("numa", "meshes"),
    [
        ([0] * 6, [(0, 2, 4), (1, 3, 5)]),
        ([0] * 6, [(1, 3, 5), (0, 2, 4)]),
        ([0] * 4 + [1] * 4, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ([0] * 8, [(0, 1, 6, 7), (2, 3, 4, 5)]),
        ([0, 1] * 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ],
)
def test_a_bar_is_open_where_a_line_passes_that_is_not_its_own(numa, meshes):
    links = {pair: link for gpus in meshes for pair, link in mesh(gpus, Link(18, 40, switched=True)).items()}
    seen = Seen(node(numa, links))
    gaps = [rect_of(each) for each in seen.of_class("gap")]
    bars = {each.find(f"{SVG}title").text: rect_of(each) for each in seen.of_class("mesh")}
    assert len(bars) == len(meshes)
    assert all(
        one[3] <= other[1] or one[2] < other[0]
        for one, other in combinations(sorted(bars.values(), key=itemgetter(1)), 2)
    )
    for line in seen.of_class("switched"):
        gpu, half = int(line.get("data-gpu")), number(line, "stroke-width") / 2
        x, start = map(float, line.get("d")[1:].partition("V")[0].split())
        own = bars[f"NVSwitch mesh: GPUs {spans(next(gpus for gpus in meshes if gpu in gpus))}"]
        assert (own[0] < x < own[2], own[3]) == (True, start)
        passed = [bar for bar in bars.values() if bar[0] - half < x < bar[2] + half and bar[1] >= start]
        opened = [gap for gap in gaps if gap[0] < x - half and x + half < gap[2]]
        assert sorted((bar[1], bar[3]) for bar in passed) == sorted((gap[1], gap[3]) for gap in opened)
    names = [each for each in seen.root.iter(f"{SVG}text") if each.get("fill") == "#ffffff"]
    assert len(names) == len(bars)
    for name in names:
        x, y, half = number(name, "x"), number(name, "y"), 4.5 * len(name.text)
        assert all(right < x - half or x + half < left for left, above, right, below in gaps if above < y < below)


def test_gpus_that_share_a_switch_stand_side_by_side():
    made = node([0] * 5, {(0, 3): Link(0, 10), (1, 4): Link(0, 10)})
    assert [index for *_, index in Seen(made).boxes()] == [0, 3, 1, 4, 2]


@pytest.mark.parametrize(
    ("level", "name"), [(0, "one board"), (10, "PCIe switch"), (20, "PCIe switches"), (30, "host bridge")]
)
def test_a_frame_says_what_is_shared(level, name):
    assert Seen(node([0] * 3, {(0, 1): Link(0, level)})).texts().count(name) == 1


@pytest.mark.parametrize(
    ("numa", "names"),
    [
        ([None], ["NUMA ?"]),
        ([None, None], ["NUMA node unknown"]),
        ([3], ["NUMA 3"]),
        ([3, 3, 1, 1], ["NUMA node 3", "NUMA node 1"]),
    ],
)
def test_areas_have_the_number_of_their_numa_node(numa, names):
    assert [text for text in Seen(node(numa, {})).texts() if text.startswith("NUMA")] == names


def test_names_may_hold_anything():
    odd = 'NVIDIA <H100> & "co"\x07\n\ud800'
    made = Node((Gpu('GPU-<"0">', 0, model=odd, pci_bus_id="0008:01:00.0", unreadable="lost & gone"),))
    seen = Seen(made, "a&b<c>")
    assert seen.root.find(f"{SVG}title").text == 'a&b<c>: 1 x NVIDIA <H100> & "co"???'
    assert "8:01:00.0" in seen.texts()
    assert "lost & gone" in seen.titles("gpu")[0]
    assert seen.gpus()[0].get("stroke-dasharray")


def test_the_legend_has_what_occurs():
    texts = Seen(two_sockets(4, _0_1=1, _2_3=2)).texts()
    assert "1 NVLink between two GPUs (NV1)" in texts
    assert "2 NVLinks between two GPUs (NV2)" in texts
    assert not any("switch" in text.lower() for text in texts)


@settings(max_examples=40)
@given(random_nodes())
def test_any_node_is_drawn_whole_inside_its_paper_and_without_overlaps(made):
    seen = Seen(made)
    assert seen.text == Seen(made).text
    groups = LinkGroups.of(made)
    assert sorted(seen.gpus()) == list(range(len(made.gpus)))
    direct = {
        f"{a}-{b}"
        for a, b in combinations(range(len(made.gpus)), 2)
        if groups.links[a][b].nvlinks and not groups.links[a][b].switched
    }
    drawn = [each.get("data-pair") for each in seen.of_class("nvlink")]
    assert (set(drawn), len(drawn)) == (direct, len(direct))
    boxes = seen.boxes()
    assert all(right + 8 <= left for (_, right, *_), (left, *_) in pairwise(boxes))
    assert len({top for *_, top, _ in boxes}) == 1
    width, height = number(seen.root, "width"), number(seen.root, "height")
    frames = [rect for rect in seen.rects() if rect[3] - rect[1] > 40]  # no tags, samples or bars
    assert all(x >= 0 and y >= 0 and right <= width and bottom <= height for x, y, right, bottom in frames)
    for one, other in combinations(frames, 2):
        apart = one[2] < other[0] or other[2] < one[0]
        within = any(
            a[0] <= b[0] and b[2] <= a[2] and a[1] <= b[1] and b[3] <= a[3] for a, b in ((one, other), (other, one))
        )
        assert apart or within


def test_every_colour_has_a_dark_one():
    seen = Seen(dgx1())
    (style,) = seen.root.iter(f"{SVG}style")
    used = {each.get(name) for each in seen.root.iter() for name in ("fill", "stroke")} - {None, "none"}
    assert used
    assert all(f'[fill="{colour}"]' in style.text for colour in used)
    assert "prefers-color-scheme: dark" in style.text


def luminance(colour):
    """Relative luminance (WCAG 2.2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("shade", [lambda colour: colour, DARK.__getitem__], ids=["light", "dark"])
def test_texts_and_lines_can_be_told_from_what_they_lie_on(shade):
    """WCAG 2.2: texts 4.5 to 1 (1.4.3), lines that mean something 3 to 1 (1.4.11)."""
    texts = [(INK, PAPER), (INK, AREA), (INK, GREY), (PALE, PAPER), (PALE, AREA), (PAPER, MANY)]
    lines = [(line, ground) for line in (MANY, FEW, EDGE, FRAME_EDGE) for ground in (PAPER, AREA)]
    found = {(one, other): contrast(shade(one), shade(other)) for one, other in (*texts, *lines)}
    assert {pair for pair in texts if found[pair] < 4.5} | {pair for pair in lines if found[pair] < 3} == set()


def test_no_line_passes_over_what_is_written_on_a_gpu_that_is_held_back():
    gpus = tuple(replace(gpu, pci_bus_id="00000000:0A:00.0") for gpu in dgx1().gpus)
    made = Node(gpus, dgx1().links)
    drawn = picture(LinkGroups.of(made), Topology.of(made), "", {gpus[2].uuid: "cordoned"}).splitlines()
    (at,) = [at for at, line in enumerate(drawn) if 'class="held"' in line]
    for line in drawn[at + 1 : at + 3]:  # its name and its bus id, each on a spot of its own
        assert line.index(f'<rect fill="{GREY}"') < line.index("<text")
    assert f'fill="{PALE}"' not in "".join(drawn[at + 1 : at + 3])


def test_a_gpu_with_fewer_links_to_the_switches_has_a_line_of_its_own_width():
    links = mesh(range(4), Link(18, 40, switched=True)) | dict.fromkeys(
        [(0, 3), (1, 3), (2, 3)], Link(6, 40, switched=True)
    )
    widths = {
        each.get("data-gpu"): number(each, "stroke-width") for each in Seen(node([0] * 4, links)).of_class("switched")
    }
    assert widths == {"0": 12, "1": 12, "2": 12, "3": 4}


def test_it_has_paper_of_its_own():
    seen = Seen(dgx1())
    paper = seen.root.find(f"{SVG}rect")
    assert (paper.get("width"), paper.get("height")) == (seen.root.get("width"), seen.root.get("height"))
    assert paper.get("fill") == "#ffffff"


def test_few_gpus_stand_in_the_middle_of_their_canvas():
    seen = Seen(node([0, 0], {}))
    boxes = seen.boxes()
    left, right = boxes[0][0], number(seen.root, "width") - boxes[-1][1]
    assert abs(left - right) <= 1
    assert left < number(seen.root, "width") / 2
