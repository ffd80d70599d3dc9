"""The DaemonSet's nodes are cleaned up, or it is said how many were not."""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from gpu_plugin.cli import main
from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.daemonset import DaemonSet
from gpu_plugin.uninstall.nodes import clean
from tests.unit.uninstall.test_template import daemonset


class Api:
    """As much of an API server as one DaemonSet needs; `after_patch` are the statuses that follow, the last one for good."""

    def __init__(self, found, *after_patch):
        self.found = copy.deepcopy(found)
        self.after_patch = list(after_patch)
        self.patched = None
        self.failures = 0

    def __enter__(self):
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer()

            def do_PATCH(self):
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                api.patched = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.found["metadata"]["generation"] += 1
                self.answer()

            def answer(self):
                if self.path != "/apis/apps/v1/namespaces/gpus/daemonsets/plugin" or api.found is None:
                    return self.send(404, {"kind": "Status", "message": "not found"})
                if api.patched is not None and self.command == "GET":
                    if api.failures:
                        api.failures -= 1
                        return self.send(503, {"kind": "Status", "message": "overloaded"})
                    if api.after_patch:
                        api.found["status"] = api.after_patch[0]
                        del api.after_patch[: len(api.after_patch) > 1]
                return self.send(200, api.found)

            def send(self, code, content):
                body = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                """Tests need no access log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def kubeconfig(self, directory):
        path = directory / "kubeconfig"
        server = {"server": f"http://127.0.0.1:{self._server.server_port}", "insecure-skip-tls-verify": True}
        content = {
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": server}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "users": [{"name": "me", "user": {"token": "t"}}],
        }
        path.write_text(json.dumps(content))
        return str(path)


def status(ready, wanted, generation=4):
    counts = {"numberReady": ready, "updatedNumberScheduled": ready, "desiredNumberScheduled": wanted}
    return {"observedGeneration": generation, **counts}


@pytest.fixture
def uninstall(tmp_path, capsys):
    def run(api, *more):
        arguments = [
            "uninstall",
            "--namespace",
            "gpus",
            "--daemonset",
            "plugin",
            "--kubeconfig",
            api.kubeconfig(tmp_path),
        ]
        code = main([*arguments, *more])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_it_waits_until_every_node_is_clean(uninstall):
    before = daemonset() | {"status": status(2, 2, 3)}
    with Api(before, status(2, 2, 3), status(2, 2)) as api:
        code, out, err = uninstall(api)
        assert api.patched["spec"]["template"]["spec"]["initContainers"][0]["name"] == "cleanup"
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "DaemonSet gpus/plugin: cleaning up 2 nodes",
        "DaemonSet gpus/plugin: 2 of 2 nodes are clean",
    ]


def test_nodes_that_do_not_answer_are_counted_and_keep_nobody_from_uninstalling(uninstall):
    with Api(daemonset() | {"status": status(2, 3, 3)}, status(2, 3)) as api:
        code, out, err = uninstall(api, "--timeout", "1s")
    assert code == 0
    assert "2 of 3 nodes are clean" in out
    assert err.startswith("DaemonSet gpus/plugin: 1 of 3 nodes were not cleaned up within 1s: run gpu-plugin cleanup")


def test_a_daemonset_that_is_gone_already_is_no_failure(uninstall):
    with Api(None) as api:
        assert uninstall(api) == (0, "DaemonSet gpus/plugin: there is no such DaemonSet: nothing to clean up\n", "")


def test_a_foreign_daemonset_is_refused_and_not_changed(uninstall):
    with Api(daemonset(args=["other"])) as api:
        code, _, err = uninstall(api)
        assert api.patched is None
    assert code == 1
    assert err.startswith("gpu-plugin: DaemonSet gpus/plugin: none of its containers has the argument run or mps")


def test_of_two_daemonsets_one_that_fails_keeps_the_other_from_nothing(uninstall):
    with Api(daemonset() | {"status": status(1, 1, 3)}, status(1, 1)) as api:
        code, out, err = uninstall(api, "--daemonset", "plugin-mps-control-daemon", "--daemonset", "plugin")
    assert (code, err) == (0, "")
    assert "DaemonSet gpus/plugin-mps-control-daemon: there is no such DaemonSet" in out
    assert "DaemonSet gpus/plugin: 1 of 1 node is clean" in out


def test_an_api_server_that_fails_in_between_is_asked_again(uninstall):
    with Api(daemonset() | {"status": status(0, 1, 3)}, status(1, 1)) as api:
        api.failures = 1
        code, out, _ = uninstall(api)
    assert code == 0
    assert "asking again: the Kubernetes API answered 503" in out
    assert "1 of 1 node are clean" not in out
    assert out.splitlines()[-1] == "DaemonSet gpus/plugin: 1 of 1 node is clean"


def test_a_duration_that_is_none_is_refused_in_one_line(uninstall):
    with Api(None) as api:
        code, _, err = uninstall(api, "--timeout", "soon")
    assert (code, err.count("\n")) == (2, 1)
    assert "--timeout: 'soon' is not a duration" in err


async def test_a_daemonset_that_cannot_be_read_is_said_at_once():
    class Refusing(DaemonSet):
        async def read(self):
            raise UnreachableError("403", "forbidden")

    async with httpx2.AsyncClient() as client:
        with pytest.raises(UnreachableError):
            await clean(Refusing(client, "gpus", "plugin"), 1.0, print)
