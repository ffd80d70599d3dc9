"""The lists of files that containers need on a Tegra, as Linux for Tegra brings them.

Lines are `kind, path`, after the mount plugin specification (libnvidia-container, design/mount_plugins.md) and its reader in
nvidia-container-toolkit (internal/platform-support/tegra/csv).
"""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

DIRECTORY = "etc/nvidia-container-runtime/host-files-for-container.d"

NAMES = ("devices.csv", "drivers.csv", "l4t.csv")
"""The lists that every container gets; others, such as cudnn.csv, only images of JetPack 4 (csv.BaseFilesOnly)."""

MAX_BYTES = 1024 * 1024
MAX_LINES = 10_000
"""More than any list has: that of a Jetson Orin has 285 lines, in 20 KiB."""

MAX_FAULTS = 20  # faults of one list that are told one by one


class Entry(StrEnum):
    """What a line is about. `lib` is any regular file."""

    DEVICE = "dev"
    LIBRARY = "lib"
    DIRECTORY = "dir"
    LINK = "sym"


class Line(msgspec.Struct, frozen=True):
    """A line: its kind, and an absolute path, in which *, ? and [...] are as in a shell."""

    kind: Entry
    path: str


class Lines(msgspec.Struct, frozen=True):
    """The lines of a list, and a sentence for each that is none."""

    lines: tuple[Line, ...] = ()
    complaints: tuple[str, ...] = ()


def parse(name: str, content: bytes) -> Lines:
    """The lines of the list of this name. What is wrong is left out and said; `content` is at most MAX_BYTES + 1 long."""
    if len(content) > MAX_BYTES:
        return Lines(complaints=(f"{name} is left out: it has more than {MAX_BYTES:,} bytes",))
    rows = content.decode(errors="replace").removesuffix("\n").split("\n")
    found: dict[Line, None] = {}
    faults: list[str] = []
    for number, row in enumerate(rows[:MAX_LINES], 1):
        text = row.strip()
        if not text or text.startswith("#"):
            continue
        line = _line(text)
        if isinstance(line, Line):
            found[line] = None
        else:
            faults.append(f"{name}:{number} is left out: {line}")
    return Lines(tuple(found), tuple(_bounded(name, faults, len(rows))))


def _line(text: str) -> Line | str:
    word, comma, path = (part.strip() for part in text.partition(","))
    shown = repr(text[:80])
    if not comma:
        return f"{shown} is not of the form `kind, path`"
    if word not in set(Entry):
        return f"{word[:80]!r} is none of {', '.join(Entry)}"
    if not path.startswith("/") or not path.isprintable() or "\ufffd" in path:
        return f"{shown} has no absolute path of printable characters"
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        return f"{shown} has a path that leads to the root or out of it"
    return Line(Entry(word), "/" + "/".join(parts))


def _bounded(name: str, faults: list[str], rows: int) -> Iterator[str]:
    yield from faults[:MAX_FAULTS]
    if len(faults) > MAX_FAULTS:
        yield f"{name}: {len(faults) - MAX_FAULTS} more lines are left out"
    if rows > MAX_LINES:
        yield f"{name} has {rows:,} lines, of which those behind the first {MAX_LINES:,} are left out"


def not_found(root: str) -> str:
    """Why no container can use the GPU where no list is found."""
    return (
        f"none of {', '.join(NAMES)} is in /{DIRECTORY}, neither in the driver root {root} nor here: they come with "
        "nvidia-l4t-init of Linux for Tegra, and are seen here where the host's root is mounted"
    )
