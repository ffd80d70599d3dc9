"""`gpu-plugin status`: the daemon's answer as text, JSON, YAML and metrics."""

import contextlib
import io
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from gpu_plugin.cli import main
from gpu_plugin.cli import status as status_module
from gpu_plugin.cli.status import lines
from gpu_plugin.runtime import control
from gpu_plugin.telemetry.metrics.families import metrics

GPU = "nvidia.com/gpu"


def gpu(index: int, state: str = "healthy", verdict: str = "OK", *reasons: str, **more: object) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "bus_id": f"0000:1{index}:00.0",
        "model": "NVIDIA H100",
        "state": state,
        "health": "Unhealthy" if state == "unhealthy" else "Healthy",
        "verdict": verdict,
        "reasons": list(reasons),
        "since": 3600.0 if reasons else None,
        "withheld": [],
        "holders": [],
        **more,
    }


STATUS: dict[str, Any] = {
    "daemon": {"version": "1.2.3", "pid": 7, "started": 1.0, "uptime_seconds": 60, "log_lines_dropped": 0},
    "waiting": "",
    "driver": {"version": "580.1", "trouble": ""},
    "kubelet": {
        "socket": "/k/kubelet.sock",
        "directory": "/k",
        "resources": {GPU: {"registered": True, "since": 2.0, "why": "", "endpoint": "/k/ours.sock"}},
    },
    "configuration": {
        "file": "",
        "since": 1.0,
        "wanted": "",
        "refused": "",
        "unheard": "",
        "reloads": {"applied": 2, "unchanged": 0, "refused": 1},
    },
    "device_list_strategy": {"used": ["envvar"], "reason": ""},
    "cdi": None,
    "resources": {
        GPU: {
            "devices": 9,
            "healthy": 6,
            "retired": 1,
            "sharing": [],
            "unhealthy_ids": ["GPU-2", "GPU-3"],
            "retired_ids": ["MIG-1"],
        }
    },
    "health": {
        "gpus": [
            gpu(0, holders=["default/train-0", "default/train-1"]),
            gpu(1, "healthy", "APP", "Xid 31 (page fault)", withheld=["its MPS daemon is down"]),
            gpu(2, "degraded", "DEGRADED", "NVLink 5 is down", holders=["default/train-2"]),
            gpu(3, "unhealthy", "FATAL", "Xid 79", "cordoned"),
        ],
        "supported": {"GPU-0": {"xid": True, "margin": False}},
        "transitions": [{"uuid": "GPU-3", "signal": "xid", "verdict": "FATAL", "total": 2}],
        "xids": [{"uuid": "GPU-1", "xid": 31, "class": "application", "total": 300}],
    },
}
WELL = {**STATUS, "health": {**STATUS["health"], "gpus": STATUS["health"]["gpus"][:3]}}


def told(**changed: object) -> list[str]:
    return list(lines({**STATUS, **changed}, 61.0))


def answering(monkeypatch, status):
    monkeypatch.setattr(control, "request", lambda *_, **__: json.loads(json.dumps(status)))

    def run(*arguments):
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exit_code = main(["status", "--state-dir", "/state", *arguments])
        return SimpleNamespace(exit_code=exit_code, output=shown.getvalue())

    return run


@pytest.fixture
def run(monkeypatch):
    return answering(monkeypatch, STATUS)


def test_text_is_one_glance():
    assert told() == [
        "gpu-plugin     1.2.3, process 7, since 1970-01-01 00:00:01 UTC, for 1 min 0 s",
        "driver         580.1",
        "kubelet        registered at /k/kubelet.sock since 1970-01-01 00:00:02 UTC",
        "configuration  no file, in force since 1970-01-01 00:00:01 UTC",
        "reloads        2 applied, 0 unchanged, 1 refused",
        "strategy       envvar",
        "",
        f"{GPU}: 6 of 8 devices Healthy; Unhealthy: GPU-2, GPU-3; 1 gone, listed until no pod holds them: MIG-1",
        "",
        "GPU  BUS ID        MODEL        STATE              SINCE                    HELD BY",
        "0    0000:10:00.0  NVIDIA H100  Healthy            -                        default/train-0 and 1 more",
        "1    0000:11:00.0  NVIDIA H100  Healthy, withheld  1970-01-01 01:00:00 UTC  -",
        "     Xid 31 (page fault)",
        "     withheld: its MPS daemon is down",
        "     GPU-1",
        "2    0000:12:00.0  NVIDIA H100  Healthy, degraded  1970-01-01 01:00:00 UTC  default/train-2",
        "     NVLink 5 is down",
        "     GPU-2",
        "3    0000:13:00.0  NVIDIA H100  Unhealthy          1970-01-01 01:00:00 UTC  -",
        "     Xid 79",
        "     cordoned",
        "     GPU-3",
    ]


def test_text_fits_the_terminal():
    shown = list(lines(STATUS, 61.0, 60))
    assert max(map(len, shown)) <= 60
    assert "0    0000:10:00.0  NV...  Healthy            -       2 pods" in shown
    narrow = list(lines(STATUS, 61.0, 46))
    assert any("Healthy, degraded" in line for line in narrow)
    assert f"{GPU}: 6 of 8 devices Healthy; Unhealthy: GPU-2,\n  GPU-3; 1 gone" in "\n".join(shown)


def test_one_device_is_one_and_many_ids_are_counted():
    alone = {"devices": 1, "healthy": 1, "retired": 0, "sharing": ["mps"], "unhealthy_ids": [], "retired_ids": []}
    assert f"{GPU}: 1 of 1 device Healthy, shared by mps" in told(resources={GPU: alone})
    many = {**alone, "devices": 9, "healthy": 2, "sharing": [], "unhealthy_ids": ["a", "b"]}
    assert f"{GPU}: 2 of 9 devices Healthy; Unhealthy: a, b and 5 more" in told(resources={GPU: many})
    assert "no resource is served" in told(resources={})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"waiting": "another daemon serves /k"}, "WAITING: another daemon serves /k"),
        ({"driver": {"version": "", "trouble": "not loaded"}}, "not loaded"),
        ({"driver": {"version": "580.1", "trouble": "", "restart": "restart it"}}, "restart it"),
        ({"configuration": {**STATUS["configuration"], "refused": "line 3"}}, "REFUSED: line 3"),
        ({"configuration": {**STATUS["configuration"], "unheard": "403"}}, "NOT WATCHED: 403"),
        (
            {"kubelet": {**STATUS["kubelet"], "resources": {GPU: {"registered": False, "since": 9.0, "why": "gone"}}}},
            f"NOT REGISTERED: {GPU}: gone (lost 1970-01-01 00:00:09 UTC)",
        ),
        (
            {"cdi": {"directory": "/var/run/cdi", "devices": 0, "trouble": "no space left"}},
            "NO DEVICE CAN BE USED: no space left",
        ),
        (
            {
                "cluster": {
                    "node": "node-a",
                    "cordoned": ["GPU-a"],
                    "trouble": ["Kubernetes Events are not written: 403"],
                }
            },
            "Kubernetes Events are not written: 403",
        ),
    ],
)
def test_what_is_wrong_is_said_and_is_exit_status_1(monkeypatch, changed, words):
    assert answering(monkeypatch, WELL)().exit_code == 0
    wrong = answering(monkeypatch, {**WELL, **changed})()
    assert (wrong.exit_code, words in wrong.output) == (1, True)
    assert answering(monkeypatch, {**WELL, **changed})("-o", "json").exit_code == 1


def test_what_is_wanted_is_beside_what_is_in_force():
    configuration = {**STATUS["configuration"], "file": "/c/old.yaml", "wanted": "/c/new.yaml", "refused": "line 3"}
    shown = told(configuration=configuration)
    at = shown.index("configuration  /c/old.yaml, in force since 1970-01-01 00:00:01 UTC")
    assert shown[at + 1 : at + 3] == ["               WANTED: /c/new.yaml", "               REFUSED: line 3"]


def test_a_kubelet_that_is_not_to_be_told_is_nothing_wrong(monkeypatch):
    kubelet = {**STATUS["kubelet"], "socket": "", "resources": {GPU: {"registered": False, "since": None, "why": "x"}}}
    shown = answering(monkeypatch, {**WELL, "kubelet": kubelet})()
    assert shown.exit_code == 0
    assert "kubelet        nothing is registered, because --kubelet-socket" in shown.output


def test_pods_that_are_not_known_are_not_none(monkeypatch):
    shown = told(health={**STATUS["health"], "gpus": [gpu(0, holders=None)]})
    assert shown[-3].endswith("  ?")
    assert "does not report the devices of pods" in shown[-1]


def test_the_device_list_strategy_is_told_with_the_reason_of_a_choice():
    chosen = {"used": ["cdi-cri"], "reason": "auto: the kubelet's package is of version 1.31.2-1.1"}
    words = "strategy       cdi-cri (auto: the kubelet's package is of version 1.31.2-1.1)"
    assert words in told(device_list_strategy=chosen)


@pytest.mark.parametrize(("how", "read"), [("--json", json.loads), ("-ojson", json.loads), ("-oyaml", yaml.safe_load)])
def test_structured_output_has_all_of_it_with_times_for_programs(run, how, read):
    given = read(run(how).output)
    assert given["daemon"]["started"] == "1970-01-01T00:00:01.000Z"
    assert given["health"]["gpus"][3]["since"] == "1970-01-01T01:00:00.000Z"
    assert given["health"]["gpus"][0]["holders"] == ["default/train-0", "default/train-1"]
    assert given["wrong"] == ["GPU 3 is Unhealthy"]
    assert given.keys() == {*STATUS, "wrong"}


def test_it_is_shown_again_until_nobody_reads(run, monkeypatch):
    pauses: list[float] = []
    unread = iter([False, False, True])
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(status_module, "reader_left", lambda: next(unread))
    result = run("--watch", "500ms")
    assert (result.exit_code, pauses) == (1, [0.5, 0.5])
    assert result.output.count("gpu-plugin     1.2.3") == 3
    assert run("--watch", "soon").exit_code == 2


def test_it_goes_on_being_shown_over_a_restart_of_the_daemon(monkeypatch, capsys):
    away = control.NoDaemonError("no daemon answers")
    answers = iter([WELL, away, control.ControlError("this daemon waits"), WELL])

    def request(*_, **__):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return json.loads(json.dumps(answer))

    unread = iter([False, False, False, True])
    monkeypatch.setattr(control, "request", request)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(status_module, "reader_left", lambda: next(unread))
    assert main(["status", "--state-dir", "/state", "--watch"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("gpu-plugin     1.2.3") == 2
    assert shown.err.splitlines() == ["no daemon answers", "this daemon waits"]
    answers = iter([away])
    assert main(["status", "--state-dir", "/state", "--watch"]) == 3


def test_colours_are_for_terminals(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in "\n".join(told())
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert "\x1b[31m" in "\n".join(told())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in "\n".join(told())


def test_metrics_are_in_prometheus_s_form(run):
    shown = run("--metrics").output.splitlines()
    assert shown == metrics(json.loads(json.dumps(STATUS)))
    assert f'gpu_plugin_devices{{resource="{GPU}",state="unhealthy"}} 2' in shown
    assert 'gpu_plugin_gpu_health{uuid="GPU-3",index="3",state="unhealthy"} 1' in shown


def test_metrics_say_what_is_wrong_and_are_no_failure(run, monkeypatch):
    assert run("--metrics").exit_code == 0
    refused = {**STATUS, "configuration": {**STATUS["configuration"], "refused": "line 3: did you mean resources?"}}
    monkeypatch.setattr(control, "request", lambda *_, **__: refused)
    assert main(["status", "--state-dir", "/state", "--metrics"]) == 0
    assert "gpu_plugin_config_refused 1" in metrics(refused)
    away = {GPU: {"registered": False, "since": None, "why": "no kubelet", "endpoint": ""}}
    lost = metrics({**STATUS, "kubelet": {**STATUS["kubelet"], "resources": away}})
    assert f'gpu_plugin_registered{{resource="{GPU}"}} 0' in lost


def test_cdi_specifications_are_told_where_there_are_any():
    assert not [line for line in told() if line.startswith("CDI")]
    written = {"directory": "/var/run/cdi", "devices": 17, "trouble": ""}
    assert "CDI            17 devices in /var/run/cdi" in told(cdi=written)
    assert "gpu_plugin_cdi_ready 1" in metrics({**STATUS, "cdi": written})
    assert "gpu_plugin_cdi_ready 0" in metrics({**STATUS, "cdi": {**written, "trouble": "no space left"}})
    lines = told(cdi={**written, "complaints": ["/tmp/nvidia-mps is left out: it is a link"]})
    assert "CDI            17 devices in /var/run/cdi" in lines
    assert any("/tmp/nvidia-mps is left out: it is a link" in line for line in lines)


def test_every_fault_of_a_configuration_is_shown(monkeypatch):
    configuration = {**WELL["configuration"], "refused": "a: no; and 1 more", "faults": ["a: no", "b: no"]}
    shown = answering(monkeypatch, {**WELL, "configuration": configuration})
    text = shown().output
    assert "REFUSED: a: no\n" in text
    assert "REFUSED: b: no\n" in text
    assert json.loads(shown("-o", "json").output)["wrong"] == ["configuration: a: no", "configuration: b: no"]
