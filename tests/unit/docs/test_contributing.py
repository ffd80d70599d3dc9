"""What CONTRIBUTING.md says of adding something, done as it says, in a copy of the code: it can be chosen, and works."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.docs.test_docs import TABLES

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "CONTRIBUTING.md").read_text().split("## Adding something", 1)[1].split("\n## ", 1)[0]
BLOCKS = re.findall(r"^```(?:python|yaml)\n# ([^\n]+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
ADDED = {
    "signal": "warm-memory",
    "strategy": "site-mounts",
    "`--device-list-strategy`": "site-mounts",
    "MIG strategy": "unpartitioned",
    "policy": "roomiest",
    "check": "volatile-state",
}


def put(root: Path, where: str, block: str) -> None:
    """A block goes into a file of its own, at the end of one, at the end of a table of one, or below a line of one."""
    path, _, place = where.partition(", ")
    file = root / path
    if not place:
        assert not file.exists(), f"CONTRIBUTING.md, an example: {path} exists already, so name the example otherwise"
        file.write_text(block)
        return
    lines = file.read_text().splitlines(keepends=True)
    if place == "at the end":
        lines += ["\n", "\n", block]
    elif place.startswith("below "):
        [at] = [at for at, line in enumerate(lines) if re.match(rf"{place.removeprefix('below ')}[:,]", line.strip())]
        lines.insert(at + 1, block)
    else:
        [begins] = [at for at, line in enumerate(lines) if re.match(rf"{place.removeprefix('in ')}: .*[{{(]$", line)]
        lines.insert(next(at for at in range(begins, len(lines)) if lines[at] in {"}\n", ")\n"}), block)
    file.write_text("".join(lines))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What `examples_in_use.py` finds in a copy in which every block is where it belongs."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "gpu_plugin", copy / "gpu_plugin")
    for where, block in BLOCKS:
        put(copy, where, block)
    program = [sys.executable, str(Path(__file__).with_name("examples_in_use.py"))]
    environ = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(program, cwd=copy, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_is_added_is_in_the_help(shown):
    for words in ("unpartitioned (", "site-mounts (", "roomiest (", "--site", "name of the site"):
        assert words in shown["help"]


def test_what_is_added_is_in_the_schema(shown):
    flags = shown["schema"]["properties"]["flags"]["properties"]
    assert "unpartitioned" in flags["migStrategy"]["enum"]
    assert "site-mounts" in flags["plugin"]["properties"]["deviceListStrategy"]["anyOf"][1]["items"]["enum"]
    assert "roomiest" in flags["plugin"]["properties"]["sharedDevicesAllocationPolicy"]["enum"]
    assert flags["site"]["description"] == "name of the site, for the log"
    assert shown["schema"]["properties"]["health"]["properties"]["signals"]["properties"]["warm-memory"] == {
        "description": "memory hotter than the site allows",
        "enum": ["ignore", "degraded", "fatal", None],
    }


def test_the_chart_gets_what_is_added_without_a_line_of_its_own(shown):
    taken = json.loads(shown["chart"]["values.schema.json"])["properties"]
    assert taken["migStrategy"]["enum"] == ["none", "single", "mixed", "unpartitioned", None]
    assert taken["sharedDevicesAllocationPolicy"]["enum"][-2:] == ["roomiest", None]
    assert taken["deviceListStrategy"]["items"]["enum"][-2:] == ["site-mounts", "auto"]
    assert re.match(taken["deviceListStrategy"]["pattern"], "envvar, site-mounts")
    assert "# How MIG devices are offered: none, single, mixed or unpartitioned.\n" in shown["chart"]["values.yaml"]
    assert "cdi-cri, site-mounts, several" in shown["chart"]["values.yaml"]


@pytest.mark.parametrize("at", range(len(TABLES)), ids=[f"{row[0]}: {row[1]}" for row in TABLES])
def test_the_table_without_a_row_for_it_is_named(shown, at):
    assert shown["missing rows"][at] == [ADDED[TABLES[at][1]]]


def test_it_works(shown):
    assert shown["works"] == {
        "signal": ["OK", "OK", "DEGRADED", "DEGRADED", "DEGRADED", "OK"],
        "signal, judged by the file": ["OK", "OK", "FATAL", "FATAL", "FATAL", "OK"],
        "device list strategy": ["/run/site-gpus/GPU-a"],
        "MIG strategy": ["GPU-a"],
        "allocation policy": {
            "chosen": {"0": 1, "1": 2, "2": 1},
            "why": "each GPU or MIG device with any free gives one before any gives a second one; then, the most room first: "
            "GPU 1 (2 of 4 given out, room for 2)",
        },
        "simulated node": ["NVIDIA L4", "NVIDIA L4"],
        "simulated node, by name": True,
        "option": ["here", "there", "elsewhere"],
        "check": ["warning", "ok"],
        "check, in its place": "state-directory",
    }
