import pytest

from gpu_plugin.cli import main


@pytest.fixture
def cdi(capsys):
    """Runs a verb; gives exit status, standard output and standard error."""

    def run(*arguments):
        status = main(["cdi", *map(str, arguments)])
        told = capsys.readouterr()
        return status, told.out, told.err

    return run
