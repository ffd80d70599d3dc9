"""`gpu-plugin status`: what is shown of the daemon's answer, as text, JSON and metrics."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from gpu_plugin import control
from gpu_plugin.cli import main
from gpu_plugin.cli.status import command, lines
from gpu_plugin.telemetry.metrics import metrics

GPU = "nvidia.com/gpu"
STATUS: dict[str, Any] = {
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
    "resources": {GPU: {"devices": 9, "healthy": 6, "retired": 1, "sharing": []}},
    "health": {
        "gpus": [
            {"index": 0, "uuid": "GPU-0", "state": "healthy", "verdict": "OK", "reasons": []},
            {"index": 1, "uuid": "GPU-1", "state": "healthy", "verdict": "APP", "reasons": ["Xid 31 (page fault)"]},
            {"index": 2, "uuid": "GPU-2", "state": "degraded", "verdict": "DEGRADED", "reasons": ["NVLink 5 is down"]},
            {"index": 3, "uuid": "GPU-3", "state": "unhealthy", "verdict": "FATAL", "reasons": ["Xid 79", "cordoned"]},
        ],
        "supported": {"GPU-0": {"xid": True, "margin": False}},
        "transitions": [{"uuid": "GPU-3", "signal": "xid", "verdict": "FATAL", "total": 2}],
        "xids": [{"uuid": "GPU-1", "xid": 31, "class": "application", "total": 300}],
    },
}


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(control, "request", lambda *_, **__: json.loads(json.dumps(STATUS)))
    return lambda *arguments: CliRunner().invoke(command, ["--state-dir", "/state", *arguments])


def test_text_has_a_line_for_each_gpu_that_is_not_ok(run):
    result = run()
    assert result.exit_code == 0
    assert result.output.splitlines()[-4:] == [
        "nvidia.com/gpu  6 of 9 devices healthy, 1 retired",
        "GPU 1  healthy: Xid 31 (page fault)",
        "GPU 2  degraded: NVLink 5 is down",
        "GPU 3  unhealthy: Xid 79; cordoned",
    ]


def test_one_device_is_one():
    alone = {"devices": 1, "healthy": 1, "retired": 0, "sharing": []}
    shown = lines({**STATUS, "resources": {GPU: alone}})
    assert shown[0] == "configuration  no file, in force since 1970-01-01 00:00:01 UTC"
    assert shown[3] == "nvidia.com/gpu  1 of 1 device healthy"


def test_a_node_that_serves_nothing_says_so():
    assert lines({**STATUS, "resources": {}})[3] == "no resource is served"


def test_the_device_list_strategy_is_told_with_the_reason_of_a_choice():
    assert lines(STATUS)[2] == "strategy       envvar"
    chosen = {"used": ["cdi-cri"], "reason": "auto: the kubelet's package is of version 1.31.2-1.1"}
    told = lines({**STATUS, "device_list_strategy": chosen})[2]
    assert told == "strategy       cdi-cri (auto: the kubelet's package is of version 1.31.2-1.1)"


def test_json_is_what_the_daemon_said(run):
    assert json.loads(run("--json").output) == STATUS


def test_metrics_are_in_prometheus_s_form(run):
    told = run("--metrics").output.splitlines()
    assert [line for line in told if not line.startswith("#")] == [
        'gpu_plugin_config_reloads_total{result="applied"} 2',
        'gpu_plugin_config_reloads_total{result="unchanged"} 0',
        'gpu_plugin_config_reloads_total{result="refused"} 1',
        "gpu_plugin_config_refused 0",
        "gpu_plugin_config_label_unheard 0",
        f'gpu_plugin_devices{{resource="{GPU}",state="healthy"}} 6',
        f'gpu_plugin_devices{{resource="{GPU}",state="unhealthy"}} 2',
        f'gpu_plugin_devices{{resource="{GPU}",state="retired"}} 1',
        *(
            f'gpu_plugin_gpu_health{{uuid="{gpu["uuid"]}",state="{state}"}} {int(gpu["state"] == state)}'
            for gpu in STATUS["health"]["gpus"]
            for state in ("healthy", "degraded", "unhealthy")
        ),
        'gpu_plugin_health_transitions_total{uuid="GPU-3",signal="xid",verdict="fatal"} 2',
        'gpu_plugin_xid_errors_total{uuid="GPU-1",xid="31",class="application"} 300',
        'gpu_plugin_health_signal_supported{uuid="GPU-0",signal="xid"} 1',
        'gpu_plugin_health_signal_supported{uuid="GPU-0",signal="margin"} 0',
    ]


def test_every_family_has_its_help_and_type_once_before_its_samples():
    families = []
    for line in metrics(STATUS):
        if line.startswith("# HELP "):
            families.append(line.split()[2])
        elif line.startswith("# TYPE "):
            assert line.split()[2] == families[-1]
            assert line.split()[3] in ("counter", "gauge")
        else:
            assert line.startswith((f"{families[-1]}{{", f"{families[-1]} "))
    assert len(families) == len(set(families)) == 9


def test_a_configuration_that_is_refused_is_a_failure(monkeypatch, capsys):
    configuration = {"wanted": "/config/h100", "refused": "line 3: did you mean resources?", "file": "/config/a100"}
    refused = {**STATUS, "configuration": {**STATUS["configuration"], **configuration}}
    monkeypatch.setattr(control, "request", lambda *_, **__: refused)
    assert main(["status", "--state-dir", "/state"]) == 1
    told = capsys.readouterr().out
    assert "configuration  /config/a100, in force since" in told
    assert "REFUSED a newer one (/config/h100): line 3" in told
    assert main(["status", "--state-dir", "/state", "--metrics"]) == 1
    assert "gpu_plugin_config_refused 1" in capsys.readouterr().out


def test_a_label_that_is_not_followed_is_told():
    why = "changes of the label example.com/config of node n are not heard: the Kubernetes API answered 403"
    deaf = {**STATUS, "configuration": {**STATUS["configuration"], "unheard": why}}
    assert any(why in line for line in lines(deaf))
    assert "gpu_plugin_config_label_unheard 1" in metrics(deaf)


def test_cdi_specifications_are_told_where_there_are_any():
    assert not [line for line in lines(STATUS) if line.startswith("CDI")]
    written = {**STATUS, "cdi": {"directory": "/var/run/cdi", "devices": 17, "trouble": ""}}
    assert "CDI            17 devices in /var/run/cdi" in lines(written)
    assert "gpu_plugin_cdi_ready 1" in metrics(written)
    refused = {**STATUS, "cdi": {"directory": "/var/run/cdi", "devices": 0, "trouble": "no space left"}}
    assert "CDI            NO DEVICE CAN BE USED: no space left" in lines(refused)
    assert "gpu_plugin_cdi_ready 0" in metrics(refused)
