"""cordon, uncordon, release, resume and explain: the requests to the daemon, and the output of its answers."""

import json
from typing import Any

import click
import pytest
from click.testing import CliRunner

from gpu_plugin import cli
from gpu_plugin.cli.explain import lines
from gpu_plugin.runtime import control

NOW = 1_800_000_000.0
SICK: dict[str, Any] = {
    "index": 3,
    "uuid": "GPU-3",
    "health": "Unhealthy",
    "verdict": "FATAL",
    "signals": [
        {
            "name": "xid",
            "detail": "Xid 79 (GPU has fallen off the bus)",
            "since": NOW - 7500,
            "clears": "a boot of the node",
            "verdict": "FATAL",
            "action": "drain the node and reboot it",
            "device": "MIG-1",
        },
        {
            "name": "unreadable",
            "detail": "it does not answer",
            "since": None,
            "clears": "an answer",
            "verdict": "FATAL",
        },
    ],
}
SOUND = {"index": 0, "uuid": "GPU-0", "health": "Healthy", "verdict": "OK", "signals": []}


class Daemon:
    """The requests to a daemon, and its answer."""

    def __init__(self):
        self.asked: list[tuple[str, str, dict[str, object]]] = []
        self.answer: dict[str, object] | control.ControlError = {"done": "done so."}

    def request(self, state_dir, verb, **fields):
        self.asked.append((str(state_dir), verb, fields))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def daemon(monkeypatch):
    daemon = Daemon()
    monkeypatch.setattr(control, "request", daemon.request)
    return daemon


def run(verb, *arguments):
    command = cli.group.get_command(click.Context(cli.group), verb)
    assert command is not None
    return CliRunner().invoke(command, ["--state-dir", "/state", *arguments])


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (("cordon", "--gpu", "4"), {"gpu": 4}),
        (("cordon", "--gpu", "GPU-1"), {"gpu": "GPU-1"}),
        (("uncordon", "--gpu", "4"), {"gpu": 4, "override": False}),
        (("uncordon", "--gpu", "4", "--override"), {"gpu": 4, "override": True}),
        (("release",), {}),
        (("release", "--gpu", "0"), {"gpu": 0}),
        (("resume",), {}),
        (("resume", "--gpu", "GPU-1"), {"gpu": "GPU-1"}),
        (("cordon", "--gpu", "1b:00.0", "--reason", "fan is loud"), {"gpu": "1b:00.0", "reason": "fan is loud"}),
    ],
)
def test_an_order_reaches_the_daemon_and_its_answer_people(daemon, arguments, fields):
    result = run(*arguments)
    assert (result.exit_code, result.output) == (0, "done so.\n")
    assert daemon.asked == [("/state", arguments[0], fields)]


@pytest.mark.parametrize("verb", ["cordon", "uncordon"])
def test_which_gpu_must_be_said(daemon, verb):
    result = run(verb)
    assert (result.exit_code, daemon.asked) == (2, [])
    assert "--gpu" in result.output


@pytest.mark.parametrize("verb", ["explain", "cordon", "uncordon", "release", "resume", "status"])
def test_a_refusal_is_one_sentence_and_a_failure(daemon, verb, capsys):
    daemon.answer = control.ControlError("GPU 9: no GPU of this node has this index")
    gpu = [] if verb == "status" else ["--gpu", "9"]
    assert cli.main([verb, "--state-dir", "/state", *gpu]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "gpu-plugin: GPU 9: no GPU of this node has this index\n")


def test_a_daemon_that_has_no_such_verb_is_called_another_version(daemon):
    daemon.answer = control.UnknownVerbError("this daemon has no verb cordon; it has: status")
    result = run("cordon", "--gpu", "0")
    assert result.exit_code == 3
    assert "the running daemon is of another version" in result.output


class TestExplain:
    def test_json_is_what_the_daemon_said(self, daemon):
        daemon.answer = {"gpus": [SOUND, SICK]}
        result = run("explain", "--json", "--gpu", "3")
        sick = {**SICK, "signals": [{**SICK["signals"][0], "since": "2027-01-15T05:55:00.000Z"}, SICK["signals"][1]]}
        assert json.loads(result.output) == {"gpus": [SOUND, sick]}
        assert daemon.asked == [("/state", "explain", {"gpu": 3})]

    def test_text_has_a_block_for_each_gpu_that_something_is_held_against_and_a_line_for_others(self, daemon):
        daemon.answer = {"gpus": [SOUND, SICK, {**SOUND, "index": 7, "uuid": "GPU-7"}]}
        result = run("explain")
        first, second = result.output.split("\n\n")
        assert second == "GPU 0  GPU-0  Healthy\nGPU 7  GPU-7  Healthy\n"
        assert first.startswith("GPU 3  GPU-3  Unhealthy, FATAL\n  xid (FATAL, MIG device MIG-1): Xid 79 (")

    def test_the_unfit_come_first_and_then_the_worse(self, daemon):
        mild = SICK["signals"]
        daemon.answer = {
            "gpus": [
                SOUND,
                {**SICK, "index": 1, "health": "Healthy", "verdict": "APP", "signals": mild},
                {**SICK, "index": 2, "health": "Healthy", "verdict": "DEGRADED", "signals": mild},
                {**SICK, "index": 4, "health": "Healthy", "verdict": "FATAL", "signals": mild},  # a MIG device of it
                SICK,
                {**SICK, "index": 5, "health": "Healthy", "verdict": "UNHEARD-OF", "signals": mild},
            ]
        }
        heads = [line for line in run("explain").output.splitlines() if line.startswith("GPU ")]
        assert [line.split()[1] for line in heads] == ["3", "4", "2", "1", "5", "0"]
        assert heads[2].endswith("  Healthy, degraded")

    def test_a_signal_says_since_when_what_clears_it_and_what_to_do(self):
        assert list(lines(SICK, NOW))[1:] == [
            "  xid (FATAL, MIG device MIG-1): Xid 79 (GPU has fallen off the bus)",
            "    since   2027-01-15 05:55:00 UTC, for 2 h 5 min",
            "    clears  a boot of the node",
            "    to do   drain the node and reboot it",
            "  unreadable (FATAL): it does not answer",
            "    clears  an answer",
        ]

    def test_an_unhealthy_gpu_is_exit_status_1(self, daemon):
        daemon.answer = {"gpus": [SOUND]}
        assert cli.main(["explain", "--state-dir", "/state"]) == 0
        daemon.answer = {"gpus": [SOUND, SICK]}
        assert cli.main(["explain", "--state-dir", "/state"]) == 1

    def test_a_missing_gpu_is_named_without_an_index_and_is_exit_status_1(self, daemon, capsys):
        signal = {"name": "missing", "detail": "it is gone", "since": None, "clears": "an answer", "verdict": "FATAL"}
        missing = {**SICK, "index": None, "bus_id": "0000:61:00.0", "health": "Missing", "signals": [signal]}
        daemon.answer = {"gpus": [missing]}
        assert cli.main(["explain", "--state-dir", "/state", "--gpu", "61:00.0"]) == 1
        shown = capsys.readouterr().out
        assert shown.startswith("GPU  0000:61:00.0  GPU-3  Missing")
        assert "missing (FATAL): it is gone" in shown

    def test_a_gpu_is_named_by_index_bus_id_uuid_and_model(self, daemon):
        daemon.answer = {"gpus": [{**SOUND, "bus_id": "0000:1b:00.0", "model": "NVIDIA H100"}]}
        assert run("explain").output == "GPU 0  0000:1b:00.0  GPU-0  NVIDIA H100  Healthy\n"

    def test_lines_are_no_longer_than_the_terminal_is_wide(self):
        shown = list(lines(SICK, NOW, 40))
        assert max(map(len, shown)) <= 41
        assert "".join(shown).replace(" ", "") == "".join(lines(SICK, NOW)).replace(" ", "")

    def test_where_no_gpu_is_known_it_says_so(self, daemon):
        daemon.answer = {"gpus": []}
        assert "no GPU is known yet" in run("explain").output


def test_the_head_of_an_explanation_fits_the_terminal_too():
    gpu = {
        "index": 3,
        "bus_id": "0000:3b:00.0",
        "uuid": "GPU-8c155fe2-a352-5347-a8e7-4832f196f7d1",
        "model": "NVIDIA H100 80GB HBM3",
        "health": "Healthy",
        "verdict": "OK",
        "signals": [],
    }
    shown = list(lines(gpu, 0.0, 60))
    assert max(map(len, shown)) <= 60
    assert shown[-1].endswith("Healthy")
