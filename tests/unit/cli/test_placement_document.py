"""docs/placement.md shows what its commands print."""

import re
import shlex
from pathlib import Path

import pytest

from gpu_plugin import cli

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLES = re.findall(r"```console\n\$ gpu-plugin (.*)\n((?s:.*?))```", (DOCS / "placement.md").read_text())


def test_there_are_examples_of_both_verbs():
    assert {command.split()[0] for command, _ in EXAMPLES} == {"topology", "simulate-allocation"}


@pytest.mark.parametrize(("command", "shown"), EXAMPLES)
def test_an_example_is_what_its_command_prints(command, shown, capsys):
    assert cli.main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


def test_the_picture_is_what_is_drawn_now(capsys):
    assert cli.main(["topology", "--simulate", "dgx1-v100", "--svg", "-"]) == 0
    assert capsys.readouterr().out == (DOCS / "dgx1-v100.svg").read_text()
