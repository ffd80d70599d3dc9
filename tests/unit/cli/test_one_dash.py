import click
import pytest
from click.testing import CliRunner

from gpu_plugin import cli
from gpu_plugin.cli.options import Grouped, with_two_dashes

NAMES = {"--mig-strategy", "--node", "-n", "--n"}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["-mig-strategy", "single"], ["--mig-strategy", "single"]),
        (["-mig-strategy=single"], ["--mig-strategy=single"]),
        (["--mig-strategy", "-node=a=b"], ["--mig-strategy", "--node=a=b"]),
        (["-n", "-x", "-mig", "--", "-node"], ["-n", "-x", "-mig", "--", "-node"]),
        (["-", "mig-strategy", ""], ["-", "mig-strategy", ""]),
    ],
)
def test_a_long_option_may_have_one_dash_and_a_short_one_stays(written, read):
    assert with_two_dashes(written, NAMES) == read


def test_a_command_takes_both():
    @click.command(cls=Grouped)
    @click.option("--mig-strategy")
    @click.option("--verbose", "-v", is_flag=True)
    def command(mig_strategy, verbose):
        click.echo(f"{mig_strategy} {verbose}")

    for written in (["-mig-strategy=single", "-v"], ["--mig-strategy", "single", "--verbose"]):
        assert CliRunner().invoke(command, written).output == "single True\n"


@pytest.mark.parametrize("verb", [["run"], ["mps"], []])
def test_run_takes_nvidias_spelling_also_without_its_name(verb, capsys):
    assert cli.main([*verb, "-mig-strategy=other", "-device-id-strategy", "index"]) == 2
    assert "--mig-strategy: 'other' is not one of none, single, mixed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--version", "gpu-plugin "),
        ("-version", "gpu-plugin "),
        ("--help", "Commands:"),
        ("-help", "Commands:"),
        ("-h", "Commands:"),
    ],
)
def test_version_and_help_are_no_options_of_a_verb(option, said, capsys):
    assert cli.main([option]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("written", [["--state-dir", "/nowhere", "status"], ["--mig-strategi=single"], ["serve"]])
def test_a_misspelt_command_line_starts_no_daemon(written, capsys):
    assert cli.main(written) == 2
    assert capsys.readouterr().err
