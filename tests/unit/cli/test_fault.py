import pytest
from click.testing import CliRunner

from gpu_plugin.cli.fault import _FLAGS, command
from gpu_plugin.runtime import control
from gpu_plugin.simulation import faults, gpu, gpu_faults


@pytest.fixture
def asked(monkeypatch):
    """The requests of the command to the daemon."""
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
        (("--gpu", "4", "--mig", ""), {"gpu": 4, "mig": ""}),
        (("--gpu", "GPU-1", "--xid", "79"), {"gpu": "GPU-1", "xid": 79}),
        (("--gpu", "4", "--hang", "0.5"), {"gpu": 4, "hang": 0.5}),
        (("--gpu", "4", "--heal"), {"gpu": 4, "heal": True}),
        (("--gpu", "4", "--xid", "43", "--instance", "2/0"), {"gpu": 4, "xid": 43, "instance": "2/0"}),
        (("--gpu", "4", "--event", "0x800"), {"gpu": 4, "event": 0x800}),
        (("--gpu", "4", "--clocks-event-reasons", "64"), {"gpu": 4, "clocks-event-reasons": 64}),
        (("--gpu", "4", "--ecc-uncorrected", "2"), {"gpu": 4, "ecc-uncorrected": 2}),
        (("--gpu", "4", "--recovery-action", "drain-p2p"), {"gpu": 4, "recovery-action": "drain-p2p"}),
        (("--gpu", "4", "--nvlink-down", "0"), {"gpu": 4, "nvlink-down": 0}),
        (("--gpu", "4", "--fabric", "unhealthy"), {"gpu": 4, "fabric": "unhealthy"}),
        (("--gpu", "4", "--margin", "-3"), {"gpu": 4, "margin": -3}),
        (("--gpu", "4", "--error", "0"), {"gpu": 4, "error": 0}),
        (("--gpu", "4", "--slow", "0.2"), {"gpu": 4, "slow": 0.2}),
        (("--gpu", "4", "--energy-dip", "1"), {"gpu": 4, "energy-dip": 1}),
        (("--gpu", "4", "--persistence-mode", "off"), {"gpu": 4, "persistence-mode": "off"}),
        (("--init-error", "999"), {"init-error": 999}),
        (("--init-error", "18", "--times", "2"), {"init-error": 18, "times": 2}),
        (("--reboot",), {"reboot": True}),
        (("--gpu", "4", "--reboot"), {"gpu": 4, "reboot": True}),
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
    flags = ", ".join(f"--{name}" for name in _FLAGS)
    assert f"one fault at a time, of {flags}: {given}" in result.output
    assert asked == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--lost",), "--gpu is missing: which GPU, by its index, its uuid or its PCI bus id"),
        (("--gpu", "0", "--lost", "--instance", "1"), "--instance goes with --xid, not with --lost"),
        (("--gpu", "0", "--lost", "--times", "1"), "--times goes with --init-error, not with --lost"),
        (("--gpu", "0", "--event", "ecc"), "--event: 'ecc' is not a number such as 64 or 0x40"),
        (
            ("--gpu", "0", "--fabric", "broken"),
            "'broken' is not one of 'completed', 'in-progress', 'unhealthy', 'limited'",
        ),
        (
            ("--gpu", "0", "--recovery-action", "1"),
            "'1' is not one of 'none', 'gpu-reset', 'node-reboot', 'drain-p2p', ",
        ),
    ],
)
def test_what_cannot_be_asked_is_said_at_once(asked, arguments, sentence):
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert asked == []


def test_every_fault_has_its_flag_and_every_choice_its_meaning():
    assert set(_FLAGS) == {*faults.FAULTS, *faults.NODE_FAULTS}
    assert list(_FLAGS["recovery-action"]["type"].choices) == list(gpu_faults.RECOVERY_ACTIONS)
    assert tuple(_FLAGS["persistence-mode"]["type"].choices) == gpu_faults.PERSISTENCE_MODES
    assert set(_FLAGS["fabric"]["type"].choices) == {"completed", *gpu.FABRICS}
    assert list(_FLAGS["topology"]["type"].choices) == list(gpu_faults.TOPOLOGIES)
