"""A node's link groups as an SVG picture: GPUs in a row, NVLinks as arcs above it, common PCIe ancestors as frames.

With the GPUs in a row, no line crosses a GPU, and no two arcs have the same height and the same middle.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, groupby

import msgspec

from gpu_plugin.config.words import counted
from gpu_plugin.devices.nvml_h import TopologyLevel
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.views.groups import Group, LinkGroups, NvlinkGroup
from gpu_plugin.placement.views.matrix import pcie_word, word
from gpu_plugin.placement.views.svg import SAMPLE, Sample, box, element, legend, written, xml

# Lengths are in SVG's user units, which are pixels if the picture is not scaled
WIDTH = 60  # of a GPU's box
HEIGHT = 42  # of a GPU's box
GAP = 14  # between two boxes without a frame between them
FRAME = 8  # from a frame to the frame around it
LABEL = 16  # the same at the bottom, with space for a frame's name
MARGIN = 24  # around everything
AREA_GAP = 20  # between NUMA nodes
LEAST_WIDTH = 460  # room for the longest line of the legend
HEAD = 56  # room for the title
ARC = 26  # height of an arc between neighbours
ARC_STEP = 19  # additional height of an arc for each GPU between its ends
BAR = 26  # height of the bar of an NVSwitch mesh
BAR_STEP = 40  # from one bar to the next
BAR_LINES = 44  # space for lines below the bars
BAR_GAP = 22  # width of the gap in a bar for the line of another mesh's GPU

WIDEST = 12.0  # width of the line for the greatest number of NVLinks; up to six NVLinks take 2 each

PAPER = "#ffffff"
INK = "#1f2933"
PALE = "#52606d"
AREA = "#eef2f7"
EDGE = "#7b8794"
FRAME_EDGE = "#7b5ea7"
GREY = "#cbd2d9"
"""Colour of a GPU that pods do not get now."""

MANY = "#2f7d1f"
FEW = "#5f9645"
"""Colours of NVLinks: of a pair with more than half of the greatest number between any pair, and of other pairs."""

DARK: Mapping[str, str] = {
    PAPER: "#161b22",
    INK: "#e6edf3",
    PALE: "#9aa5b1",
    AREA: "#21262d",
    EDGE: "#768390",
    FRAME_EDGE: "#a78bca",
    GREY: "#3d444d",
    MANY: "#57ab5a",
    FEW: "#3f8f45",
}
"""The replacement of each colour if the viewer prefers a dark scheme."""

FONT = "DejaVu Sans, Verdana, Arial, sans-serif"
BOLD: Mapping[str, object] = {"font_size": 12, "font_weight": "bold"}
CENTRED: Mapping[str, object] = {"text_anchor": "middle"}

FRAMES: Mapping[int, tuple[str, str, str]] = {
    TopologyLevel.INTERNAL: ("one board", "", "on one board (PIX)"),
    TopologyLevel.SINGLE: ("PCIe switch", "", "at one PCIe switch (PIX)"),
    TopologyLevel.MULTIPLE: ("PCIe switches", "8 4", "at several PCIe switches (PXB)"),
    TopologyLevel.HOSTBRIDGE: ("host bridge", "2 4", "at one PCIe host bridge (PHB)"),
}
"""By common ancestor (nvmlGpuTopologyLevel_t): a frame's name, the dashes of its line, and its words in the legend."""


class _Frame(msgspec.Struct, frozen=True):
    """GPUs of one NUMA node with a common PCIe ancestor, in the order in which they are drawn.

    `depth` counts the frames from the innermost to this one.
    """

    level: int
    gpus: Group
    depth: int


class _Area(msgspec.Struct, frozen=True):
    """The GPUs of a NUMA node in the order in which they are drawn, and their frames, the outer ones first."""

    node: int | None
    gpus: Group
    frames: tuple[_Frame, ...]

    def before(self, gpu: int) -> int:
        """Return the number of frames that begin at a GPU."""
        return max((frame.depth for frame in self.frames if frame.gpus[0] == gpu), default=0)

    def after(self, gpu: int) -> int:
        """Return the number of frames that end at a GPU."""
        return max((frame.depth for frame in self.frames if frame.gpus[-1] == gpu), default=0)


def picture(groups: LinkGroups, topology: Topology, name: str = "", held_back: Mapping[str, str] | None = None) -> str:
    """Return the picture's SVG, the same for the same topology. `name` is the node's name, or empty.

    `held_back` are the uuids of GPUs that are held back from pods, with the reason of each.
    """
    return "\n".join(_Picture(groups, topology, name, held_back or {}).lines()) + "\n"


class _Picture:
    """The layout and the elements. GPUs are positions in `groups.gpus`; `rank` is their place in the row."""

    def __init__(self, groups: LinkGroups, topology: Topology, name: str, held_back: Mapping[str, str]) -> None:
        self.groups, self.topology, self.title, self.held_back = groups, topology, _title(groups, name), held_back
        self.areas = [_area(groups, node, gpus) for node, gpus in groups.numa]
        self.row = [gpu for area in self.areas for gpu in area.gpus]
        self.rank = {gpu: at for at, gpu in enumerate(self.row)}
        self.depth = max((frame.depth for area in self.areas for frame in area.frames), default=0)
        self.meshes = [group for group in groups.nvlink if group.switched]
        self.lanes = _lanes([[self.rank[gpu] for gpu in mesh.gpus] for mesh in self.meshes])
        self.arcs = [
            (one, other)
            for one, other in combinations(self.row, 2)
            if groups.links[one][other].nvlinks and not groups.links[one][other].switched
        ]
        self.most = max((group.most for group in groups.nvlink), default=1)
        left, end = self._across()
        self.width = max(end + MARGIN, LEAST_WIDTH, 10 * len(self.title) + 2 * MARGIN)
        margin = (self.width - end - MARGIN) // 2  # few GPUs are drawn in the middle
        self.left = {gpu: x + margin for gpu, x in left.items()}
        bars = BAR_STEP * (max(self.lanes) + 1) + BAR_LINES if self.lanes else 0
        rise = max((self._rise(*pair) for pair in self.arcs), default=0)
        self.top = HEAD + bars + max(rise + 12 if rise else 0, FRAME * (self.depth + 1))
        self.bottom = self.top + HEIGHT + LABEL * (self.depth + 1) + 8

    def lines(self) -> Iterator[str]:
        """Yield the whole file, line by line."""
        samples, end = legend(list(self._samples()), MARGIN, self.width - MARGIN, self.bottom + 34)
        height = end + MARGIN // 2
        size = f'width="{self.width}" height="{height}" viewBox="0 0 {self.width} {height}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{FONT}" fill="{INK}">'
        yield f"<title>{xml(self.title)}</title>"
        yield f"<style>{dark_style()}</style>"
        yield box(0, 0, self.width, height, fill=PAPER)
        yield written(MARGIN, 32, self.title, font_size=16, font_weight="bold")
        for area in self.areas:
            yield from self._area(area)
        yield from self._meshes()
        yield from self._arcs()
        for gpu in self.row:
            yield from self._gpu(gpu)
        yield from samples
        yield "</svg>"

    def _across(self) -> tuple[Mapping[int, int], int]:
        """Return the left edge of every GPU's box, and the right edge of the last NUMA node."""
        left, x = {}, MARGIN - AREA_GAP
        for area in self.areas:
            x += AREA_GAP + FRAME
            for at, gpu in enumerate(area.gpus):
                x += FRAME * area.before(gpu) + (GAP if at else 0)
                left[gpu] = x
                x += WIDTH + FRAME * area.after(gpu)
            x += FRAME
        return left, x

    def _middle(self, gpu: int) -> int:
        return self.left[gpu] + WIDTH // 2

    def _rise(self, one: int, other: int) -> int:
        """Return the height of the arc between two GPUs."""
        return ARC + ARC_STEP * (self.rank[other] - self.rank[one] - 1)

    def _stroke(self, nvlinks: int) -> dict[str, object]:
        """Return the style of a line for this number of NVLinks."""
        width = max(1.0, nvlinks * min(2.0, WIDEST / self.most))
        return {"fill": "none", "stroke": MANY if 2 * nvlinks > self.most else FEW, "stroke_width": f"{width:.3g}"}

    def _area(self, area: _Area) -> Iterator[str]:
        first, last = area.gpus[0], area.gpus[-1]
        before, after = FRAME * (area.before(first) + 1), FRAME * (area.after(last) + 1)
        yield self._around(first, last, (before, after), self.depth + 1, fill=AREA, stroke=EDGE)
        alone = len(area.gpus) == 1
        unknown = "?" if alone else "unknown"
        name = f"NUMA {'' if alone else 'node '}{unknown if area.node is None else area.node}"
        yield written(self.left[first] - before + 8, self.bottom - 8, name, **BOLD)
        for frame in area.frames:
            first, last, out = frame.gpus[0], frame.gpus[-1], FRAME * frame.depth
            yield self._around(first, last, (out, out), frame.depth, **_frame_style(frame.level))
            x, y = self.left[first] - out + 8, self.top + HEIGHT + LABEL * frame.depth - 2
            yield written(x, y, FRAMES[frame.level][0], font_size=10, fill=PALE)

    def _around(self, first: int, last: int, out: tuple[int, int], depth: int, **style: object) -> str:
        x, right = self.left[first] - out[0], self.left[last] + WIDTH + out[1]
        y, bottom = self.top - FRAME * depth, self.top + HEIGHT + LABEL * depth + (8 if depth > self.depth else 4)
        return box(x, y, right - x, bottom - y, **style)

    def _meshes(self) -> Iterator[str]:
        """Yield a bar for each NVSwitch mesh, and a line from each of its GPUs to it."""
        tags, y = [], HEAD + BAR_STEP * (max(self.lanes, default=0) + 1) + 14
        for mesh, lane in zip(self.meshes, self.lanes, strict=True):
            yield from self._bar(mesh, lane)
        for mesh, lane in zip(self.meshes, self.lanes, strict=True):
            bottom = HEAD + BAR_STEP * lane + BAR
            for gpu in mesh.gpus:
                count, path = self._to_switches(gpu, mesh.gpus), f"M{self._middle(gpu)} {bottom}V{self.top}"
                style = {"class_": "switched", "data_gpu": self._index(gpu), **self._stroke(count)}
                yield element("path", "", self._scores(gpu, mesh.gpus), d=path, **style)
                tags.append(_tag(self._middle(gpu), y, f"NV{count}"))
        yield from tags

    def _bar(self, mesh: NvlinkGroup, lane: int) -> Iterator[str]:
        """Yield the bar of a mesh, with gaps for lines from bars above it, and with a name if there is room."""
        y, gpus = HEAD + BAR_STEP * lane, sorted(mesh.gpus, key=self.rank.__getitem__)
        x, end = self.left[gpus[0]], self.left[gpus[-1]] + WIDTH
        above = [other for other, its in zip(self.meshes, self.lanes, strict=True) if its < lane]
        passing = sorted(self._middle(gpu) for other in above for gpu in other.gpus)
        gaps = [middle - BAR_GAP // 2 for middle in passing if x < middle < end]
        about = f"NVSwitch mesh: {self.groups.called(mesh.gpus)}"
        yield box(x, y, end - x, BAR, f"{about} ({mesh.mesh})" if mesh.mesh else about, class_="mesh", fill=MANY)
        for left in gaps:
            yield element("rect", class_="gap", x=left, y=y, width=BAR_GAP, height=BAR, fill=PAPER)
        between = zip((x, *(left + BAR_GAP for left in gaps)), (*gaps, end), strict=True)
        left, right = max(between, key=lambda part: part[1] - part[0])
        names = (about, self.groups.called(mesh.gpus), "NVSwitch")
        name = next((name for name in names if 9 * len(name) < right - left), "")
        if name:
            yield written((left + right) / 2, y + 17, name, **BOLD, **CENTRED, fill=PAPER)

    def _to_switches(self, gpu: int, gpus: Sequence[int]) -> int:
        """Return the number of NVLinks of a GPU to its switches that it shares with any other GPU."""
        return max(self.groups.links[gpu][other].nvlinks for other in gpus if other != gpu)

    def _scores(self, gpu: int, gpus: Sequence[int]) -> str:
        row = self.topology.scores[gpu]
        others = sorted((other for other in gpus if other != gpu), key=lambda other: (-row[other], other))
        parts = [f"{score} with {self.groups.called(each)}" for score, each in groupby(others, row.__getitem__)]
        return f"GPU {self._index(gpu)} through switches: score {', '.join(parts)}"

    def _arcs(self) -> Iterator[str]:
        """Yield the direct NVLinks, long arcs first, and their counts on top."""
        ends, tags = self._ends(), []
        for one, other in sorted(self.arcs, key=lambda pair: (-self._rise(*pair), self.rank[pair[0]])):
            x, to, control = ends[one, other], ends[other, one], self.top - self._rise(one, other) * 4 / 3
            link, score = self.groups.links[one][other], self.topology.scores[one][other]
            low, high = sorted((self._index(one), self._index(other)))
            path = f"M{x:g} {self.top}C{x:g} {control:g} {to:g} {control:g} {to:g} {self.top}"
            about = f"GPU {low} and GPU {high}: {word(link)}, by PCIe {pcie_word(link)}; score {score}"
            style = {"class_": "nvlink", "data_pair": f"{low}-{high}", **self._stroke(link.nvlinks)}
            yield element("path", "", about, d=path, **style)
            tags.append(_tag((x + to) / 2, self.top - self._rise(one, other) + 4, word(link)))
        yield from tags

    def _ends(self) -> Mapping[tuple[int, int], float]:
        """Return the ends of arcs on a GPU's upper edge by pair: side by side, so that inner arcs stay within outer arcs."""
        ends: dict[tuple[int, int], float] = {}
        for gpu in self.row:
            others = [pair[pair[0] == gpu] for pair in self.arcs if gpu in pair]
            before = sorted((one for one in others if self.rank[one] < self.rank[gpu]), key=lambda one: -self.rank[one])
            after = sorted((one for one in others if self.rank[one] > self.rank[gpu]), key=lambda one: -self.rank[one])
            for at, other in enumerate((*before, *after)):
                ends[gpu, other] = round(self.left[gpu] + WIDTH * (at + 0.5) / len(others), 1)
        return ends

    def _gpu(self, gpu: int) -> Iterator[str]:
        it, x, middle = self.groups.gpus[gpu], self.left[gpu], self._middle(gpu)
        reason = self.held_back.get(it.uuid, "")
        why = f"held back from pods: {reason}" if reason else it.unreadable or ""
        about = ", ".join(part for part in (it.uuid, it.model, it.pci_bus_id, why) if part)
        style: dict[str, object] = {"stroke_dasharray": "3 3"} if it.unreadable else {}
        fill = GREY if reason else PAPER
        style |= {"class_": "gpu", "data_gpu": it.index, "fill": fill, "stroke": INK, "stroke_width": 1.5}
        yield box(x, self.top, WIDTH, HEIGHT, about, **style)
        if reason:
            across = f"M{x} {self.top + HEIGHT}L{x + WIDTH} {self.top}"
            yield element("path", "", about, class_="held", d=across, stroke=PALE, stroke_width=1.5)
        yield _over(middle, self.top + 18, f"GPU {it.index}", fill, BOLD)
        if it.pci_bus_id:
            words = {"font_size": 10, "fill": INK if reason else PALE}
            yield _over(middle, self.top + 33, _bus_id(it.pci_bus_id), fill, words)

    def _index(self, gpu: int) -> int:
        return self.groups.gpus[gpu].index

    def _samples(self) -> Iterator[Sample]:
        """Yield the legend of the elements that occur."""
        for count in sorted({self.groups.links[one][other].nvlinks for one, other in self.arcs}):
            line = element("path", d=f"M0 0H{SAMPLE}", **self._stroke(count))
            yield Sample(line, f"{counted(count, 'NVLink')} between two GPUs (NV{count})")
        if self.meshes:
            yield Sample(box(0, -6, SAMPLE, 12, fill=MANY), "NVSwitches: every GPU at the bar reaches every other one")
        for level in sorted({frame.level for area in self.areas for frame in area.frames}):
            yield Sample(box(0, -7, SAMPLE, 14, **_frame_style(level)), FRAMES[level][2])
        if any(area.node is not None for area in self.areas):
            yield Sample(box(0, -7, SAMPLE, 14, fill=AREA, stroke=EDGE), "near one NUMA node")
        if self.held_back:
            sample = box(0, -7, SAMPLE, 14, fill=GREY, stroke=INK)
            yield Sample(
                sample + element("path", d=f"M0 7L{SAMPLE} -7", stroke=PALE, stroke_width=1.5), "held back from pods"
            )
        if self.arcs or self.meshes:
            yield Sample(
                written(SAMPLE / 2, 4, "?", **BOLD, **CENTRED), "opened by itself: point at a line for its score"
            )


def dark_style() -> str:
    """Return the style sheet that replaces each colour; a picture that is embedded in a page has it, too."""
    rules = "".join(
        f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}' for light, dark in DARK.items()
    )
    return f"@media (prefers-color-scheme: dark){{{rules}}}"


def _frame_style(level: int) -> dict[str, object]:
    broken: dict[str, object] = {"stroke_dasharray": FRAMES[level][1]} if FRAMES[level][1] else {}
    return {"fill": PAPER, "stroke": FRAME_EDGE, **broken}


def _tag(x: float, y: float, text: str) -> str:
    """Return a text in the middle of a line, on a spot of the background's colour."""
    width = 8 * len(text)
    spot = element("rect", x=f"{x - width / 2:g}", y=f"{y - 11:g}", width=width, height=14, rx=3, fill=PAPER)
    return spot + written(x, y, text, font_size=11, **CENTRED)


def _over(x: float, y: float, text: str, fill: str, words: Mapping[str, object]) -> str:
    """Return a text in the middle of a box of this colour, on top of the line across a GPU that is held back."""
    if fill != GREY:
        return written(x, y, text, **words, **CENTRED)
    width = min(6.5 * len(text), WIDTH - 6)
    place = {"x": f"{x - width / 2:g}", "y": f"{y - 10:g}", "width": f"{width:g}", "height": 12}
    return element("rect", fill=fill, pointer_events="none", **place) + written(x, y, text, **words, **CENTRED)


def _bus_id(bus_id: str) -> str:
    """Return a short PCI bus id for the narrow box: without its domain if that is 0, else without leading zeros."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0')}:{rest}" if domain.strip("0") else rest


def _title(groups: LinkGroups, name: str) -> str:
    models = [gpu.model or "GPU of unknown model" for gpu in groups.gpus]
    counted = ", ".join(f"{models.count(model)} x {model}" for model in dict.fromkeys(models))
    return f"{name}: {counted}" if name else counted


def _area(groups: LinkGroups, node: int | None, gpus: Group) -> _Area:
    """Return the GPUs of a NUMA node in an order that keeps PCIe groups together, the lowest first."""
    levels: dict[frozenset[int], int] = {}  # by the GPUs of a frame, the inner frames first
    for level, found in groups.pcie.items():
        for group in found:
            members = frozenset(group).intersection(gpus)
            if len(members) > 1:
                levels.setdefault(members, level)
    around = {gpu: sorted((each for each in levels if gpu in each), key=len, reverse=True) for gpu in gpus}
    ordered = sorted(gpus, key=lambda gpu: [*map(min, around[gpu]), gpu])
    frames: dict[frozenset[int], _Frame] = {}
    for members, level in levels.items():
        depth = 1 + max((frame.depth for inner, frame in frames.items() if inner < members), default=0)
        frames[members] = _Frame(level, tuple(gpu for gpu in ordered if gpu in members), depth)
    outer_first = sorted(frames.values(), key=lambda frame: (-frame.depth, frame.gpus))
    return _Area(node, tuple(ordered), tuple(outer_first))


def _lanes(meshes: Sequence[Sequence[int]]) -> list[int]:
    """Return for each mesh, given as places in the row, the uppermost lane in which its bar touches no other bar."""
    lanes: list[int] = []
    for at, mesh in enumerate(meshes):
        met = {
            lanes[other] for other, each in enumerate(meshes[:at]) if min(each) <= max(mesh) and min(mesh) <= max(each)
        }
        lanes.append(next(lane for lane in range(len(meshes)) if lane not in met))
    return lanes
