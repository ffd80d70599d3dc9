"""The daemon's reports to the API server, and its reads of the Node, with the rights in docs/security.md."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.node_api import NodeApi

from .harness.api import Object
from .harness.cluster import NODE_PATH, Cluster
from .harness.control_plane import PLUGIN_USER, RBAC
from .harness.layout import NODE
from .harness.plugin import GPUS, RESOURCE
from .harness.wait import NotYet, expect, stays, wait_until

TAINT = "nvidia.com/gpu-unhealthy"
CORDON = "nvidia.com/gpu-plugin.cordon"
SICK = 3
SECURITY = Path(__file__).parents[2] / "docs" / "security.md"
FALLEN = "--xid=79"

Rule = Mapping[str, Sequence[str]]


def in_a_thread(run: Callable[..., Any], *args: Any, **more: Any) -> None:
    """Run an event loop in a new thread, since the test's thread may already have an event loop."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run, *args, **more).result()


def rule(resource: str, *verbs: str) -> Rule:
    return {"apiGroups": [""], "resources": [resource], "verbs": list(verbs)}


GET, PATCH = rule("nodes", "get"), rule("nodes", "get", "patch")
STATUS = rule("nodes/status", "patch")
EVENTS = rule("events", "create", "patch")
PODS = rule("pods", "get")
FOLLOW = rule("nodes", "get", "watch")


@contextmanager
def granted(cluster: Cluster, *rules: Rule, namespace: str = "", to: Rule | None = None) -> Iterator[None]:
    """Grant the daemon's user (or `to`) these rights. Its only other right is to read its own node."""
    scope, kind = (f"namespaces/{namespace}/", "Role") if namespace else ("", "ClusterRole")
    plural = kind.lower() + "s"
    name = "reporting"
    group = "rbac.authorization.k8s.io"
    cluster.api.create(f"{RBAC}/{scope}{plural}", {"metadata": {"name": name}, "rules": [dict(each) for each in rules]})
    cluster.api.create(
        f"{RBAC}/{scope}{kind.lower()}bindings",
        {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": kind, "name": name},
            "subjects": [dict(to) if to is not None else {"apiGroup": group, "kind": "User", "name": PLUGIN_USER}],
        },
    )
    try:
        yield
    finally:
        cluster.api.delete(f"{RBAC}/{scope}{kind.lower()}bindings/{name}", grace=0)
        cluster.api.delete(f"{RBAC}/{scope}{plural}/{name}", grace=0)


@pytest.fixture(autouse=True)
def _nothing_left(cluster: Cluster) -> Iterator[None]:
    """Remove the test's condition from the Node after the test: the daemon may end before it can do so."""
    yield
    content = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "status": {"conditions": []}}
    applied = f"{NODE_PATH}/status?fieldManager=gpu-plugin-condition&force=true"
    cluster.api.raw("PATCH", applied, content, "application/apply-patch+yaml")


def begin(cluster: Cluster, flags: str) -> None:
    """Restart the daemon with these flags in its config file."""
    cluster.plugin.extra = (f"--node-name={NODE}", f"--kubeconfig={cluster.plugin_kubeconfig}")
    cluster.plugin.config = f"version: v1\nflags: {{{flags}}}\n"
    cluster.plugin.restart()
    cluster.wait_offers({RESOURCE: GPUS})


def node(cluster: Cluster) -> Object:
    return cluster.api.get(NODE_PATH)


def condition(cluster: Cluster) -> dict[str, Any]:
    return next((each for each in node(cluster)["status"]["conditions"] if each["type"] == "GPUHealthy"), {})


def wait_condition(cluster: Cluster, status: str | None, reason: str | None = None) -> dict[str, Any]:
    def there() -> dict[str, Any]:
        found = condition(cluster)
        expect(holds=(found.get("status"), found.get("reason")) == (status, reason), seen=found)
        return found

    return wait_until(there, f"GPUHealthy is {status}, {reason}", within=30)


def taints(cluster: Cluster) -> list[dict[str, Any]]:
    return list(node(cluster)["spec"].get("taints", []))


def events(cluster: Cluster, kind: str, name: str) -> list[Object]:
    found = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    return [
        event
        for event in found
        if event["source"].get("component") == "gpu-plugin"
        and (event["involvedObject"]["kind"], event["involvedObject"]["name"]) == (kind, name)
    ]


def wait_event(cluster: Cluster, kind: str, name: str, reason: str) -> Object:
    def there() -> Object:
        found = events(cluster, kind, name)
        expect(holds=any(event["reason"] == reason for event in found), seen=[event["reason"] for event in found])
        return next(event for event in found if event["reason"] == reason)

    return wait_until(there, f"{kind} {name} has an Event {reason}", within=30)


def described(cluster: Cluster, kind: str, name: str) -> str:
    command = [str(cluster.kubectl), f"--kubeconfig={cluster.admin_kubeconfig}", "describe", kind, name]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_condition_follows_the_gpus_over_restarts_and_goes_when_it_is_switched_off(cluster: Cluster) -> None:
    with granted(cluster, GET, STATUS):
        begin(cluster, "nodeCondition: true")
        sound = wait_condition(cluster, "True", "AllGPUsHealthy")
        cluster.plugin.fault(SICK, FALLEN)
        wait_condition(cluster, "False", "GPUUnhealthy")

        def in_full() -> dict[str, Any]:
            found = condition(cluster)
            expect(holds="the driver asks for" in found["message"], seen=found)
            return found

        sick = wait_until(in_full, "both causes are told", within=5)
        assert f"1 of {GPUS} GPUs is Unhealthy: GPU {SICK} (" in sick["message"]
        assert "Xid 79" in sick["message"]
        cluster.plugin.restart()

        cluster.wait_offers({RESOURCE: GPUS - 1})
        stays(lambda: expect(holds=condition(cluster) == sick, seen=condition(cluster)), "no news", seconds=12)
        ready = next(each for each in node(cluster)["status"]["conditions"] if each["type"] == "Ready")
        assert ready["status"] == "True", "the kubelet's own are left alone"
        cluster.plugin.heal(SICK)
        healed = wait_condition(cluster, "True", "AllGPUsHealthy")
        times = [datetime.fromisoformat(each["lastTransitionTime"]) for each in (sound, sick, healed)]
        assert times == sorted(times)
        assert times[1] < times[2]
        cluster.plugin.rewrite("version: v1\n")
        wait_condition(cluster, None)


def test_a_condition_that_is_left_over_is_removed_by_hand(cluster: Cluster) -> None:
    with granted(cluster, GET, STATUS):
        begin(cluster, "nodeCondition: true")
        wait_condition(cluster, "True", "AllGPUsHealthy")
        cluster.plugin.stop()
        patch = json.dumps({"status": {"conditions": [{"$patch": "delete", "type": "GPUHealthy"}]}})
        kubectl = [str(cluster.kubectl), f"--kubeconfig={cluster.admin_kubeconfig}"]
        subprocess.run([*kubectl, "patch", "node", NODE, "--subresource=status", "-p", patch], check=True)
        assert condition(cluster) == {}


def test_the_taint_comes_and_goes_and_leaves_those_of_others_alone(cluster: Cluster) -> None:
    others = {"key": "example.com/theirs", "value": "v", "effect": "PreferNoSchedule"}
    cluster.api.patch(NODE_PATH, {"spec": {"taints": [others]}})
    try:
        with granted(cluster, PATCH):
            begin(cluster, "nodeTaint: NoSchedule")
            cluster.plugin.fault(SICK, FALLEN)
            ours = {"key": TAINT, "effect": "NoSchedule"}

            def tainted() -> None:
                expect(holds=taints(cluster) == [others, ours], seen=taints(cluster))

            wait_until(tainted, "the node is tainted", within=30)
            cluster.plugin.rewrite("version: v1\nflags: {nodeTaint: NoExecute}\n")

            def changed() -> None:
                expect(holds=taints(cluster)[-1].get("effect") == "NoExecute", seen=taints(cluster))

            wait_until(changed, "the taint has the other effect", within=30)
            assert len(taints(cluster)) == 2
            cluster.plugin.rewrite("version: v1\n")

            def gone() -> None:
                expect(holds=taints(cluster) == [others], seen=taints(cluster))

            wait_until(gone, "our taint is gone, and theirs is not", within=30)
    finally:
        cluster.api.patch(NODE_PATH, {"spec": {"taints": None}})


def test_a_taint_that_was_left_is_removed_by_the_next_daemon(cluster: Cluster) -> None:
    with granted(cluster, PATCH):
        begin(cluster, "nodeTaint: NoSchedule")
        cluster.plugin.fault(SICK, FALLEN)
        wait_until(lambda: expect(holds=bool(taints(cluster)), seen=taints(cluster)), "the node is tainted", within=30)
        cluster.plugin.kill()
        cluster.plugin.config = "version: v1\n"
        cluster.plugin.start()
        wait_until(lambda: expect(holds=not taints(cluster), seen=taints(cluster)), "the taint is gone", within=30)


def test_events_tell_the_node_and_its_pods_and_a_restart_repeats_none(cluster: Cluster) -> None:
    with granted(cluster, EVENTS, PODS):
        begin(cluster, "nodeEvents: true, podEvents: true")
        pod = cluster.pods.run("tenant", gpus=1)
        (number,) = cluster.pods.gpu_numbers(pod)
        cluster.plugin.fault(number, FALLEN)
        event = wait_event(cluster, "Node", NODE, "GPUUnhealthy")
        assert event["type"] == "Warning"
        assert f"GPU {number} (" in event["message"]
        assert "Xid 79" in event["message"]
        assert "What to do: " in event["message"]
        assert event["message"].splitlines() == [event["message"]]
        of_pod = wait_event(cluster, "Pod", "tenant", "GPUUnhealthy")
        assert "What to do" not in of_pod["message"]
        assert "GPUUnhealthy" in described(cluster, "node", NODE)
        assert "GPUUnhealthy" in described(cluster, "pod", "tenant")
        before = {each["metadata"]["name"]: each["count"] for each in events(cluster, "Node", NODE)}
        cluster.plugin.restart()

        def the_same() -> None:
            now = {each["metadata"]["name"]: each["count"] for each in events(cluster, "Node", NODE)}
            expect(holds=now == before, seen=now)

        stays(the_same, "a restart repeats nothing", seconds=5)
        cluster.plugin.heal(number)
        assert wait_event(cluster, "Node", NODE, "GPUHealthy")["type"] == "Normal"


def test_what_could_not_be_written_is_written_once_the_api_server_is_back(cluster: Cluster) -> None:
    with granted(cluster, GET, STATUS, EVENTS):
        begin(cluster, "nodeEvents: true, nodeCondition: true")
        wait_condition(cluster, "True", "AllGPUsHealthy")
        already = {event["metadata"]["name"] for event in events(cluster, "Node", NODE)}
        cluster.apiserver.kill()
        try:
            cluster.plugin.fault(SICK, FALLEN)

            def complains() -> None:
                report = cluster.plugin.status()["cluster"]
                expect(holds=len(report["trouble"]) == 2 and report["events"]["waiting"] > 0, seen=report)

            wait_until(complains, "status says what is not written", within=30)
        finally:
            cluster.start_apiserver()
        wait_condition(cluster, "False", "GPUUnhealthy")

        def written() -> None:
            found = [each for each in events(cluster, "Node", NODE) if each["metadata"]["name"] not in already]
            expect(holds={each["reason"] for each in found} == {"GPUUnhealthy"}, seen=found)
            assert all(each["count"] == 1 for each in found)

        wait_until(written, "the Events are there, once", within=60)


def test_without_rights_it_is_said_once_and_gpus_are_served(cluster: Cluster) -> None:
    log_begins = cluster.plugin.log_size()
    begin(cluster, "nodeEvents: true, nodeCondition: true, nodeTaint: NoSchedule")
    cluster.plugin.fault(SICK, FALLEN)
    cluster.wait_offers({RESOURCE: GPUS - 1})
    node = r"/api/v1/nodes/[^/\s]+"
    refused = ("POST /[^ ]+/events", f"PATCH {node}/status", rf"(GET|PATCH) {node}(?!\S*/)")

    def logged() -> None:
        log = cluster.plugin.log_since(log_begins)
        expect(holds=all(re.search(request, log) for request in refused), seen=log[-2000:])

    wait_until(logged, "the log lists the missing rights", within=30)
    warnings = [
        line
        for line in cluster.plugin.log_since(log_begins).splitlines()
        if "cannot be written" in line and "WARNING" in line.upper()
    ]
    for request in refused:
        assert sum(re.search(f"allows {request}", line) is not None for line in warnings) == 1, warnings


def test_the_annotation_cordons_through_restarts_and_without_an_api_server(cluster: Cluster) -> None:
    def annotate(value: str | None) -> None:
        cluster.api.patch(NODE_PATH, {"metadata": {"annotations": {CORDON: value}}})

    try:
        begin(cluster, "cordonAnnotation: true")
        uuid = cluster.plugin.explain(5)["uuid"]
        annotate(f"{SICK}, {uuid}, 77")
        cluster.wait_offers({RESOURCE: GPUS - 2})
        assert any("77 is not a GPU of this node" in each for each in cluster.plugin.status()["cluster"]["trouble"])
        cluster.plugin.operate("cordon", 5)
        cluster.apiserver.kill()
        try:
            cluster.plugin.restart()
        finally:
            cluster.start_apiserver()
        cluster.wait_offers({RESOURCE: GPUS - 2})
        annotate(str(SICK))

        def the_operators_own_stands() -> None:
            names = [signal["name"] for signal in cluster.plugin.explain(5)["signals"]]
            expect(holds=names == ["cordon"], seen=names)

        wait_until(the_operators_own_stands, "the annotation's cordon is lifted and the operator's is not", within=60)
        cluster.plugin.operate("uncordon", 5)
        cluster.wait_offers({RESOURCE: GPUS - 1})
        cluster.plugin.rewrite("version: v1\n")
        cluster.wait_offers({RESOURCE: GPUS})
    finally:
        annotate(None)


def test_labels_are_applied_beside_those_of_others_and_to_no_node_that_is_not_there(cluster: Cluster) -> None:
    async def apply(api: NodeApi, labels: dict[str, str]) -> None:
        await api.apply_labels(labels)

    def ours() -> dict[str, str]:
        return {
            key: value for key, value in node(cluster)["metadata"]["labels"].items() if key.startswith("nvidia.com/")
        }

    with granted(cluster, PATCH):
        api = NodeApi(NODE, str(cluster.plugin_kubeconfig))
        before = node(cluster)["metadata"]["labels"]
        in_a_thread(anyio.run, apply, api, {"nvidia.com/gpu.count": "8", "nvidia.com/gpu.family": "hopper"})
        assert ours() == {"nvidia.com/gpu.count": "8", "nvidia.com/gpu.family": "hopper"}
        in_a_thread(anyio.run, apply, api, {"nvidia.com/gpu.count": "4"})
        assert ours() == {"nvidia.com/gpu.count": "4"}
        in_a_thread(anyio.run, apply, api, {})
        assert node(cluster)["metadata"]["labels"] == before
        with pytest.raises(Exception, match="not found"):
            in_a_thread(
                anyio.run, apply, NodeApi("nobody", str(cluster.plugin_kubeconfig)), {"nvidia.com/gpu.count": "8"}
            )
        assert not cluster.api.exists("/api/v1/nodes/nobody")


def test_the_policy_of_the_security_page_keeps_a_pod_to_its_own_node(cluster: Cluster, tmp_path: Path) -> None:
    text = SECURITY.read_text()
    (fenced,) = [
        block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "ValidatingAdmissionPolicy" in block
    ]
    account = "system:serviceaccount:default:default"
    documents = list(yaml.safe_load_all(fenced.replace("system:serviceaccount:gpu-plugin:gpu-plugin", account)))
    pod = cluster.pods.run("reporter", gpus=1)
    bound = {"boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": pod.name, "uid": pod.uid}}
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": bound}
    token = cluster.api.create("/api/v1/namespaces/default/serviceaccounts/default/token", request)["status"]["token"]
    kubeconfig = json.loads(cluster.plugin_kubeconfig.read_text())
    kubeconfig["users"][0]["user"] = {"token": token}
    (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig))

    def label(name: str, value: str) -> None:
        in_a_thread(anyio.run, NodeApi(name, str(tmp_path / "kubeconfig")).apply_labels, {"example.com/try": value})

    def refused() -> None:
        try:
            label("another", "by-us")
        except UnreachableError as error:
            expect(holds="changes its own node only" in str(error), seen=error)
        else:
            raise NotYet("the policy is not applied yet")

    admission = "/apis/admissionregistration.k8s.io/v1"
    plurals = {
        "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
        "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
    }
    cluster.api.create("/api/v1/nodes", {"metadata": {"name": "another"}})
    try:
        for document in documents:
            cluster.api.create(f"{admission}/{plurals[document['kind']]}", document)
        with granted(cluster, PATCH, to={"kind": "ServiceAccount", "name": "default", "namespace": "default"}):
            wait_until(refused, "the policy refuses another node", within=30, every=0.5)
            label(NODE, "by-us")
            assert node(cluster)["metadata"]["labels"]["example.com/try"] == "by-us"
    finally:
        for document in documents:
            cluster.api.delete(f"{admission}/{plurals[document['kind']]}/{document['metadata']['name']}", grace=0)
        cluster.api.delete("/api/v1/nodes/another", grace=0)
        cluster.api.patch(NODE_PATH, {"metadata": {"labels": {"example.com/try": None}}})
