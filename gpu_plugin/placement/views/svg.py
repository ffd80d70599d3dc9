"""SVG elements as text. Texts in the arguments may contain any characters."""

from collections.abc import Sequence

import msgspec

_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
"""The five special characters of XML. html.escape has the same, but loads 0.4 MiB of HTML's names."""

SAMPLE = 28
GLYPH = 6.6
"""Width of a legend's samples, and approximate width of a letter in its texts."""


class Sample(msgspec.Struct, frozen=True):
    """A line of a legend: a piece of SVG `SAMPLE` wide and up to 14 high, its left edge's middle at 0, 0; and its meaning."""

    drawn: str
    meaning: str


def xml(text: str) -> str:
    """Return a text escaped for XML, in an element or between quotes, with question marks for unprintable characters."""
    return "".join(char if char.isprintable() else "?" for char in text).translate(_ESCAPES)


def element(name: str, inside: str = "", title: str = "", /, **attributes: object) -> str:
    """Return an element around `inside`, with a tooltip `title`. Attributes have _ for - and may end in _."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{xml(str(value))}"' for key, value in attributes.items())
    inner = (f"<title>{xml(title)}</title>" if title else "") + inside
    return f"<{name}{given}>{inner}</{name}>" if inner else f"<{name}{given}/>"


def box(x: float, y: float, width: float, height: float, title: str = "", /, **attributes: object) -> str:
    """Return a box with round corners."""
    return element(
        "rect", "", title, x=f"{x:g}", y=f"{y:g}", width=f"{width:g}", height=f"{height:g}", rx=6, **attributes
    )


def written(x: float, y: float, text: str, /, **attributes: object) -> str:
    """Return a text whose baseline begins at a point, or has its middle there with `text_anchor="middle"`."""
    return element("text", xml(text), x=f"{x:g}", y=f"{y:g}", **attributes)


def legend(samples: Sequence[Sample], left: int, right: int, top: int) -> tuple[list[str], int]:
    """Return samples side by side from `left` to `right`, in as many rows as needed, and the bottom of the last row."""
    drawn, x, y = [], left, top
    for sample in samples:
        needed = round(SAMPLE + 8 + GLYPH * len(sample.meaning))
        if x > left and x + needed > right:
            x, y = left, y + 24
        meaning = written(SAMPLE + 8, 4, sample.meaning, font_size=11)
        drawn.append(element("g", sample.drawn + meaning, transform=f"translate({x} {y})"))
        x += needed + 20
    return drawn, y + 12
