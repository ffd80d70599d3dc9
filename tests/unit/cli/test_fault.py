import pytest
from click.testing import CliRunner

from gpu_plugin import control
from gpu_plugin.cli.fault import command


@pytest.fixture
def asked(monkeypatch):
    """What the command asks the daemon for."""
    requests = []

    def request(state_dir, verb, **fields):
        requests.append((str(state_dir), verb, fields))
        return {"done": "done so."}

    monkeypatch.setattr(control, "request", request)
    return requests


def run(*arguments):
    return CliRunner().invoke(command, ["--state-dir", "/state", *arguments])


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (("--gpu", "4", "--mig", "3g.20gb,1c.3g.20gb"), {"gpu": 4, "mig": "3g.20gb,1c.3g.20gb"}),
        (("--gpu", "4", "--mig", "none"), {"gpu": 4, "mig": "none"}),
        (("--gpu", "4", "--mig", "empty"), {"gpu": 4, "mig": "empty"}),
        (("--gpu", "4", "--mig", ""), {"gpu": 4, "mig": ""}),
        (("--gpu", "GPU-1", "--xid", "79"), {"gpu": "GPU-1", "xid": 79}),
        (("--gpu", "4", "--hang", "0.5"), {"gpu": 4, "hang": 0.5}),
        (("--gpu", "4", "--heal"), {"gpu": 4, "heal": True}),
    ],
)
def test_a_fault_reaches_the_daemon_as_it_was_written(asked, arguments, fields):
    result = run(*arguments)
    assert (result.exit_code, result.output) == (0, "done so.\n")
    assert asked == [("/state", "fault", fields)]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ((), "none given"),
        (("--mig", "", "--heal"), "--mig and --heal given"),
        (("--lost", "--xid", "3"), "--xid and --lost"),
    ],
)
def test_it_takes_one_fault_at_a_time(asked, arguments, given):
    result = run("--gpu", "0", *arguments)
    assert result.exit_code == 2
    assert f"one fault at a time, of --xid, --temperature, --lost, --hang, --mig, --heal: {given}" in result.output
    assert asked == []
