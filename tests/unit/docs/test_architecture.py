"""The map of the rooms is that of import-linter's layers."""

import re
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
[LAYERS] = [
    each["layers"] for each in CONTRACTS if each.get("containers") == ["gpu_plugin"] and each["type"] == "layers"
]
LEVEL = {room: level for level, layer in enumerate(LAYERS) for room in re.split(r" [|:] ", layer)}
TABLE = (ROOT / "docs/architecture.md").read_text().split("## Rooms", 1)[1].split("\n## ", 1)[0]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| `")]


def test_every_room_is_in_the_table_and_in_the_layers_once():
    rooms = Counter(room for row in ROWS for room in re.findall(r"`(\w+)`", row[0]))
    layered = Counter(room for layer in LAYERS for room in re.split(r" [|:] ", layer))
    packages = Counter(path.parent.name for path in (ROOT / "gpu_plugin").glob("*/__init__.py"))
    for place, named in (("docs/architecture.md, Rooms", rooms), ("pyproject.toml, tool.importlinter", layered)):
        assert not packages - named, f"{place}: nothing of {', '.join(packages - named)}"
        assert not named - packages, f"{place}: {', '.join(named - packages)} stands there twice, or is no package"


def test_the_table_goes_from_the_upper_rooms_to_the_lower_ones():
    levels = [LEVEL[room] for row in ROWS for room in re.findall(r"`(\w+)`", row[0])]
    assert levels == sorted(levels)


def test_what_the_table_says_a_room_may_import_is_below_it_or_beside_it():
    for name, _, *allowed in ROWS:
        room = name.strip("`")
        named = [each for each in re.findall(r"\w+", " ".join(allowed)) if each in LEVEL]
        above = [each for each in named if LEVEL[each] < LEVEL[room]]
        assert not above, f"docs/architecture.md: {room} may not import {', '.join(above)}"
