"""Cleanup removes the condition, taint and labels of the Node, or prints the commands that do."""

import json

import pytest

from gpu_plugin.cli import main
from gpu_plugin.cli.uninstall import node_marks, traces
from gpu_plugin.daemon.state_files import FILES as TIDIED
from tests.unit.cluster.api_server import NODE
from tests.unit.cluster.writable_server import WritableServer

TAINT = {"key": "nvidia.com/gpu-unhealthy", "effect": "NoSchedule"}
THEIRS = {"key": "example.com/theirs", "effect": "NoExecute"}


@pytest.fixture
def state(short_path):
    """A state directory with the record of a condition, a taint and labels of the Node."""
    directory = short_path / "s"
    directory.mkdir()
    (directory / "cluster.json").write_text(json.dumps({"condition": True, "taint": True}))
    (directory / "labels.json").write_text(json.dumps({"node": NODE, "labels": {"nvidia.com/gpu.count": "8"}}))
    return directory


@pytest.fixture
def server():
    with WritableServer() as running:
        running.conditions.append({"type": "GPUHealthy", "status": "False"})
        running.taints = [THEIRS, TAINT]
        running.labels["nvidia.com/gpu.count"] = "8"
        running._owned = {"gpu-plugin-condition": {"GPUHealthy"}, "gpu-plugin-labels": {"nvidia.com/gpu.count"}}
        yield running


def cleaned(state, *more):
    below = state.parent
    others = [f"--{name}-dir={below / name}" for name in ("cdi", "device-plugin", "features")]
    return main(["cleanup", f"--state-dir={state}", "--node-name", NODE, *others, *more])


def test_daemon_and_uninstalling_know_the_same_files():
    assert set(TIDIED) < set(traces.FILES)
    assert {"cluster.json", "labels.json"} < set(traces.FILES)


def test_condition_taint_and_labels_are_taken_back_and_the_others_stay(state, server, capsys):
    assert cleaned(state, "--kubeconfig", server.kubeconfig(state.parent)) == 0
    assert not state.exists()
    assert server.condition() is None
    assert server.taints == [THEIRS]
    assert server.labels == {"kubernetes.io/hostname": NODE}
    assert capsys.readouterr().err.count(": taken back\n") == 3


def test_where_there_is_no_right_the_commands_are_said_and_the_node_is_clean_all_the_same(state, server, capsys):
    server.refusals = [(403, {})] * 3
    assert cleaned(state, "--kubeconfig", server.kubeconfig(state.parent)) == 0
    assert not state.exists()
    told = capsys.readouterr().err
    assert f"kubectl taint node {NODE} nvidia.com/gpu-unhealthy-" in told
    assert f"kubectl label node {NODE} nvidia.com/gpu.count-" in told
    assert f"kubectl patch node {NODE} --subresource=status -p" in told


def test_an_api_server_that_is_silent_is_not_waited_for_long(state, server, capsys, monkeypatch):
    monkeypatch.setattr(node_marks, "PATIENCE", 0.2)
    server.silent = True
    assert cleaned(state, "--kubeconfig", server.kubeconfig(state.parent)) == 0
    assert capsys.readouterr().err.count("did not answer within 0.2 s; run: kubectl") == 3


def test_nothing_told_asks_nobody(state, capsys):
    (state / "cluster.json").write_text("{}")
    (state / "labels.json").unlink()
    assert cleaned(state, "--kubeconfig", "/nonexistent") == 0
    assert capsys.readouterr().err == ""
