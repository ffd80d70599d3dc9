"""cordon, uncordon, release, resume and explain: the requests to the daemon, and the output of its answers."""

import json
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from gpu_plugin import cli
from gpu_plugin.cli.explain import lines
from gpu_plugin.cli.running_daemon import gpu_argument
from gpu_plugin.health.explain import Remedy
from gpu_plugin.runtime import control
from gpu_plugin.status import model
from gpu_plugin.status.model import Status
from tests.unit.cli.test_status import complete
from tests.unit.status.sample import gpu, signal

NOW = 3900.0
XID = replace(
    signal("Xid 79 (GPU has fallen off the bus)", "FATAL", xid=79, recovers="the node was rebooted"),
    remedy=Remedy.REBOOT,
    note="A note.",
)
LOST = gpu(3, state="unhealthy", healthy=False, verdict="FATAL", since=3600.0, signals=(XID,), holders=("d/a", "d/b"))
AWAY = model.Missing(name="GPU 0000:61:00.0 (GPU-away)", why="it is gone", bus_id="0000:61:00.0", uuid="GPU-away")
STATUS = complete(gpus=(gpu(0, holders=()), LOST, gpu(4, holders=("d/c",)), gpu(5)), missing=(AWAY,))


class Daemon:
    """The requests to a daemon, and its answers."""

    def __init__(self):
        self.asked: list[tuple[str, str, dict[str, object]]] = []
        self.status: Status = STATUS
        self.error: control.ControlError | None = None

    def request(self, state_dir, verb, *, patience=0.0, **fields):
        self.asked.append((str(state_dir), verb, fields))
        if self.error is not None:
            raise self.error
        return json.loads(msgspec.json.encode(self.status)) if verb == "status" else {"done": "done so."}


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
        (("cordon", "4"), {"gpu": 4}),
        (("cordon", "GPU-4"), {"gpu": "GPU-4"}),
        (("uncordon", "4"), {"gpu": 4, "override": False}),
        (("uncordon", "4", "--override"), {"gpu": 4, "override": True}),
        (("release", "--all"), {}),
        (("release", "0"), {"gpu": 0}),
        (("resume", "--all"), {}),
        (("resume", "GPU-1"), {"gpu": "GPU-1"}),
        (("cordon", "14:00.0", "--reason", "fan is loud"), {"gpu": "14:00.0", "reason": "fan is loud"}),
    ],
)
def test_an_order_reaches_the_daemon_and_its_answer_people(daemon, arguments, fields):
    result = run(*arguments)
    assert result.exit_code == 0
    assert result.output.startswith("done so.\n")
    assert daemon.asked[0] == ("/state", arguments[0], fields)


@pytest.mark.parametrize("verb", ["cordon", "uncordon"])
def test_an_order_for_one_gpu_is_given_for_each_gpu_with_all(daemon, verb):
    assert run(verb, "--all").exit_code == 0
    ordered = [fields["gpu"] for _, asked, fields in daemon.asked if asked == verb]
    assert ordered == ["GPU-0", "GPU-3", "GPU-4", "GPU-5"]


@pytest.mark.parametrize("verb", ["cordon", "uncordon", "release", "resume"])
@pytest.mark.parametrize("arguments", [(), ("3", "--all")])
def test_either_a_gpu_or_all_must_be_said(daemon, verb, arguments):
    result = run(verb, *arguments)
    assert (result.exit_code, daemon.asked) == (2, [])
    assert "--all" in result.output


@pytest.mark.parametrize("verb", ["cordon", "release"])
@pytest.mark.parametrize(
    ("name", "held", "free"), [("3", ["d/a", "d/b"], ["d/c"]), ("0", [], ["held"]), ("5", ["not known"], [])]
)
def test_the_pods_that_hold_the_gpu_are_listed(daemon, verb, name, held, free):
    said = run(verb, name).output
    assert all(each in said for each in held)
    assert not [each for each in free if each in said]


@pytest.mark.parametrize("verb", ["explain", "cordon", "uncordon", "release", "resume", "status"])
def test_a_refusal_is_one_sentence_and_a_failure(daemon, verb, capsys):
    daemon.error = control.ControlError("this daemon waits for another daemon")
    assert cli.main([verb, "--state-dir", "/state", *([] if verb == "status" else ["3"])]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "gpu-plugin: this daemon waits for another daemon\n")


def test_a_daemon_that_has_no_such_verb_is_called_another_version(daemon):
    daemon.error = control.UnknownVerbError("this daemon has no verb cordon; it has: status")
    result = run("cordon", "0")
    assert result.exit_code == 3
    assert "the running daemon is of another version" in result.output


def completed(begun: str) -> list[str]:
    command = click.command("verb")(gpu_argument(required=False)(lambda **_: None))
    parameter = next(each for each in command.params if each.name == "gpu")
    return [item.value for item in parameter.shell_complete(click.Context(command), begun)]


def test_gpus_are_completed_by_index_and_uuid_and_without_a_daemon_there_is_none(daemon):
    assert completed("") == ["0", "3", "4", "5"]
    assert completed("GPU-") == ["GPU-0", "GPU-3", "GPU-4", "GPU-5"]
    daemon.error = control.NoDaemonError("no daemon answers")
    assert completed("") == []


class TestExplain:
    @pytest.mark.parametrize("name", ["3", "GPU-3", "gpu-3", "0000:13:00.0", "13:00.0"])
    def test_a_gpu_is_named_by_index_uuid_and_bus_id(self, daemon, name):
        result = run("explain", name, "--json")
        (given,) = json.loads(result.output)["gpus"]
        assert given["index"] == 3
        assert [each["kind"] for each in given["problems"]] == ["gpu-xid"]
        assert daemon.asked == [("/state", "status", {})]

    @pytest.mark.parametrize("name", ["99", "GPU-9", "nobody", ""])
    def test_an_unknown_name_is_bad_usage(self, daemon, name):
        assert run("explain", name).exit_code == 2

    def test_a_mig_device_is_refused_with_the_gpus_name(self, daemon):
        device = model.Devices(resource="r", id="MIG-1", kind="mig", index="0:1")
        daemon.status = complete(gpus=(gpu(7, devices=(device,)),))
        result = run("explain", "MIG-1")
        assert result.exit_code == 2
        assert "GPU 7" in result.output

    def test_an_index_of_two_gpus_is_refused(self, daemon):
        daemon.status = complete(gpus=(gpu(7), replace(gpu(7), uuid="GPU-late")))
        assert run("explain", "7").exit_code == 2
        assert run("explain", "GPU-late").exit_code == 0

    def test_a_gpu_has_its_pods_causes_steps_and_recovery(self):
        text = list(lines(LOST, STATUS, NOW))
        assert "unhealthy" in text[0]
        assert "5m" in text[0]
        assert any("d/a, d/b" in line for line in text)
        assert any("Recovers when the node was rebooted" in line for line in text)
        assert any("A note." in line for line in text)
        commands = [line.strip() for line in text if line.strip().startswith("kubectl")]
        assert commands == [
            "kubectl cordon node-1",
            "kubectl drain node-1 --ignore-daemonsets --delete-emptydir-data",
            "kubectl uncordon node-1",
        ]

    def test_a_withheld_gpu_has_the_cause(self):
        status = complete(gpus=(gpu(0, state="withheld", withheld=("its MPS daemon is down; to do: start it",)),))
        text = " ".join(lines(status.gpus[0], status, NOW))
        assert "its MPS daemon is down" in text
        assert "Start it" in text

    def test_the_missing_and_the_unfit_come_first(self, daemon):
        shown = run("explain").output
        places = [shown.index(each) for each in ("GPU-away", "GPU-3", "GPU-0")]
        assert places == sorted(places)

    @pytest.mark.parametrize("name", ["61:00.0", "GPU-away", "GPU-aw"])
    def test_a_missing_gpu_has_its_reason_and_is_exit_status_1(self, daemon, name):
        assert "it is gone" in run("explain", name).output
        assert cli.main(["explain", "--state-dir", "/state", name]) == 1

    def test_a_healthy_gpu_is_exit_status_0_and_an_unhealthy_one_1(self, daemon):
        assert cli.main(["explain", "--state-dir", "/state", "0"]) == 0
        assert cli.main(["explain", "--state-dir", "/state"]) == 1

    @pytest.mark.parametrize("columns", [40, 60, 80])
    def test_lines_are_no_longer_than_the_terminal_is_wide_except_commands(self, columns):
        commands = {step.command for each in STATUS.problems for step in each.steps}
        for each in STATUS.gpus:
            text: list[str] = [line for line in lines(each, STATUS, NOW, columns) if line.strip() not in commands]
            assert [line for line in text if len(line) > columns] == []

    def test_where_no_gpu_is_known_it_says_so(self, daemon):
        daemon.status = complete(gpus=(), missing=())
        assert "no GPU is known yet" in run("explain").output


def test_every_problem_of_a_gpu_is_explained() -> None:
    shown: Any = "\n".join(lines(LOST, STATUS, NOW))
    assert all(each.title in shown for each in STATUS.problems if each.gpu == LOST.uuid)
