"""docs/placement.md shows what its commands print."""

import re
import shlex
from pathlib import Path

import pytest

from gpu_plugin import cli
from gpu_plugin.cli import simulate_allocation

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "placement.md").read_text()
EXAMPLES = re.findall(r"```console\n\$ gpu-plugin (.*)\n((?s:.*?))```", TEXT)
FILES = re.findall(r"```yaml\n# (\S+)\n((?s:.*?))```", TEXT)


def test_there_are_examples_of_both_verbs():
    assert {command.split()[0] for command, _ in EXAMPLES} == {"topology", "simulate-allocation"}


@pytest.mark.parametrize(("command", "shown"), EXAMPLES)
def test_an_example_is_what_its_command_prints(command, shown, capsys, monkeypatch, tmp_path):
    for name, content in FILES:
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(("name", "content"), FILES)
def test_a_file_has_an_example_that_takes_it(name, content):
    assert content
    assert any(f"--simulate {name}" in command for command, _ in EXAMPLES)


def test_every_option_of_the_request_is_in_its_table():
    table = set(re.findall(r"^\| `(--[a-z]+)", TEXT, re.MULTILINE))
    asked = {option for each in simulate_allocation.command.params for option in each.opts if option.startswith("--")}
    assert table == asked - {"--simulate", "--state-dir"}


def test_the_picture_is_what_is_drawn_now(capsys):
    assert cli.main(["topology", "--simulate", "dgx1-v100", "--svg", "-"]) == 0
    assert capsys.readouterr().out == (DOCS / "dgx1-v100.svg").read_text()
