"""What all verbs have: documentation, a manual page and completion."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from click.shell_completion import ShellComplete

from gpu_plugin import cli
from gpu_plugin.cli.man import page
from gpu_plugin.config.settings import OPTIONS
from gpu_plugin.runtime import control
from gpu_plugin.status.model import Gpu, Process, Status

DOCS = Path(__file__).parents[3] / "docs"


def verbs(group: click.Group, *before: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join([*before, name]), command
        if isinstance(command, click.Group):
            yield from verbs(command, *before, name)


ALL = dict(verbs(cli.group))


def completed(*words: str) -> list[str]:
    shell = ShellComplete(cli.group, {}, "gpu-plugin", "_GPU_PLUGIN_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


LEFT_TO_HELP = {"fault", "mps", "cdi generate", "uninstall"}  # their own options are only in --help


@pytest.mark.parametrize("verb", ALL)
def test_each_verb_and_option_is_documented(verb):
    written = (DOCS / "command-line.md").read_text()
    assert re.search(rf"`(gpu-plugin )?{verb.split()[0]}\b", written)
    everywhere = "\n".join(path.read_text() for path in DOCS.glob("*.md"))
    settings = {f"--{flag}" for option in OPTIONS for flag in option.flags}  # their own page is generated
    own = [parameter for parameter in ALL[verb].params if isinstance(parameter, click.Option) and not parameter.hidden]
    names = {name for option in own for name in option.opts if name.startswith("--")} - settings
    assert verb in LEFT_TO_HELP or {name for name in names if not re.search(rf"{name}\b", everywhere)} == set()


def test_the_manual_page_has_each_verb_and_option_and_is_valid():
    lines = list(page(cli.group))
    text = "\n".join(lines).replace(r"\-", "-")
    for verb, command in ALL.items():
        assert f".SS gpu-plugin {verb}" in text
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert all(name in text for name in option.opts)
    assert {line.split()[0] for line in lines if line.startswith((".", "'"))} == {".TH", ".SH", ".SS", ".TP"}
    if (groff := shutil.which("groff")) is not None:
        done = subprocess.run(
            [groff, "-man", "-Tutf8", "-ww"], input="\n".join(lines), text=True, capture_output=True, check=True
        )
        assert (done.stderr, "simulate" in done.stdout) == ("", True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("sta",), ["status"]),
        (("status", "--sc"), ["--schema"]),
        (("status", "-o", ""), ["text", "wide", "json", "yaml"]),
        (("topology", "--simulate", "dgx1"), ["dgx1-v100"]),
        (("run", "--simulate", "dgx1"), ["dgx1-v100"]),
        (("run", "--mig-strategy", "m"), ["mixed"]),
    ],
)
def test_words_are_completed(words, expected):
    assert completed(*words) == expected


@pytest.mark.parametrize("verb", ["explain", "cordon", "release"])
def test_gpus_of_the_running_daemon_are_completed(verb, monkeypatch):
    status = Status(daemon=Process(version="1"), gpus=(Gpu(index=0, uuid="GPU-a"), Gpu(index=1, uuid="GPU-b")))
    monkeypatch.setattr(control, "request", lambda *_, **__: msgspec.to_builtins(status))
    assert completed(verb, "") == ["0", "1"]
    assert completed(verb, "GPU-b") == ["GPU-b"]


def test_without_a_daemon_no_gpu_is_completed(tmp_path, capsys):
    assert completed("explain", "--state-dir", str(tmp_path), "") == []
    assert capsys.readouterr() == ("", "")
