"""cordon, uncordon, release, resume and explain: the requests to the daemon, and the output of its answers."""

import contextlib
import io
import json
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from gpu_plugin import cli
from gpu_plugin.cli.explain import lines
from gpu_plugin.health.explain import Explanation
from gpu_plugin.runtime import control
from gpu_plugin.status.model import Gpu, Missing, Problem, Process, Status, Step

NOW = 1_800_000_000.0
XID = Explanation(
    name="xid", detail="Xid 79 (GPU has fallen off the bus)", verdict="FATAL", since=NOW - 7500, device="MIG-1"
)
SICK = Gpu(
    index=3,
    uuid="GPU-6f1c3a52",
    bus_id="0000:61:00.0",
    state="unhealthy",
    healthy=False,
    verdict="FATAL",
    since=NOW - 7500,
    signals=(XID,),
    holders=("default/train-0", "default/train-1"),
)
SOUND = Gpu(index=0, uuid="GPU-0a", bus_id="0000:1b:00.0", holders=())
GONE = Missing(name="GPU 0000:99:00.0", why="it is gone", bus_id="0000:99:00.0", uuid="GPU-99")
STEPS = (Step("Keep pods away", "kubectl cordon node-a"), Step("Reboot the node", "systemctl reboot " + "now " * 30))
PROBLEMS = (
    Problem(
        kind="gpu-xid",
        severity="critical",
        title="T",
        cause=XID.detail,
        gpu=SICK.uuid,
        steps=STEPS,
        recovers="it is up",
    ),
    Problem(kind="missing-gpu", severity="critical", title="T", cause="C", object=GONE.name, gpu=GONE.uuid),
    Problem(kind="state", severity="critical", title="T", cause="of the node"),
)
STATUS = Status(daemon=Process(version="1"), gpus=(SOUND, SICK), missing=(GONE,), problems=PROBLEMS)


class Daemon:
    """The requests to a daemon but for its status, and its answers."""

    def __init__(self):
        self.asked: list[tuple[str, str, dict[str, object]]] = []
        self.answer: dict[str, object] | control.ControlError = {"done": "done so."}
        self.status = STATUS

    def request(self, state_dir, verb, *_, **fields):
        if isinstance(self.answer, Exception):
            raise self.answer
        if verb == "status":
            return msgspec.to_builtins(self.status)
        self.asked.append((str(state_dir), verb, fields))
        return self.answer


@pytest.fixture
def daemon(monkeypatch):
    daemon = Daemon()
    monkeypatch.setattr(control, "request", daemon.request)
    return daemon


def run(verb, *arguments):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        exit_code = cli.main([verb, "--state-dir", "/state", *arguments])
    return SimpleNamespace(exit_code=exit_code, output=shown.getvalue())


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (("cordon", "3"), {"gpu": 3}),
        (("cordon", "GPU-0a"), {"gpu": "GPU-0a"}),
        (("uncordon", "3"), {"gpu": 3, "override": False}),
        (("uncordon", "3", "--override"), {"gpu": 3, "override": True}),
        (("release", "--all"), {}),
        (("release", "0"), {"gpu": 0}),
        (("resume", "--all"), {}),
        (("resume", "GPU-0a"), {"gpu": "GPU-0a"}),
        (("cordon", "1b:00.0", "--reason", "fan is loud"), {"gpu": "1b:00.0", "reason": "fan is loud"}),
    ],
)
def test_an_order_reaches_the_daemon_and_its_answer_people(daemon, arguments, fields):
    result = run(*arguments)
    assert (result.exit_code, result.output.splitlines()[0]) == (0, "done so.")
    assert daemon.asked == [("/state", arguments[0], fields)]


@pytest.mark.parametrize("verb", ["cordon", "uncordon"])
def test_an_order_for_all_goes_to_each_gpu(daemon, verb):
    assert run(verb, "--all").exit_code == 0
    assert [fields["gpu"] for _, _, fields in daemon.asked] == [SOUND.uuid, SICK.uuid]


@pytest.mark.parametrize("verb", ["cordon", "uncordon", "release", "resume"])
@pytest.mark.parametrize("arguments", [(), ("3", "--all"), ("--gpu", "3")])
def test_which_gpu_must_be_said_as_an_argument(daemon, verb, arguments):
    result = run(verb, *arguments)
    assert (result.exit_code, daemon.asked) == (2, [])
    assert "GPU" in result.output


@pytest.mark.parametrize("verb", ["cordon", "release"])
def test_the_pods_that_hold_the_gpu_are_listed(daemon, verb):
    assert {"default/train-0", "default/train-1."} <= set(run(verb, "3").output.replace(",", "").split())


def test_a_gpu_can_only_be_reset_if_no_pod_holds_it(daemon):
    def says_so(*arguments):
        return "can be reset" in run("release", *arguments).output

    assert says_so("0")
    assert not says_so("3")
    assert not says_so("--all")
    daemon.status = replace(STATUS, gpus=(replace(SOUND, holders=None),))
    assert not says_so("0")


@pytest.mark.parametrize("verb", ["explain", "cordon", "uncordon", "release", "resume", "status"])
def test_a_refusal_is_one_sentence_and_a_failure(daemon, verb, capsys):
    daemon.answer = control.ControlError("GPU 9: no GPU of this node has this index")
    gpu = [] if verb == "status" else ["9"]
    assert cli.main([verb, "--state-dir", "/state", *gpu]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "gpu-plugin: GPU 9: no GPU of this node has this index\n")


def test_a_daemon_that_has_no_such_verb_is_called_another_version(daemon):
    daemon.answer = control.UnknownVerbError("this daemon has no verb cordon; it has: status")
    result = run("cordon", "0")
    assert result.exit_code == 3
    assert "the running daemon is of another version" in result.output


class TestExplain:
    def test_json_is_the_gpu_with_its_problems(self, daemon):
        data = json.loads(run("explain", "--json", "3").output)
        assert ([gpu["uuid"] for gpu in data["gpus"]], data["missing"]) == ([SICK.uuid], [])
        assert data["gpus"][0]["signals"][0]["since"] == "2027-01-15T05:55:00.000Z"
        assert [problem["kind"] for problem in data["problems"]] == ["gpu-xid"]

    def test_json_of_all_gpus_has_problems_of_gpus_only(self, daemon):
        data = json.loads(run("explain", "-o", "json").output)
        assert (len(data["gpus"]), len(data["missing"])) == (2, 1)
        assert {problem["kind"] for problem in data["problems"]} == {"gpu-xid", "missing-gpu"}

    @pytest.mark.parametrize("name", ["3", "GPU-6f1c3a52", "gpu-6f1", "6f1c", "61:00.0", "00000000:61:00.0"])
    def test_a_gpu_may_be_named_in_many_ways(self, daemon, name):
        result = run("explain", name)
        assert (result.exit_code, SICK.uuid in result.output, SOUND.uuid in result.output) == (1, True, False)

    @pytest.mark.parametrize("name", ["99:00.0", "GPU-99"])
    def test_a_missing_gpu_is_named_by_uuid_or_bus_id_and_is_exit_status_1(self, daemon, name):
        result = run("explain", name)
        assert (result.exit_code, GONE.why in result.output) == (1, True)

    @pytest.mark.parametrize("name", ["9", "GPU-", "GPU-7", "--gpu=3"])
    def test_a_name_that_no_gpu_has_is_bad_usage(self, daemon, name):
        assert run("explain", name).exit_code == 2

    def test_it_tells_the_cause_the_pods_the_steps_and_the_recovery(self):
        shown = list(lines(SICK, STATUS, NOW, 80))
        text = " ".join(" ".join(shown).split())
        for part in (XID.detail, "MIG-1", "2h", "2027-01-15 05:55:00 UTC", "default/train-0", "Recovers when it is up"):
            assert part in text
        commands = [line.strip() for line in shown]
        assert all(step.command.strip() in commands for step in STEPS)  # on one line, however long
        assert not any("of the node" in line for line in shown)

    def test_other_lines_are_no_longer_than_the_terminal_is_wide(self):
        shown = [line for line in lines(SICK, STATUS, NOW, 40) if "systemctl" not in line]
        assert max(map(len, shown)) <= 40

    def test_an_order_is_not_told_as_a_fault(self):
        order = Explanation(name="cordon", detail="cordoned", verdict="FATAL")
        held = replace(SICK, state="held-back", held_back=("cordon",), signals=(order,))
        assert not any("FATAL" in line for line in lines(held, STATUS, NOW))

    def test_the_unfit_come_first(self, daemon):
        daemon.status = replace(
            STATUS,
            gpus=(
                SOUND,
                replace(SOUND, index=1, uuid="GPU-1", state="degraded"),
                replace(SOUND, index=2, uuid="GPU-2", state="withheld", withheld=("its MPS daemon is down",)),
                SICK,
            ),
        )
        heads = [line.split()[1] for line in run("explain").output.splitlines() if line.startswith("GPU ")]
        assert heads == ["0000:99:00.0", "3", "2", "1", "0"]

    def test_an_unhealthy_gpu_is_exit_status_1(self, daemon):
        assert run("explain", "0").exit_code == 0
        assert run("explain", "3").exit_code == 1

    def test_where_no_gpu_is_known_it_says_so(self, daemon):
        daemon.status = Status(daemon=Process(version="1"))
        result = run("explain")
        assert (result.exit_code, "no GPU is known yet" in result.output) == (0, True)
