"""`gpu-plugin status`: the daemon's answer as text, JSON, YAML and metrics."""

import json
import sys
import time
from types import SimpleNamespace

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from gpu_plugin.cli import main
from gpu_plugin.cli import status as status_module
from gpu_plugin.cli.status import lines
from gpu_plugin.health.explain import Explanation
from gpu_plugin.runtime import control
from gpu_plugin.status.model import (
    Devices,
    Driver,
    Gpu,
    HolderCount,
    Kubelet,
    Missing,
    Problem,
    Process,
    Registration,
    Resource,
    Status,
    Step,
    json_schema,
)
from gpu_plugin.telemetry.metrics.families import metrics

NAME = "nvidia.com/gpu"
NOW = 100_000.0
WELL = Status(
    headline="All 2 GPUs are Healthy",
    daemon=Process(version="1.2.3", pid=7, started=NOW - 7200),
    driver=Driver(version="580.1"),
    kubelet=Kubelet(socket="/k/kubelet.sock"),
    resources={
        NAME: Resource(devices=2, healthy=2, held=1, registration=Registration(registered=True, since=NOW - 60))
    },
    gpus=(
        Gpu(
            index=0,
            uuid="GPU-a",
            bus_id="0000:1b:00.0",
            model="NVIDIA H100",
            holders=("default/train-0", "default/train-1"),
            readings={"temperature_celsius": 61, "power_watts": 350.4, "power_limit_watts": 700.0},
        ),
        Gpu(index=1, uuid="GPU-b", holders=()),
    ),
)
XID = Explanation(name="xid", detail="Xid 79 (GPU has fallen off the bus)", verdict="FATAL", since=NOW - 180)
LOST = Gpu(index=3, uuid="GPU-d", state="unhealthy", healthy=False, verdict="FATAL", since=NOW - 180, signals=(XID,))
PROBLEM = Problem(
    kind="gpu-xid",
    severity="critical",
    title="GPU 3 is Unhealthy",
    cause=XID.detail,
    gpu=LOST.uuid,
    since=NOW - 180,
    recovers="the node was rebooted",
)
SICK = replace(WELL, headline=PROBLEM.title, problems=(PROBLEM,), gpus=(*WELL.gpus, replace(LOST, holders=())))


def told(status, columns=80, **how):
    return list(lines(status, NOW, columns, **how))


def row(shown, first):
    return next(line.split() for line in shown if line.split()[:1] == [first])


@pytest.fixture
def run(monkeypatch, capsys):
    def run(status, *arguments):
        reply = msgspec.to_builtins(status) if isinstance(status, Status) else status
        monkeypatch.setattr(control, "request", lambda *_, **__: json.loads(json.dumps(reply)))
        exit_code = main(["status", "--state-dir", "/state", *arguments])
        shown = capsys.readouterr()
        return SimpleNamespace(exit_code=exit_code, output=shown.out, error=shown.err)

    return run


def test_a_problem_has_its_cause_age_recovery_and_the_command_that_tells_more():
    shown = told(SICK)
    assert shown[0].split()[-1] == "3m"
    text = "\n".join(shown)
    for part in (PROBLEM.title, PROBLEM.cause, PROBLEM.recovers, "gpu-plugin explain 3"):
        assert part in text
    assert text.count(PROBLEM.title) == 1  # the headline is the same


def test_a_problem_of_the_node_has_its_first_step_with_the_command_on_its_own_line():
    problem = Problem(
        kind="state",
        severity="critical",
        title="T",
        cause="C",
        steps=(Step("Look", "df -h /var"), Step("Then", "other")),
    )
    shown = told(replace(WELL, problems=(problem,)))
    assert "df -h /var" in [line.strip() for line in shown]
    assert not any("other" in line for line in shown)


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_text_fits_the_terminal(columns):
    long = replace(PROBLEM, cause="word " * 60, recovers="word " * 60)
    missing = Missing(name="GPU 9", why="why " * 40, bus_id="0000:99:00.0")
    shown = told(replace(SICK, problems=(long,), missing=(missing,)), columns)
    assert max(map(len, shown)) <= columns


def test_pods_are_named_where_they_fit_and_counted_otherwise():
    assert row(told(WELL), "0")[-2:] == ["default/train-0,", "default/train-1"]
    gpus = (replace(WELL.gpus[0], holders=tuple(f"default/train-{n}" for n in range(20))),)
    assert row(told(replace(WELL, gpus=gpus)), "0")[-2:] == ["20", "pods"]


def test_pods_that_are_not_known_are_not_none():
    gpus = (replace(WELL.gpus[0], holders=None), WELL.gpus[1])
    shown = told(replace(WELL, gpus=gpus))
    assert (row(shown, "0")[-1], row(shown, "1")[-1]) == ("?", "-")


def test_what_is_fine_takes_one_line():
    other = {f"nvidia.com/mig-{n}": WELL.resources[NAME] for n in range(2)}
    shown = told(replace(WELL, resources={**WELL.resources, **other}), None)
    assert sum("nvidia.com" in line for line in shown) == 1
    worse = replace(WELL.resources[NAME], healthy=1)
    shown = told(replace(WELL, resources={**WELL.resources, **other, "nvidia.com/worse": worse}), None)
    assert sum("nvidia.com" in line for line in shown) == 2


def test_wide_adds_names_readings_and_mig_devices():
    mig = Devices(
        resource="nvidia.com/mig-1g.10gb",
        id="MIG-x",
        kind="mig",
        index="1:3",
        held=1,
        holders=(HolderCount(namespace="default", pod="infer", container="c"),),
    )
    status = replace(WELL, gpus=(WELL.gpus[0], replace(WELL.gpus[1], devices=(mig,))))
    shown = told(status, wide=True)
    assert {"0000:1b:00.0", "GPU-a", "61", "350/700"} <= set(row(shown, "0"))
    assert {"default/infer", "MIG-x", mig.resource} <= set(row(shown, "1:3"))
    plain = "\n".join(told(status))
    assert "MIG-x" not in plain
    assert "GPU-a" not in plain


def test_a_missing_gpu_has_a_row():
    shown = told(replace(WELL, missing=(Missing(name="GPU x", why="it is gone", bus_id="0000:99:00.0"),)))
    assert row(shown, "0000:99:00.0")[1] == "missing"


@pytest.mark.parametrize(("severity", "exit_code"), [("critical", 1), ("warning", 1), ("note", 0)])
def test_problems_are_exit_status_1_and_notes_are_not(run, severity, exit_code):
    status = replace(SICK, problems=(replace(PROBLEM, severity=severity),))
    assert run(status).exit_code == exit_code
    assert run(status, "-o", "json").exit_code == exit_code


@pytest.mark.parametrize(("how", "read"), [("--json", json.loads), ("-ojson", json.loads), ("-oyaml", yaml.safe_load)])
def test_structured_output_is_the_status_with_times_for_programs(run, how, read):
    given = read(run(SICK, how).output)
    assert given["gpus"][2]["since"] == "1970-01-02T03:43:40.000Z"
    given["gpus"][2]["since"] = LOST.since
    assert given["gpus"][2]["signals"][0]["name"] == "xid"
    assert given.keys() == msgspec.to_builtins(SICK).keys()


def test_a_daemon_of_another_version_may_have_fewer_fields_and_more(run):
    shown = run({"daemon": {"version": "9", "new": 1}, "gpus": [{"index": 0, "uuid": "GPU-a", "new": {}}], "more": []})
    assert shown.exit_code == 0
    assert row(shown.output.splitlines(), "0")[1] == "healthy"


def test_a_reply_that_is_no_status_is_one_sentence(run):
    shown = run({"done": "well"})
    assert (shown.exit_code, shown.output, len(shown.error.splitlines())) == (3, "", 1)


def test_the_schema_needs_no_daemon(capsys):
    assert main(["status", "--schema", "--state-dir", "/nowhere"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(json_schema()))


def test_it_is_shown_again_with_readings_until_nobody_reads(run, monkeypatch):
    pauses: list[float] = []
    unread = iter([False, False, True])
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(status_module, "reader_left", lambda: next(unread))
    result = run(SICK, "--watch", "500ms")
    assert (result.exit_code, pauses) == (1, [0.5, 0.5])
    assert result.output.count("61 C") == 3
    assert run(SICK, "--watch", "soon").exit_code == 2


def test_it_goes_on_being_shown_over_a_restart_of_the_daemon(monkeypatch, capsys):
    away = control.NoDaemonError("no daemon answers")
    answers = iter([WELL, away, control.ControlError("this daemon waits"), WELL])

    def request(*_, **__):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return msgspec.to_builtins(answer)

    unread = iter([False, False, False, True])
    monkeypatch.setattr(control, "request", request)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(status_module, "reader_left", lambda: next(unread))
    assert main(["status", "--state-dir", "/state", "--watch"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count(WELL.headline) == 2
    assert shown.err.splitlines() == ["no daemon answers", "this daemon waits"]
    answers = iter([away])
    assert main(["status", "--state-dir", "/state", "--watch"]) == 3


def test_colours_are_for_terminals_and_an_order_is_not_red(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in "\n".join(told(SICK))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert "\x1b[31m" in "\n".join(told(SICK))
    held = replace(WELL, gpus=(replace(LOST, state="held-back", held_back=("cordon",)),))
    assert "\x1b[31m" not in "\n".join(told(held))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in "\n".join(told(SICK))


def test_metrics_are_in_prometheus_s_form_and_problems_are_no_failure(run):
    shown = run(SICK, "--metrics")
    assert (shown.exit_code, shown.output.splitlines()) == (0, metrics(SICK))
    assert run(replace(SICK, waiting="another daemon serves /k"), "--metrics").exit_code == 1
