"""The table of packages in docs/architecture.md agrees with import-linter's layers."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[3]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
[LAYERS] = [
    each["layers"] for each in CONTRACTS if each.get("containers") == ["gpu_plugin"] and each["type"] == "layers"
]
LEVEL = {room: level for level, layer in enumerate(LAYERS) for room in re.split(r" [|:] ", layer)}
TABLE = (ROOT / "docs/architecture.md").read_text().split("## Packages", 1)[1].split("\n## ", 1)[0]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| `")]


def test_every_room_is_in_the_table_and_in_the_layers_once():
    rooms = Counter(room for row in ROWS for room in re.findall(r"`(\w+)`", row[0]))
    layered = Counter(room for layer in LAYERS for room in re.split(r" [|:] ", layer))
    packages = Counter(path.parent.name for path in (ROOT / "gpu_plugin").glob("*/__init__.py"))
    for place, named in (("docs/architecture.md, Packages", rooms), ("pyproject.toml, tool.importlinter", layered)):
        assert not packages - named, f"{place}: nothing of {', '.join(packages - named)}"
        assert not named - packages, f"{place}: {', '.join(named - packages)} stands there twice, or is no package"


def test_the_table_goes_from_the_upper_rooms_to_the_lower_ones():
    levels = [LEVEL[room] for row in ROWS for room in re.findall(r"`(\w+)`", row[0])]
    assert levels == sorted(levels)


def test_the_table_says_what_each_room_imports():
    everyones = {"config", "devices", "runtime"}
    graph = grimp.build_graph("gpu_plugin", cache_dir=None)
    for room, _, said in ([cell.strip(" `|") for cell in row] for row in ROWS):
        inside = f"gpu_plugin.{room}"
        modules = {inside, *graph.find_descendants(inside)}
        imported = {
            found.split(".")[1]
            for each in modules
            for found in graph.find_modules_directly_imported_by(each)
            if "." in found  # the package itself has no more than the version
        }
        named = set(re.findall(r"\w+", said)) - {"nothing"}
        assert named == imported - {room} - everyones, f"docs/architecture.md, Packages: what {room} imports"
