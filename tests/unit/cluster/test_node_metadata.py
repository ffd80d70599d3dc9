"""The label of the Node, with an API that answers, fails or is absent."""

import importlib.util
import json
import socket
import threading
import time
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from gpu_plugin.cluster import connection, node_metadata
from gpu_plugin.cluster.connection import UnreachableError, connect, require_client
from gpu_plugin.cluster.node_metadata import NodeMetadata
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.runtime.backoff import Backoff
from tests.unit.cluster.api_server import LABEL, NODE
from tests.unit.waiting import until


class Told:
    """The values of a label or an annotation that a reader has seen."""

    def __init__(self, node, kind="labels", name=LABEL):
        self.values = []
        self._node, self._kind, self._name = node, kind, name
        self._event = anyio.Event()

    async def follow(self):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._node.run)
            while True:
                if self._node.labels is not None:
                    self._note(getattr(self._node, self._kind).get(self._name))
                await self._node.changed.wait()

    def _note(self, value):
        if self.values[-1:] != [value]:
            self.values.append(value)
            event, self._event = self._event, anyio.Event()
            event.set()

    async def until(self, *values):
        with anyio.fail_after(10):
            while self.values != list(values):
                await self._event.wait()


@asynccontextmanager
async def following(kubeconfig):
    told = Told(NodeMetadata(NODE, kubeconfig))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(told.follow)
        yield told
        tasks.cancel_scope.cancel()


@pytest.fixture
def kubeconfig(api, tmp_path, monkeypatch):
    monkeypatch.setattr(node_metadata, "FIRST_PAUSE", 0.01)
    return api.kubeconfig(tmp_path)


async def test_a_watch_uses_tcp_keep_alive(api, kubeconfig, monkeypatch):
    seen = []

    def noted(response):
        connection.keep_alive(response)
        stream = response.extensions["network_stream"].get_extra_info("socket")
        seen.append(stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        seen.extend(stream.getsockopt(socket.IPPROTO_TCP, option) for option, _ in connection._KEEPALIVE)

    monkeypatch.setattr(node_metadata, "keep_alive", noted)
    async with following(kubeconfig):
        await api.until(lambda: api.watchers)
        await until(lambda: seen)
    assert seen == [1, 15, 5, 3]


async def test_the_value_and_each_change_are_passed_on(api, kubeconfig):
    api.label("a100")
    async with following(kubeconfig) as told:
        await told.until("a100")
        await api.until(lambda: api.watchers)
        began = time.monotonic()
        for number, value in enumerate(("h100", None, "b200")):
            api.label(value)
            await told.until("a100", *("h100", None, "b200")[: number + 1])
        assert time.monotonic() - began < 5  # milliseconds; without the watch it would be minutes
    assert api.verbs() == ["get", "watch"]


async def test_only_metadata_of_the_own_node_is_requested(api, kubeconfig):
    async with following(kubeconfig) as told:
        await told.until(None)
        await api.until(lambda: api.watchers)
    (_, asked, headers), (_, watched, more_headers) = api.requests
    assert asked == {}  # the Node by its name
    assert watched["fieldSelector"] == f"metadata.name={NODE}"
    assert watched["resourceVersion"] == str(api.version)
    assert watched["allowWatchBookmarks"] == "true"
    assert 300 <= int(watched["timeoutSeconds"]) <= 600
    assert "as=PartialObjectMetadata;" in headers["accept"]
    assert "as=PartialObjectMetadata;" in more_headers["accept"]


async def test_a_watch_that_timed_out_continues_at_its_version(api, kubeconfig):
    api.label("a100")
    async with following(kubeconfig) as told:
        await api.until(lambda: api.watchers)
        api.label("h100")
        await told.until("a100", "h100")
        api.version += 7  # of other objects
        api.event("BOOKMARK", {"metadata": {"resourceVersion": str(api.version)}})
        api.end_streams()
        await api.until(lambda: api.watchers)
        assert api.verbs() == ["get", "watch", "watch"]
        assert api.requests[-1][1]["resourceVersion"] == str(api.version)
        api.label("b200")
        await told.until("a100", "h100", "b200")


async def test_two_followers_of_a_node_share_one_watch(api, kubeconfig):
    api.label("a100")
    api.annotations = {"cordon": "1"}
    node = NodeMetadata(NODE, kubeconfig)
    label, annotation = Told(node), Told(node, "annotations", "cordon")
    first = anyio.CancelScope()

    async def follow_at_first():
        with first:
            await label.follow()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow_at_first)
        await label.until("a100")
        await api.until(lambda: api.watchers)
        tasks.start_soon(annotation.follow)
        await annotation.until("1")
        api.annotations = {"cordon": "1,2"}
        api.tell("MODIFIED")
        await annotation.until("1", "1,2")
        assert api.verbs() == ["get", "watch"]
        first.cancel()
        await api.until(lambda: api.verbs().count("watch") == 2 and api.watchers)
        api.annotations = {}
        api.tell("MODIFIED")
        await annotation.until("1", "1,2", None)
        tasks.cancel_scope.cancel()
    assert label.values == ["a100"]


@pytest.mark.parametrize("end", ["break_streams", "end_streams", "expire"])
async def test_a_watch_that_ends_is_started_again(api, kubeconfig, end, caplog):
    api.label("a100")
    async with following(kubeconfig) as told:
        await api.until(lambda: api.watchers)
        getattr(api, end)()
        api.labels = {LABEL: "h100"}
        api.version += 1
        await told.until("a100", "h100")
        await api.until(lambda: api.watchers)
        api.label("b200")
        await told.until("a100", "h100", "b200")
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


async def test_an_expired_version_is_requested_again(api, kubeconfig, caplog):
    api.refusals = [("watch", 410)]
    api.label("a100")
    async with following(kubeconfig) as told:
        await api.until(lambda: api.watchers)
        assert told.values == ["a100"]
    assert api.verbs() == ["get", "watch", "watch"]
    assert api.requests[-1][1]["resourceVersion"] == "0"
    assert caplog.records == []


async def test_missing_rights_are_logged_once_and_retried(api, kubeconfig, caplog):
    caplog.set_level("INFO")
    api.refusals = [("get", 403)] * 3 + [("watch", 403)] * 2
    api.label("a100")
    async with following(kubeconfig) as told:
        await api.until(lambda: api.watchers)
        api.label("h100")
        await told.until("a100", "h100")
    assert caplog.text.count('cannot get resource "nodes"') == 1
    assert caplog.text.count('cannot watch resource "nodes"') == 1
    assert "a ClusterRole that allows GET /api/v1/nodes/node-a" in caplog.text
    assert caplog.text.count("followed again") == 1


async def test_refused_credentials_are_logged_once_and_read_again(api, tmp_path, caplog):
    token = tmp_path / "token"
    token.write_text("of yesterday")
    async with following(api.kubeconfig(tmp_path, tokenFile=str(token))) as told:
        await api.until(lambda: len(api.requests) >= 4)
        token.write_text(api.token)
        await told.until(None)
    assert caplog.text.count("does not accept our credentials") == 1


@pytest.mark.parametrize("code", [429, 500, 503])
async def test_a_server_in_trouble_is_asked_again(api, kubeconfig, code, caplog):
    api.refusals = [("get", code), ("watch", code)]
    async with following(kubeconfig) as told:
        await api.until(lambda: api.watchers)
        assert told.values == [None]
    assert caplog.text.count(f"answered {code}") == 1


async def test_an_api_that_restarts_is_followed_again(api, kubeconfig):
    api.label("a100")
    async with following(kubeconfig) as told:
        await api.until(lambda: api.watchers)
        await api.stop()
        api.label("h100")
        await api.start()
        await told.until("a100", "h100")


async def test_a_server_that_ends_each_watch_at_once_is_retried_slowly(api, kubeconfig, monkeypatch):
    monkeypatch.setattr(node_metadata, "FIRST_PAUSE", 0.2)
    api.ends_at_once = True
    async with following(kubeconfig) as told:
        await told.until(None)
        await anyio.sleep(0.5)
        assert api.verbs().count("watch") <= 4


@pytest.mark.parametrize(("stable", "grows"), [(0.0, False), (30.0, True)])
async def test_a_long_watch_resets_the_pause_before_the_next_watch(api, kubeconfig, monkeypatch, stable, grows):
    pauses = []

    class Noted(Backoff):
        def failed(self, *given):
            pauses.append(super().failed(*given))
            return pauses[-1]

    monkeypatch.setattr(node_metadata, "Backoff", Noted)
    monkeypatch.setattr(node_metadata, "STABLE", stable)
    async with following(kubeconfig):
        for ended in range(1, 5):
            await api.until(lambda ended=ended: api.verbs().count("watch") == ended and api.watchers)
            api.end_streams()
        await api.until(lambda: len(pauses) == 4 and api.watchers)
    first = node_metadata.FIRST_PAUSE
    assert pauses[-1] > 3 * first if grows else max(pauses) < 2 * first


async def test_a_silent_server_times_out(api, kubeconfig, monkeypatch, caplog):
    monkeypatch.setattr(connection, "ANSWER_TIMEOUT", 0.05)
    api.silent = True
    async with following(kubeconfig) as told:
        await api.until(lambda: len(api.requests) >= 2)
        api.silent = False
        await told.until(None)
    assert caplog.text.count("did not answer within") == 1


async def test_a_silent_watch_is_started_again(api, kubeconfig, monkeypatch):
    monkeypatch.setattr(node_metadata, "WATCH_SECONDS", 0)
    monkeypatch.setattr(node_metadata, "GRACE", 0.1)
    async with following(kubeconfig):
        await api.until(lambda: api.verbs().count("watch") >= 3)


async def test_an_unknown_node_has_no_value(api, kubeconfig, caplog):
    api.labels = None
    async with following(kubeconfig) as told:
        await api.until(lambda: api.watchers)
        assert told.values == []
        api.expire()
        await api.until(lambda: api.verbs() == ["get", "watch", "watch"])
        await api.until(lambda: api.watchers)
        api.labels = {LABEL: "a100"}
        api.tell("ADDED")
        await told.until("a100")
    assert caplog.text.count(f"has no node {NODE}") == 1


async def test_a_node_that_is_removed_keeps_its_label_until_it_is_back(api, kubeconfig):
    api.label("a100")
    async with following(kubeconfig) as told:
        await api.until(lambda: api.watchers)
        api.remove()
        api.labels = {LABEL: "h100"}
        api.tell("ADDED")
        await told.until("a100", "h100")


@pytest.mark.parametrize("answer", [b"not json", b'{"metadata": 5}', b"{}", b'{"a":' * 100_000, b"\xff"])
async def test_an_invalid_answer_is_logged_once(api, kubeconfig, answer, caplog):
    api.wrong = [answer, answer]
    async with following(kubeconfig) as told:
        await told.until(None)
    assert caplog.text.count("is not understood") == 1


@pytest.mark.parametrize(("line", "says"), [
    (b"not json", "cannot be used"),
    (b"[]", "cannot be used"),
    (b'{"type": "MODIFIED", "object": {}}', "cannot be used"),
    (b'{"type": "ERROR", "object": 5}', "cannot be used"),
    (b'{"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}', "etcd is away"),
    (b'{"type": "MODIFIED", "object": "' + b"x" * 2000, "longer than 800 bytes"),
])  # fmt: skip
async def test_an_invalid_event_is_logged_and_the_node_is_read_again(api, kubeconfig, line, says, caplog, monkeypatch):
    monkeypatch.setattr(node_metadata, "LONGEST_EVENT", 800)
    async with following(kubeconfig) as told:
        await api.until(lambda: api.watchers)
        api.line(line)
        await api.until(lambda: api.verbs() == ["get", "watch"] * 2 and api.watchers)
        api.label("h100")
        await told.until(None, "h100")
    assert caplog.text.count(says) == 1


async def test_a_watch_compressed_without_request_is_followed(api, kubeconfig, caplog):
    api.packs = True
    async with following(kubeconfig) as told:
        await api.until(lambda: api.watchers)
        api.label("h100")
        await told.until(None, "h100")
        api.label("b200")
        await told.until(None, "h100", "b200")
        assert api.verbs() == ["get", "watch"]
        assert api.requests[1][2]["accept-encoding"] == "identity"
    assert caplog.records == []


@pytest.mark.parametrize("annotation", ["x" * 3_000_000, "a \x85 b \u2028 c \u2029 d"], ids=["long", "line separators"])
async def test_an_event_with_an_unusual_annotation_is_read(api, kubeconfig, annotation, caplog):
    async with following(kubeconfig) as told:
        await api.until(lambda: api.watchers)
        metadata = {"resourceVersion": "7", "labels": {LABEL: "h100"}, "annotations": {"a": annotation}}
        event = {"type": "MODIFIED", "object": {"metadata": metadata}}
        api.line(json.dumps(event, ensure_ascii=False).encode())
        await told.until(None, "h100")
        api.label("b200")
        await told.until(None, "h100", "b200")
        assert api.verbs() == ["get", "watch"]
    assert caplog.records == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "not found"),
        ("clusters: [", "cannot be used"),
        ("current-context: x\nclusters: []\ncontexts: []", "cannot be used"),
    ],
)
async def test_an_invalid_kubeconfig_is_logged_and_read_again(api, tmp_path, caplog, content, says):
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    async with following(str(path)) as told:
        await until(lambda: says in caplog.text)
        api.kubeconfig(tmp_path)
        await told.until(None)
    assert str(path) in caplog.text


async def test_a_kubeconfig_without_a_user_works_without_authentication(api, tmp_path):
    path = tmp_path / "kubeconfig"
    server = f"http://127.0.0.1:{api.port}"
    path.write_text(
        f"{{current-context: c, clusters: [{{name: c, cluster: {{server: '{server}'}}}}], "
        "contexts: [{name: c, context: {cluster: c}}]}"
    )
    async with following(str(path)):
        await api.until(lambda: api.requests)
    assert "authorization" not in api.requests[0][2]


async def test_outside_a_pod_the_missing_service_account_is_logged(monkeypatch, caplog):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with following(""):
        await until(lambda: "no usable service account in this pod" in caplog.text)
    assert "--kubeconfig" in caplog.text


async def test_a_hanging_resolver_delays_nothing(api, tmp_path, monkeypatch, caplog):
    path = api.kubeconfig(tmp_path)
    asked, over = [], threading.Event()

    def hang(*_, **__):
        asked.append(time.monotonic())
        over.wait(20)
        return []

    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", hang)
    async with following(path):
        await until(lambda: "is not resolved within" in caplog.text)
        began = time.monotonic()
    took = time.monotonic() - began
    over.set()
    assert took < 5
    assert asked
    assert api.requests == []


@pytest.mark.parametrize("moment", ["while connecting", "while asking", "while following"])
async def test_following_ends_at_once_and_closes_its_connections(api, kubeconfig, moment):
    api.silent = moment == "while asking"
    async with following(kubeconfig):
        if moment == "while asking":
            await api.until(lambda: api.requests)
        elif moment == "while following":
            await api.until(lambda: api.watchers)
        began = time.monotonic()
    assert time.monotonic() - began < 1
    await api.until(lambda: not api.connections)


def test_without_lightkube_the_extra_is_named(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lightkube" else real(name))
    with pytest.raises(ConfigError, match=r"install gpu-plugin\[kube\]"):
        require_client()


async def test_each_trouble_is_published_and_logged_once(api, kubeconfig, caplog):
    api.remove()
    node: Any = NodeMetadata(NODE, kubeconfig)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(node.run)
        await until(lambda: node.trouble)
        assert f"the Kubernetes API has no node {NODE}" in node.trouble
        await api.stop()
        await until(lambda: "cannot be reached" in node.trouble)
        await anyio.sleep(0.1)  # several attempts
        tasks.cancel_scope.cancel()
    assert caplog.text.count("cannot be reached") == 1
    assert (node.labels, node.trouble) == (None, None)


@pytest.mark.parametrize("text", ["users:\n- token: hunter2\n  - x: hunter2: y\n", "a: 'hunter2\n", "a: hunter2\x00\n"])
async def test_an_error_of_a_kubeconfig_has_none_of_its_content(tmp_path, text):
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(UnreachableError) as refused:
        async with connect(str(path)):
            pass
    assert "hunter2" not in str(refused.value)
    assert str(path) in str(refused.value)
