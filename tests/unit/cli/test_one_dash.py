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


@pytest.mark.parametrize("verb", ["run", "mps"])
def test_run_takes_nvidias_spelling(verb, capsys):
    assert cli.main([verb, "-mig-strategy=other", "-device-id-strategy", "index"]) == 2
    assert "--mig-strategy: 'other' is not one of none, single, mixed" in capsys.readouterr().err
