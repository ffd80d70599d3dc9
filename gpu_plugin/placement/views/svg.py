"""The few pieces of SVG that a picture is made of, as text. What they are given may hold any characters."""

from collections.abc import Sequence

import msgspec

_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
"""The five characters of XML that mean something: html.escape has the same ones, and 0.4 MiB of names that HTML has besides."""

SAMPLE = 28
GLYPH = 6.6
"""Width of a legend's samples, and of a letter in its texts, in about."""


class Sample(msgspec.Struct, frozen=True):
    """A line of a legend: a piece of SVG `SAMPLE` wide and up to 14 high, its left edge's middle at 0, 0; and its meaning."""

    drawn: str
    meaning: str


def xml(text: str) -> str:
    """A text as XML takes it, in an element or between quotes; what cannot be printed becomes a question mark."""
    return "".join(one if one.isprintable() else "?" for one in text).translate(_ESCAPES)


def element(name: str, inside: str = "", title: str = "", /, **attributes: object) -> str:
    """An element around what is `inside`, with a title for whoever points at it. Attributes have _ for - and may end in _."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{xml(str(value))}"' for key, value in attributes.items())
    inner = (f"<title>{xml(title)}</title>" if title else "") + inside
    return f"<{name}{given}>{inner}</{name}>" if inner else f"<{name}{given}/>"


def box(x: float, y: float, width: float, height: float, title: str = "", /, **attributes: object) -> str:
    """A box with round corners."""
    return element(
        "rect", "", title, x=f"{x:g}", y=f"{y:g}", width=f"{width:g}", height=f"{height:g}", rx=6, **attributes
    )


def written(x: float, y: float, text: str, /, **attributes: object) -> str:
    """A text whose baseline begins at a point, or has it in the middle where it is so anchored."""
    return element("text", xml(text), x=f"{x:g}", y=f"{y:g}", **attributes)


def legend(samples: Sequence[Sample], left: int, right: int, top: int) -> tuple[list[str], int]:
    """Samples side by side from `left` to `right`, in as many rows as that takes, and where the last row ends."""
    drawn, x, y = [], left, top
    for sample in samples:
        needed = round(SAMPLE + 8 + GLYPH * len(sample.meaning))
        if x > left and x + needed > right:
            x, y = left, y + 24
        meaning = written(SAMPLE + 8, 4, sample.meaning, font_size=11)
        drawn.append(element("g", sample.drawn + meaning, transform=f"translate({x} {y})"))
        x += needed + 20
    return drawn, y + 12
