"""`gpu-plugin status`: the daemon's answer as text, JSON, YAML and metrics."""

import contextlib
import io
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from gpu_plugin.cli import main
from gpu_plugin.cli import status as status_module
from gpu_plugin.cli.status import lines
from gpu_plugin.runtime import control
from gpu_plugin.status import model
from gpu_plugin.status.model import Status
from gpu_plugin.status.problems import headline, problems
from gpu_plugin.status.remedies import Shell
from gpu_plugin.telemetry.metrics.families import metrics
from tests.unit.status.sample import GPUS, RESOURCE, STATUS, gpu

NOW = 3900.0
READINGS = {
    "temperature_celsius": 41,
    "power_watts": 350.4,
    "memory_used_bytes": 2**30,
    "memory_total_bytes": 80 * 2**30,
    "utilization_ratio": 0.5,
}


def complete(**changed: Any) -> Status:
    """Return the sample with these changes, and the problems that follow from them."""
    status = replace(STATUS, node="node-1", **changed)
    found = problems(status, Shell("node-1", "gpu", "gpu-plugin-x7"))
    return replace(status, problems=found, headline=headline(status, found))


SICK = complete()
WELL = complete(gpus=(gpu(0, holders=("default/train-0",)), gpu(1, holders=())))


def shown(status: Status, columns: int | None = None, **how: bool) -> list[str]:
    return list(lines(status, NOW, columns, **how))


def answering(monkeypatch, status: Status):
    monkeypatch.setattr(control, "request", lambda *_, **__: json.loads(msgspec.json.encode(status)))

    def run(*arguments):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exit_code = main(["status", "--state-dir", "/state", *arguments])
        return SimpleNamespace(exit_code=exit_code, output=output.getvalue())

    return run


@pytest.fixture
def run(monkeypatch):
    return answering(monkeypatch, SICK)


def test_the_headline_comes_first_then_the_problems_and_then_the_gpus():
    text = shown(SICK)
    assert text[0] == f"node-1: {SICK.headline}"
    places = [next(at for at, line in enumerate(text) if each in line) for each in ("CRITICAL", "WARNING", "note:")]
    assert places == sorted(places)
    assert places[-1] < next(at for at, line in enumerate(text) if line.startswith("GPU  STATE"))


def test_a_gpu_has_a_row_with_its_state_age_pods_and_cause():
    rows = {line.split()[0]: line for line in shown(SICK) if line[:1].isdigit()}
    assert rows["0"].split() == ["0", "healthy", "-", "default/train-0", "and", "1", "more"]
    assert rows["3"].split()[:3] == ["3", "unhealthy", "-"]
    assert rows["3"].endswith("Xid 79")
    assert "its MPS daemon is down" in rows["1"]
    timed = complete(gpus=(replace(GPUS[3], since=3600.0, holders=()),))
    assert next(line for line in shown(timed) if line.startswith("3")).split()[:4] == ["3", "unhealthy", "5m", "-"]


@pytest.mark.parametrize("columns", [80, 60, 46])
def test_text_fits_the_terminal_except_commands_that_people_copy(columns):
    for status in (SICK, WELL, complete(driver=model.Driver(trouble="not loaded " * 20))):
        text = shown(status, columns)
        commands = {step.command for problem in status.problems for step in problem.steps}
        assert [line for line in text if len(line) > columns and line.strip() not in commands] == []


def test_wide_output_has_all_pods_the_identity_and_the_mig_devices():
    holder = model.HolderCount(namespace="default", pod="train-9", container="main")
    slices = (
        model.Devices(resource="nvidia.com/mig-1g", id="MIG-1", kind="mig", index="0:1", holders=(holder,), held=1),
        model.Devices(resource="nvidia.com/mig-1g", id="MIG-2", kind="mig", index="0:2", healthy=0, reason="Xid 31"),
    )
    status = complete(gpus=(replace(GPUS[0], devices=slices, readings=READINGS),))
    text = "\n".join(shown(status, wide=True))
    for each in ("default/train-0, default/train-1", "GPU-0", "0000:10:00.0", "41 °C", "350 W", "1/80 GiB", "50%"):
        assert each in text
    assert "MIG-1  Healthy  default/train-9" in text
    assert "MIG-2  Unhealthy: Xid 31" in text
    assert "MIG-1" not in "\n".join(shown(status))


def test_watched_output_has_the_readings():
    text = "\n".join(shown(complete(gpus=(gpu(0, readings=READINGS), gpu(1))), watched=True))
    assert all(each in text for each in ("41 °C", "350 W", "1/80 GiB", "50%"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"waiting": "another daemon serves /k"}, "another daemon serves /k"),
        ({"driver": model.Driver(trouble="not loaded")}, "not loaded"),
        ({"driver": model.Driver(version="580.1", restart="restart it")}, "restart it"),
        ({"configuration": model.Configuration(since=1.0, file="/c", refused="line 3")}, "line 3"),
        ({"configuration": model.Configuration(since=1.0, faults=("a: no", "b: no"), refused="x")}, "a: no; b: no"),
        ({"configuration": model.Configuration(since=1.0, unheard="403")}, "403"),
        ({"resources": {RESOURCE: model.Resource(devices=1, healthy=1)}}, RESOURCE),
        ({"cdi": model.Cdi(directory="/var/run/cdi", trouble="no space left")}, "no space left"),
        ({"cluster": model.Cluster(node="n", trouble=("Events are not written: 403",))}, "Events are not written: 403"),
        ({"state": model.State(directory="/s", trouble="no space left")}, "/s: no space left"),
        ({"missing": (model.Missing(name="GPU 1b:00.0", why="it is gone"),)}, "GPU 1b:00.0: it is gone"),
    ],
)
def test_a_problem_is_in_the_text_and_is_exit_status_1(monkeypatch, changed, words):
    assert answering(monkeypatch, WELL)().exit_code == 0
    wrong = answering(monkeypatch, complete(gpus=WELL.gpus, **changed))
    done = wrong()
    assert (done.exit_code, words in done.output) == (1, True)
    assert wrong("-o", "json").exit_code == 1


@pytest.mark.parametrize("state", ["held-back", "degraded"])
def test_a_cordon_and_a_degraded_gpu_are_notes_and_no_failure(monkeypatch, state):
    verdict = "FATAL" if state == "held-back" else "DEGRADED"
    noted = replace(GPUS[2], state=state, signals=(replace(GPUS[2].signals[0], verdict=verdict),))
    done = answering(monkeypatch, complete(gpus=(noted,)))()
    assert done.exit_code == 0
    assert "note: GPU 2 is" in done.output


def test_each_command_of_a_node_problem_has_a_line_of_its_own():
    status = complete(gpus=(), resources={RESOURCE: model.Resource(devices=1, healthy=1)})
    commands = {step.command for problem in status.problems for step in problem.steps if step.command}
    assert commands
    assert commands <= {line.strip() for line in shown(status, 40)}


def test_pods_that_are_not_known_are_not_an_empty_list():
    text = shown(complete(gpus=(gpu(0),)))
    assert next(line for line in text if line.startswith("0")).split()[3] == "?"
    assert "does not report which pods" in text[-1]


@pytest.mark.parametrize(("how", "read"), [("--json", json.loads), ("-ojson", json.loads), ("-oyaml", yaml.safe_load)])
def test_structured_output_is_the_status_with_times_for_programs(run, how, read):
    given = read(run(how).output)
    assert given["daemon"]["started"] == "1970-01-01T00:00:01.000Z"
    assert given["gpus"][3]["signals"][0]["since"] == "1970-01-01T01:00:00.000Z"
    assert given["gpus"][0]["holders"] == ["default/train-0", "default/train-1"]
    assert {"gpu-xid", "withheld"} <= {each["kind"] for each in given["problems"]}
    assert given.keys() == set(Status.__struct_fields__)


def test_the_schema_describes_the_status_without_a_daemon(capsys):
    assert main(["status", "--schema", "--state-dir", "/nowhere"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["$defs"]["Status"]["properties"]) == set(Status.__struct_fields__)


def test_fields_of_a_later_version_are_ignored_and_another_reply_is_a_sentence(monkeypatch, capsys):
    known = json.loads(msgspec.json.encode(WELL))
    monkeypatch.setattr(control, "request", lambda *_, **__: {**known, "later": 1})
    assert main(["status", "--state-dir", "/state"]) == 0
    for reply in ({**known, "daemon": {"pid": "seven"}}, {**known, "format": 1}, {"daemon": {"version": "0.0.9"}}):
        monkeypatch.setattr(control, "request", lambda *_, told=reply, **__: told)
        capsys.readouterr()
        assert main(["status", "--state-dir", "/state"]) == 3
        assert "another version" in capsys.readouterr().err


def test_text_of_others_cannot_change_the_terminal(monkeypatch):
    hostile = complete(gpus=(gpu(0, holders=("default/\x1b[31mtrain",)),))
    assert "\x1b" not in answering(monkeypatch, hostile)().output


def test_it_is_printed_again_until_nobody_reads(run, monkeypatch):
    pauses: list[float] = []
    unread = iter([False, False, True])
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(status_module, "reader_left", lambda: next(unread))
    result = run("--watch", "500ms")
    assert (result.exit_code, pauses) == (1, [0.5, 0.5])
    assert result.output.count("node-1: ") == 3
    assert run("--watch", "soon").exit_code == 2


def test_it_goes_on_over_a_restart_of_the_daemon(monkeypatch, capsys):
    away = control.NoDaemonError("no daemon answers")
    answers = iter([WELL, away, control.ControlError("this daemon waits"), WELL])

    def request(*_, **__):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return json.loads(msgspec.json.encode(answer))

    unread = iter([False, False, False, True])
    monkeypatch.setattr(control, "request", request)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(status_module, "reader_left", lambda: next(unread))
    assert main(["status", "--state-dir", "/state", "--watch"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("node-1: ") == 2
    assert printed.err.splitlines() == ["no daemon answers", "this daemon waits"]
    answers = iter([away])
    assert main(["status", "--state-dir", "/state", "--watch"]) == 3


def test_colours_are_for_terminals(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in "\n".join(shown(SICK))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert "\x1b[31m" in "\n".join(shown(SICK))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in "\n".join(shown(SICK))


def test_metrics_are_in_prometheus_s_form_and_problems_are_no_failure(run):
    done = run("--metrics")
    assert done.exit_code == 0
    text = done.output.splitlines()
    assert text == metrics(SICK)
    assert f'gpu_plugin_devices{{resource="{RESOURCE}",state="unhealthy"}} 2' in text
    assert 'gpu_plugin_gpu_health{uuid="GPU-3",index="3",state="unhealthy"} 1' in text
