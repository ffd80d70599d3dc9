"""A DaemonSet is deleted and its nodes are cleaned up, or it is said how many were not."""

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from gpu_plugin.cli import main
from gpu_plugin.cli.uninstall import nodes
from gpu_plugin.cli.uninstall.nodes import CLEANUP, cleanup_daemonset
from tests.unit.cluster.http_server import HttpServer


class Api(HttpServer):
    """An API server for two DaemonSets: the plugin, and the cleanup.

    `statuses` has the statuses of the cleanup for its next readings, and the last status stays. `lingers` is the number of
    readings after which the deleted plugin is gone, and `failures` the number of readings of the cleanup that fail.
    """

    def __init__(self, found, *statuses):
        super().__init__()
        self.namespace = "gpus"
        self.objects = {} if found is None else {"plugin": copy.deepcopy(found)}
        self.statuses = list(statuses)
        self.made = None
        self.requests = []
        self.lingers = 0
        self.failures = 0
        self.forbidden = False

    def respond(self, writer, method, path, query, headers, body):
        self.send(writer, *self._answer(method, path, body))

    def _answer(self, method, path, body):
        name = path.removeprefix(f"/apis/apps/v1/namespaces/{self.namespace}/daemonsets").strip("/")
        self.requests.append((method, name))
        if method == "POST":
            made = json.loads(body)
            name = made["metadata"]["name"]
            if self.forbidden and name.endswith("-cleanup"):
                return 403, {"kind": "Status", "message": "forbidden"}
            if name in self.objects:
                return 409, {"kind": "Status", "message": "already exists"}
            self.made = made
            self.objects[name] = made
            return 201, made
        if name not in self.objects:
            return 404, {"kind": "Status", "message": "not found"}
        if method == "DELETE":
            assert json.loads(body) == {"propagationPolicy": "Foreground"}
            if name == "plugin" and self.lingers:
                self.objects[name]["metadata"]["deletionTimestamp"] = "now"
            else:
                del self.objects[name]
            return 200, {"kind": "Status"}
        if name == "plugin" and "deletionTimestamp" in self.objects[name]["metadata"]:
            self.lingers -= 1
            if self.lingers <= 0:
                return 200, self.objects.pop(name)
        if name.endswith("-cleanup"):
            if self.failures:
                self.failures -= 1
                return 503, {"kind": "Status", "message": "overloaded"}
            self.objects[name]["status"] = self.statuses[0]
            del self.statuses[: len(self.statuses) > 1]
        return 200, self.objects[name]


def status(ready, wanted):
    return {"observedGeneration": 1, "numberReady": ready, "desiredNumberScheduled": wanted}


@pytest.fixture
def uninstall(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(nodes, "POLL_INTERVAL", 0.01)

    def run(api, *more):
        asked = ["--namespace", "gpus", "--daemonset", "plugin", "--kubeconfig", api.kubeconfig(tmp_path)]
        code = main(["uninstall", *asked, *more])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


CLEANING: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "DaemonSet",
    "metadata": {"name": "plugin-cleanup", "namespace": "gpus", "labels": {CLEANUP: "plugin-cleanup"}},
    "spec": {"template": {"spec": {"initContainers": [{"name": "cleanup", "args": ["cleanup", "--wait"]}]}}},
}


def plugin(count, cleaning=CLEANING):
    metadata = {"name": "plugin", "namespace": "gpus", "labels": {"team": "a"}, "uid": "1", "resourceVersion": "2"}
    metadata["annotations"] = {CLEANUP: yaml.safe_dump(cleaning)}
    spec = {"template": {"spec": {"containers": [{"name": "gpu-plugin", "args": ["run"]}]}}}
    return {"metadata": metadata, "spec": spec, "status": status(count, count)}


def test_the_plugin_goes_then_its_traces_then_what_removed_them(uninstall):
    with Api(plugin(2), {}, status(0, 2), status(2, 2)) as api:
        code, out, err = uninstall(api)
    assert (code, err) == (0, "")
    assert [line.removeprefix("DaemonSet gpus/plugin: ") for line in out.splitlines()] == [
        "deleted; cleaning up 2 nodes",
        "2 of 2 nodes are clean",
    ]
    assert api.objects == {}
    assert api.made == CLEANING | {"metadata": {**CLEANING["metadata"], "annotations": {}}, "status": status(2, 2)}
    changes = [each for each in api.requests if each[0] != "GET"]
    assert changes == [("POST", ""), ("DELETE", "plugin"), ("DELETE", "plugin-cleanup")]


HELMS = {"meta.helm.sh/release-name": "plugin", "meta.helm.sh/release-namespace": "gpus"}
APPLIED = {"deprecated.daemonset.template.generation": "1", "kubectl.kubernetes.io/last-applied-configuration": "{}"}


def annotated(annotations):
    found = plugin(1)
    found["metadata"]["annotations"] |= annotations
    return found


@pytest.mark.parametrize("annotations", [
    {},
    APPLIED,
    {"meta.helm.sh/release-name": "plugin"},
    {"meta.helm.sh/release-namespace": "gpus"},
    HELMS | {"meta.helm.sh/release-name": "other"},
    HELMS | {"meta.helm.sh/release-namespace": "other"},
])  # fmt: skip
def test_the_chart_s_job_changes_nothing_unless_its_helm_release_installed_the_daemonset(uninstall, annotations):
    with Api(annotated(annotations), status(1, 1)) as api:
        code, out, err = uninstall(api, "--helm-release", "gpus/plugin")
        assert list(api.objects) == ["plugin"]
        assert {method for method, _ in api.requests} == {"GET"}
    assert (code, err) == (0, "")  # a failed Job would fail the tool that applied it
    assert out.startswith("DaemonSet gpus/plugin: not installed by the Helm release gpus/plugin")


def test_the_chart_s_job_uninstalls_the_daemonset_of_its_helm_release(uninstall):
    with Api(annotated(APPLIED | HELMS), status(1, 1)) as api:
        assert uninstall(api, "--helm-release", "gpus/plugin")[0] == 0
    assert api.objects == {}


def test_the_chart_s_job_goes_on_with_an_attempt_of_its_helm_release_alone(uninstall):
    for annotations, left in ((HELMS, []), (APPLIED, ["plugin-cleanup"])):
        with Api(None, status(1, 1)) as api:
            api.objects["plugin-cleanup"] = cleanup_daemonset(annotated(annotations))
            assert uninstall(api, "--helm-release", "gpus/plugin")[0] == 0
            assert list(api.objects) == left


@pytest.mark.parametrize("release", ["plugin", "gpus/", "/plugin", "gpus/plugin/1", ""])
def test_a_helm_release_without_a_namespace_or_name_is_refused_in_one_line(uninstall, release):
    with Api(annotated(HELMS)) as api:
        code, _, err = uninstall(api, "--helm-release", release)
    assert (code, err.count("\n"), api.requests) == (2, 1, [])
    assert f"--helm-release: {release!r} is not NAMESPACE/NAME" in err


@pytest.mark.parametrize("found", [None, plugin(2)])
def test_the_cleanup_of_an_earlier_attempt_is_used_and_removed(uninstall, found):
    with Api(found, status(0, 2), status(2, 2)) as api:
        api.objects["plugin-cleanup"] = cleanup_daemonset(plugin(2))
        code, out, _ = uninstall(api)
    assert code == 0
    assert "2 of 2 nodes are clean" in out
    assert api.objects == {}


def test_it_returns_once_all_pods_are_gone(uninstall):
    with Api(plugin(1), status(1, 1)) as api:
        api.lingers = 2
        assert uninstall(api)[0] == 0
    assert api.objects == {}


def test_nodes_that_do_not_answer_are_counted_and_keep_nobody_from_uninstalling(uninstall, monkeypatch):
    monkeypatch.setattr(nodes, "END_TIMEOUT", 0.1)
    with Api(plugin(3), status(2, 3)) as api:
        api.lingers = 1000  # the pod stays if its node is down
        code, out, err = uninstall(api, "--timeout", "1s")
    assert code == 0
    assert "2 of 3 nodes are clean" in out
    assert err.startswith("DaemonSet gpus/plugin: 1 of 3 nodes were not cleaned up within 1s: run gpu-plugin cleanup")
    assert "plugin-cleanup" not in api.objects


def test_a_daemonset_that_is_gone_already_is_no_failure(uninstall):
    with Api(None) as api:
        code, out, err = uninstall(api)
    assert (code, err) == (0, "")
    assert out.startswith("DaemonSet gpus/plugin: there is no such DaemonSet: nothing to clean up (")


OTHER_NAME = CLEANING | {"metadata": {**CLEANING["metadata"], "name": "other-cleanup"}}
OTHER_NAMESPACE = CLEANING | {"metadata": {**CLEANING["metadata"], "namespace": "other"}}


@pytest.mark.parametrize("cleaning", [None, {}, [], "no: YAML: at all", OTHER_NAME, OTHER_NAMESPACE])
def test_a_daemonset_without_a_valid_annotation_is_refused_and_not_changed(uninstall, cleaning):
    found = plugin(1, cleaning)
    if cleaning is None:
        del found["metadata"]["annotations"]
    elif isinstance(cleaning, str):
        found["metadata"]["annotations"] = {CLEANUP: cleaning}
    with Api(found) as api:
        code, _, err = uninstall(api)
    assert code == 1
    assert err.startswith("gpu-plugin: DaemonSet gpus/plugin: it has no annotation gpu-plugin/cleanup")
    assert {method for method, _ in api.requests} == {"GET"}


def test_of_two_daemonsets_one_that_is_gone_keeps_the_other_from_nothing(uninstall):
    with Api(plugin(1), status(1, 1)) as api:
        code, out, err = uninstall(api, "--daemonset", "plugin-mps-control-daemon")
    assert (code, err) == (0, "")
    assert "DaemonSet gpus/plugin-mps-control-daemon: there is no such DaemonSet" in out
    assert "DaemonSet gpus/plugin: 1 of 1 node is clean" in out


def test_another_daemonset_of_that_name_is_not_touched(uninstall):
    with Api(plugin(1), status(1, 1)) as api:
        api.objects["plugin-cleanup"] = {"metadata": {"name": "plugin-cleanup", "labels": {}}}
        code, _, err = uninstall(api)
        assert sorted(api.objects) == ["plugin", "plugin-cleanup"]
    assert code == 1
    assert "there is a DaemonSet plugin-cleanup that is not ours" in err


def test_an_attempt_that_is_told_to_stop_puts_the_daemonset_back(tmp_path):
    found = plugin(1) | {"status": status(0, 1)}
    found["metadata"] |= {"resourceVersion": "7", "uid": "8"}
    with Api(found, status(0, 1)) as api:
        api.lingers = 2
        asked = ["--namespace", "gpus", "--daemonset", "plugin", "--kubeconfig", api.kubeconfig(tmp_path)]
        command = [sys.executable, "-m", "gpu_plugin", "uninstall", *asked]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert running.stdout is not None
        assert "cleaning up 1 node" in running.stdout.readline()
        running.terminate()
        out, err = running.communicate(timeout=20)
        assert list(api.objects) == ["plugin"]
        again = api.objects["plugin"]
        kept = ("name", "namespace", "labels", "annotations")
        assert again["metadata"] == {key: found["metadata"][key] for key in kept}
        assert again["spec"] == found["spec"]
        assert "status" not in again
    assert running.returncode == 1
    assert "interrupted: the DaemonSet is restored" in out
    assert "interrupted by a signal" in err


@pytest.mark.parametrize("first", [{}, {"observedGeneration": 0, "numberReady": 9, "desiredNumberScheduled": 9}])
def test_a_status_of_before_the_controller_has_processed_the_daemonset_does_not_count(uninstall, first):
    with Api(
        plugin(1), first, status(0, 1), {"observedGeneration": 1, "desiredNumberScheduled": 1}, status(1, 1)
    ) as api:
        code, out, _ = uninstall(api)
    assert code == 0
    assert [line for line in out.splitlines() if line.endswith("clean")] == [
        "DaemonSet gpus/plugin: 1 of 1 node is clean"
    ]


def test_names_fit_into_a_label():
    assert nodes.cleanup_name("a" * 80) == f"{'a' * 55}-cleanup"
    assert nodes.cleanup_name("a" * 54 + "-b") == f"{'a' * 54}-cleanup"


def test_an_attempt_without_the_rights_leaves_the_daemonset(uninstall):
    with Api(plugin(1), status(1, 1)) as api:
        api.forbidden = True
        code, _, err = uninstall(api)
        assert list(api.objects) == ["plugin"]
    assert code == 1
    assert "403" in err


def test_an_api_server_that_fails_in_between_is_asked_again(uninstall):
    with Api(plugin(1), status(1, 1)) as api:
        api.failures = 1
        code, out, _ = uninstall(api)
    assert code == 0
    assert "asking again: the Kubernetes API answered 503" in out
    assert out.splitlines()[-1] == "DaemonSet gpus/plugin: 1 of 1 node is clean"


def test_what_is_made_goes_with_the_job_that_runs_it(uninstall, monkeypatch):
    monkeypatch.setenv("JOB_NAME", "uninstall")
    monkeypatch.setenv("JOB_UID", "12-34")
    with Api(plugin(1), status(1, 1)) as api:
        assert uninstall(api)[0] == 0
    (owner,) = api.made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", "uninstall", "12-34")
