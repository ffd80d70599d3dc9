"""Changes of the Node in the API, with a busy or absent server, and with changes by other clients."""

import gzip
import time

import anyio
import pytest

from gpu_plugin.cluster import connection, node_api
from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.node_api import Condition, NodeApi
from tests.unit.cluster.api_server import NODE
from tests.unit.cluster.writable_server import WritableServer
from tests.unit.waiting import until

TAINT = "nvidia.com/gpu-unhealthy"
THEIRS = {"key": "example.com/theirs", "effect": "NoExecute", "value": "v", "timeAdded": "2026-01-01T00:00:00Z"}


@pytest.fixture
async def server():
    async with WritableServer() as running:
        yield running


@pytest.fixture
def pauses(monkeypatch):
    """The requested pauses in seconds, without real waits."""
    waited = []

    async def sleep(seconds):
        waited.append(seconds)

    monkeypatch.setattr(anyio, "sleep", sleep)
    return waited


@pytest.fixture
def api(server, tmp_path):
    return NodeApi(NODE, server.kubeconfig(tmp_path), dice=lambda: 0.0)


async def test_labels_are_ours_alone_and_each_concern_has_a_manager(server, api):
    await api.apply_labels({"nvidia.com/a": "1", "nvidia.com/b": "2"})
    await api.apply_condition(Condition("GPUHealthy", "True"))
    await api.apply_labels({"nvidia.com/a": "3"})
    assert server.labels == {"kubernetes.io/hostname": NODE, "nvidia.com/a": "3"}
    assert server.condition() is not None
    managers = {query["fieldManager"] for method, _, query, _ in server.requests if method == "PATCH"}
    assert managers == {"gpu-plugin-labels", "gpu-plugin-condition"}
    assert "as=PartialObjectMetadata;" in server.requests[-1][3]["accept"], "a whole Node would be long"
    assert server.asked.count(f"GET /api/v1/nodes/{NODE}") == 1, "the uid is asked for once"
    await api.apply_condition(None)
    assert [each["type"] for each in server.conditions] == ["Ready"]


async def test_labels_go_to_a_node_that_was_recreated(server, api, pauses):
    await api.apply_labels({"nvidia.com/a": "1"})
    server.refusals = [(403, {})]
    with pytest.raises(UnreachableError, match="403"):
        await api.apply_labels({"nvidia.com/a": "2"})
    assert [each.split()[0] for each in server.asked] == ["GET", "PATCH", "PATCH"]
    server.uid = "another"
    await api.apply_labels({"nvidia.com/a": "2"})
    assert server.labels["nvidia.com/a"] == "2"


@pytest.mark.parametrize(("before", "effect", "after", "changes"), [
    ([THEIRS], "NoSchedule", [THEIRS, {"key": TAINT, "effect": "NoSchedule"}], True),
    ([{"key": TAINT, "effect": "NoSchedule"}], "NoSchedule", [{"key": TAINT, "effect": "NoSchedule"}], False),
    ([{"key": TAINT, "effect": "NoSchedule"}, THEIRS], "NoExecute", [THEIRS, {"key": TAINT, "effect": "NoExecute"}], True),
    ([{"key": TAINT, "effect": "NoSchedule"}, THEIRS], "", [THEIRS], True),
    ([{"key": TAINT, "effect": "NoSchedule"}], "", [], True),
    ([], "", [], False),
])  # fmt: skip
async def test_our_taint_alone_is_changed(server, api, before, effect, after, changes):
    server.taints = before
    assert await api.set_taint(TAINT, effect) is changes
    assert server.taints == after


async def test_a_taint_that_somebody_adds_meanwhile_is_kept(server, api, pauses):
    def meanwhile():
        server.before = lambda: None
        server.taints = [THEIRS]
        server.version += 1

    server.before = meanwhile
    assert await api.set_taint(TAINT, "NoSchedule")
    assert server.taints == [THEIRS, {"key": TAINT, "effect": "NoSchedule"}]


async def test_a_node_that_has_changed_since_it_was_read_is_read_again(server, api):
    known = await api.read()
    server.taints, server.version = [THEIRS], server.version + 1
    assert await api.set_taint(TAINT, "NoSchedule", known)
    assert server.taints == [THEIRS, {"key": TAINT, "effect": "NoSchedule"}]


async def test_a_node_that_was_recreated_meanwhile_gets_no_taints_of_the_former_one(server, api, pauses):
    def meanwhile():  # in a restored etcd, a version may belong to another object
        server.before = lambda: None
        server.uid, server.taints = "another", []

    server.taints = [THEIRS]
    server.before = meanwhile
    assert await api.set_taint(TAINT, "NoSchedule")
    assert server.taints == [{"key": TAINT, "effect": "NoSchedule"}]


async def test_a_node_that_always_changes_is_given_up(server, api, pauses):
    def always():
        server.version += 1

    server.before = always
    with pytest.raises(UnreachableError, match="has been modified"):
        await api.set_taint(TAINT, "NoSchedule")
    assert server.taints == []
    assert [each.split()[0] for each in server.asked] == ["GET", "PATCH"] * node_api.ATTEMPTS


@pytest.mark.parametrize(("code", "headers", "waits"), [
    (429, {"Retry-After": "3"}, [3.0]),
    (429, {"Retry-After": "86400"}, [30.0]),
    (429, {"Retry-After": "0"}, [0.5]),
    (429, {"Retry-After": "9" * 400}, [0.5]),
    (429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, [0.5]),
    (500, {}, [0.5]),
    (503, {"Retry-After": "1"}, [1.0]),
    (504, {}, [0.5]),
    (409, {}, [0.5]),
])  # fmt: skip
async def test_a_busy_server_is_asked_again_when_it_says(server, api, pauses, code, headers, waits):
    server.refusals = [(code, headers)]
    await api.apply_condition(Condition("GPUHealthy", "True"))
    assert server.condition() is not None
    assert pauses == waits
    assert (api.requests, api.failures) == (2, 1)


async def test_pauses_grow_are_spread_and_end(server, tmp_path, pauses):
    server.refusals = [(503, {})] * 100
    with pytest.raises(UnreachableError, match="503"):
        await NodeApi(NODE, server.kubeconfig(tmp_path), dice=lambda: 0.5).apply_condition(None)
    assert pauses == [0.625, 1.25, 2.5]


@pytest.mark.parametrize(("code", "says"), [
    (401, "does not accept our credentials"),
    (403, "a ClusterRole that allows PATCH /api/v1/nodes/node-a/status"),
    (422, "422"),
])  # fmt: skip
async def test_a_refusal_is_no_reason_to_insist(server, api, pauses, code, says):
    server.refusals = [(code, {})]
    with pytest.raises(UnreachableError, match=says):
        await api.apply_condition(None)
    assert (pauses, len(server.requests)) == ([], 1)


async def test_an_event_that_was_made_by_an_attempt_that_seemed_to_fail_is_there(server, api):
    event = {"metadata": {"name": "e"}, "count": 1}
    await api.create_event("default", event)
    await api.create_event("default", event)
    assert await api.count_event("default", "e", {"count": 2})
    assert server.events["e"]["count"] == 2
    assert not await api.count_event("default", "long-gone", {"count": 2})


async def test_a_pod_is_known_by_its_metadata_and_not_where_it_is_gone(server, api):
    server.pods["one"] = "uid-1"
    assert [await api.pod_uid("ns", name) for name in ("one", "two")] == ["uid-1", None]


async def test_a_session_is_one_connection(server, api):
    async with api.session():
        await api.apply_condition(None)
        await api.apply_condition(None)
        assert server.connections == 1


async def test_an_answer_that_makes_no_sense_is_said(server, api):
    server.taints = 5
    with pytest.raises(UnreachableError, match="not understood"):
        await api.read()
    assert api.requests == 1, "the next answer would make no more sense"


async def test_an_answer_that_is_packed_unasked_is_read_all_the_same(server, api):
    server.packs = gzip.compress
    assert (await api.read()).metadata.uid == server.uid
    assert server.requests[-1][3]["accept-encoding"] == "identity"


@pytest.mark.parametrize(("packs", "encoding"), [
    (lambda content: content, "gzip"),
    (lambda content: gzip.compress(content)[:-20], "gzip"),
    (gzip.compress, "unknown"),
])  # fmt: skip
async def test_an_answer_that_cannot_be_unpacked_is_said(server, api, pauses, packs, encoding):
    server.packs, server.encoding = packs, encoding
    with pytest.raises(UnreachableError, match=r"cannot be reached|not understood"):
        await api.read()


async def test_a_silent_server_is_given_up(server, api, pauses, monkeypatch):
    monkeypatch.setattr(connection, "ANSWER_TIMEOUT", 0.05)
    server.silent = True
    with pytest.raises(UnreachableError, match="did not answer"):
        await api.apply_condition(None)
    assert len(server.requests) == node_api.ATTEMPTS


async def test_it_ends_at_once_amid_a_request(server, api):
    server.silent = True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(api.apply_condition, None)
        await until(lambda: server.requests)
        began = time.monotonic()
        tasks.cancel_scope.cancel()
    assert time.monotonic() - began < 0.5
    assert api.requests == 1


async def test_two_tasks_that_ask_at_once_have_a_connection_each(server, api):
    server.silent = True
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(api.apply_condition, None)
        await until(lambda: len(server.requests) >= 2)
        assert server.connections == 2
        tasks.cancel_scope.cancel()
