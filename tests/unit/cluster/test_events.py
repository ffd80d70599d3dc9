"""Events are written in order, with servers that fail, and other tasks never wait for them."""

from contextlib import asynccontextmanager

import anyio
import pytest

from gpu_plugin.cluster import events
from gpu_plugin.cluster.connection import UnreachableError
from gpu_plugin.cluster.correlation import BURST, PODS_BURST, EventContent, Object
from gpu_plugin.cluster.events import MAX_TRIES, MAX_TRIES_UNAVAILABLE, MAX_WAITING, EventWriter
from tests.unit.waiting import until

NODE = Object("Node", "node-a", uid="node-a")


class Api:
    """Stores Events, and fails as its fields say."""

    node_name = "node-a"

    def __init__(self):
        self.events = {}
        self.failing = ""
        self.attempts = 0
        self.sessions = 0
        self.asked = []
        self.uids = {}
        self.no_pods = False
        self.broken = ""

    @asynccontextmanager
    async def session(self):
        self.sessions += 1
        yield

    async def create_event(self, namespace, event):
        self._try(namespace)
        self.events[event["metadata"]["name"]] = dict(event)

    async def count_event(self, namespace, name, changes):
        self._try()
        if name not in self.events:
            return False
        self.events[name] |= changes
        return True

    async def pod_uid(self, namespace, name):
        self.asked.append(name)
        if self.no_pods:
            raise UnreachableError("403 get pods", "no right to get pods")
        return self.uids.get(name, "uid")

    def _try(self, namespace=""):
        self.attempts += 1
        if namespace and namespace == self.broken:
            raise UnreachableError("500", "failed calling webhook")
        if self.failing:
            raise UnreachableError(self.failing, f"failing with {self.failing}")

    def told(self):
        return [(event["message"], event["count"]) for event in self.events.values()]


def news(message, about=NODE, at=1.0):
    return EventContent(about, "GPUUnhealthy", message, warning=True, at=at)


@pytest.fixture
async def api():
    return Api()


@pytest.fixture
async def writer(api, monkeypatch):
    monkeypatch.setattr(events, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(events, "LONGEST_PAUSE", 0.002)
    writer = EventWriter(api, clock=lambda: 0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        yield writer
        tasks.cancel_scope.cancel()


async def test_what_comes_at_once_is_written_over_one_connection(api, writer):
    for message in ("a", "b", "a"):
        writer.tell(news(message))
    await until(lambda: not writer.waiting)
    assert api.told() == [("a", 2), ("b", 1)]
    assert (api.sessions, api.attempts, writer.written) == (1, 2, 2)
    writer.tell(news("a"))
    await until(lambda: api.told()[0] == ("a", 3))


async def test_what_is_told_of_an_event_while_it_is_written_is_written_next(api, writer, monkeypatch):
    real = api.create_event

    async def create(namespace, event):
        await real(namespace, event)
        writer.tell(news("a"))

    monkeypatch.setattr(api, "create_event", create)
    writer.tell(news("a"))
    await until(lambda: not writer.waiting)
    assert api.told() == [("a", 2)]


async def test_an_event_that_the_server_dropped_is_made_again(api, writer):
    writer.tell(news("a"))
    await until(lambda: api.events)
    api.events.clear()
    writer.tell(news("a"))
    await until(lambda: api.told() == [("a", 2)])


@pytest.mark.parametrize("kind", ["connection", "503", "429", "401", "credentials"])
async def test_what_goes_by_itself_is_waited_for_and_said_once(api, writer, kind, caplog):
    api.failing = kind
    for message in ("a", "b"):
        writer.tell(news(message))
    await until(lambda: api.attempts >= 3)
    assert writer.waiting == 2
    assert writer.trouble == f"failing with {kind}"
    api.failing = ""
    await until(lambda: not writer.waiting)
    assert sorted(api.told()) == [("a", 1), ("b", 1)]  # after MAX_TRIES an Event moves to the end
    assert (writer.trouble, writer.dropped) == ("", 0)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


@pytest.mark.parametrize("kind", ["403 create events", "404", "422"])
@pytest.mark.parametrize("tries", [MAX_TRIES - 2, MAX_TRIES])
async def test_an_event_that_the_server_refuses_is_dropped_after_some_tries(api, writer, kind, tries):
    api.failing = kind
    writer.tell(news("a"))
    await until(lambda: writer.dropped == 1 if tries == MAX_TRIES else api.attempts == tries)
    assert api.attempts == tries
    api.failing = ""
    writer.tell(news("b"))
    await until(lambda: not writer.waiting)
    assert api.told() == ([] if tries == MAX_TRIES else [("a", 1)]) + [("b", 1)]


async def test_a_server_that_is_away_leaves_the_newest(api):
    writer = EventWriter(api, clock=lambda: 0.0)
    for number in range(MAX_WAITING + 10):
        writer.tell(news("m", Object("Node", f"p{number}", uid="u")))
    assert (writer.waiting, writer.dropped) == (MAX_WAITING, 10)
    assert next(iter(writer._waiting.values())).news.about.name == "p10"


def pod(name, namespace="ns"):
    return Object("Pod", name, namespace)


async def test_a_pod_is_asked_for_once_and_another_of_its_name_has_an_event_of_its_own(api):
    now = [0.0]
    writer = EventWriter(api, clock=lambda: now[0])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        for number in range(3):
            writer.tell(news("a", pod("p")))
            await until(lambda: not writer.waiting)
            assert api.told() == [("a", number + 1)]
        assert api.asked == ["p"]
        api.uids["p"], now[0] = "another", events.UID_SECONDS
        writer.tell(news("a", pod("p"), at=2.0))
        await until(lambda: len(api.events) == 2)
        tasks.cancel_scope.cancel()
    assert [each["involvedObject"]["uid"] for each in api.events.values()] == ["uid", "another"]
    assert api.told() == [("a", 3), ("a", 1)]


async def test_what_is_not_told_asks_for_no_pod_and_a_node_has_a_budget(api, writer):
    for _ in range(BURST + 10):
        writer.tell(news("a", pod("p")))
    assert writer.dropped == 10
    for number in range(PODS_BURST):
        writer.tell(news("a", pod(f"p{number}")))
    assert writer.dropped == 10 + BURST
    await until(lambda: not writer.waiting)
    assert len(api.asked) == len(set(api.asked)) <= PODS_BURST
    writer.tell(news("a"))
    await until(lambda: ("a", 1) in api.told() and not writer.waiting)


async def test_a_missing_right_for_pods_is_said_whatever_becomes_of_the_node_s_events(api, writer, caplog):
    api.no_pods = True
    writer.tell(news("a", pod("p")))
    writer.tell(news("a"))
    await until(lambda: not writer.waiting)
    assert writer.trouble == "no right to get pods"
    assert (writer.written, writer.dropped) == (1, 1)
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    api.no_pods, api.uids["gone"] = False, None
    for name in ("gone", "p"):
        writer.tell(news("a", pod(name)))
    await until(lambda: writer.written == 2 and not writer.waiting)
    assert (writer.trouble, len(api.events)) == ("", 2), "a pod that is gone has no Event"


async def test_a_namespace_whose_webhook_fails_holds_up_no_other_and_is_given_up_in_the_end(api, writer):
    api.broken = "ns"
    writer.tell(news("a", pod("p")))
    writer.tell(news("b", pod("p", "sound")))
    await until(lambda: api.told() == [("b", 1)])
    assert api.attempts < MAX_TRIES_UNAVAILABLE
    await until(lambda: not writer.waiting)
    assert writer.dropped == 1
    assert api.attempts == MAX_TRIES_UNAVAILABLE + 1


async def test_a_server_that_is_away_is_waited_for_however_long(api, writer):
    api.failing = "503"
    writer.tell(news("a"))
    await until(lambda: api.attempts > MAX_TRIES_UNAVAILABLE + 5)
    api.failing = ""
    await until(lambda: api.told() == [("a", 1)])
