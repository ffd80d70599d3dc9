"""The status page's server side: queries while there are readers, and the events of each reader."""

import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from gpu_plugin.telemetry.listener.page_data import STYLE_HASH, Material
from msgspec.structs import replace

from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.telemetry.listener import status_page
from gpu_plugin.telemetry.listener.answer import Answer, Request, Stream
from gpu_plugin.telemetry.listener.status_page import ASSETS, POLICY, Source, StatusPage
from tests.unit.telemetry.listener.page_material import material, topology

NAMES = ("gpus.example.com",)


class Told:
    """The page's source, which counts its queries."""

    def __init__(self, now: Material | None = None):
        self.now = now or material()
        self.on, self.asked, self.asked_for_pods = True, 0, 0
        self.news = Pulse()
        self.source = Source(
            on=lambda: self.on, names=lambda: NAMES, held=self._held, material=self._material, news=self.news
        )

    async def _held(self):
        self.asked_for_pods += 1
        return self.now.held, ""

    def _material(self, held, why_unknown):
        self.asked += 1
        return replace(self.now, held=held, why_unknown=why_unknown)

    def tell(self, **changed):
        self.now = replace(self.now, **changed)
        self.news.ring()


@asynccontextmanager
async def running(told):
    page = StatusPage(lambda: "waiting for the label", wall=lambda: 5000.0)
    page.source = told and told.source
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(page.run)
        await anyio.lowlevel.checkpoint()
        yield page
        tasks.cancel_scope.cancel()


async def ask(page, path, **headers):
    answer = await page.pages[path](Request(path, headers))
    assert isinstance(answer, Answer)
    return answer


@asynccontextmanager
async def reading(page):
    """The stream of one reader, which gives the next event as (name, data)."""
    stream = await page.pages["/status.stream"](Request())
    assert isinstance(stream, Stream)
    chunks = stream.chunks()
    pending: list[tuple[str, Any]] = []

    async def following():
        while not pending:
            with anyio.fail_after(5):
                chunk = (await anext(chunks)).decode()
            for event in filter(None, chunk.split("\n\n")):
                name, data = event.split("\n")
                pending.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return pending.pop(0)

    try:
        yield following
    finally:
        await chunks.aclose()


async def begun(following):
    """Return the parts in the first events of a reader."""
    name, hello = await following()
    assert (name, hello["at"]) == ("hello", 5000.0)
    name, told = await following()
    assert name == "parts"
    return told["parts"]


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(status_page, "MIN_REST", 0.001)
    monkeypatch.setattr(status_page, "TICK", 30.0)
    monkeypatch.setattr(status_page, "SHARE", 0)


async def test_a_reader_gets_all_parts_and_then_changed_parts():
    told = Told()
    async with running(told) as page, reading(page) as following:
        first = await begun(following)
        assert set(first) == {"summary", "complaints", "node", "gpus", "pods", "devices", "links", "events"}
        told.tell(events=[{"at": 7.0, "kind": "daemon", "text": "something <new>"}])
        name, changed = await following()
        assert (name, set(changed["parts"])) == ("parts", {"events"})
        assert "something &lt;new&gt;" in changed["parts"]["events"]


async def test_all_readers_get_the_same_bytes():
    told = Told()
    async with running(told) as page:
        streams = [(await page.pages["/status.stream"](Request())).chunks() for _ in range(3)]
        first = [await anext(chunks) for chunks in streams]
        assert first[0] == first[1] == first[2]
        told.tell(troubles=("a trouble",))
        with anyio.fail_after(5):
            second = [await anext(chunks) for chunks in streams]
        assert second[0] is second[1] is second[2]
        for chunks in streams:
            await chunks.aclose()
        assert not page._readers


async def test_a_reader_that_missed_a_change_gets_all_newest_parts():
    told = Told()
    async with running(told) as page, reading(page) as slow, reading(page) as quick:
        await begun(slow)
        await begun(quick)
        for count in range(3):
            told.tell(troubles=tuple(map(str, range(count + 1))))
            await quick()
        _, caught_up = await slow()
        assert len(caught_up["parts"]) == 8
        assert "2 other things need attention" in caught_up["parts"]["summary"]


async def test_without_readers_the_daemon_is_not_queried():
    told = Told()
    async with running(told) as page:
        for _ in range(3):
            told.news.ring()
            await anyio.sleep(0.01)
        assert (told.asked, told.asked_for_pods) == (0, 0)
        async with reading(page) as following:
            await begun(following)
        told.news.ring()  # the last reader has left
        await anyio.sleep(0.05)
        asked = told.asked
        for _ in range(3):
            told.news.ring()
            await anyio.sleep(0.01)
        assert told.asked == asked


async def test_without_changes_only_beats_are_sent(monkeypatch):
    monkeypatch.setattr(status_page, "HEARTBEAT", 0.02)
    monkeypatch.setattr(status_page, "TICK", 0.01)
    told = Told()
    async with running(told) as page, reading(page) as following:
        await begun(following)
        assert await following() == ("beat", {"at": 5000.0})
        assert await following() == ("beat", {"at": 5000.0})
        assert told.asked >= 3  # at the start, and before each of the beats


async def test_an_unannounced_change_is_found_at_the_next_tick(monkeypatch):
    monkeypatch.setattr(status_page, "TICK", 0.01)
    told = Told()
    async with running(told) as page, reading(page) as following:
        await begun(following)
        told.now = replace(told.now, troubles=("a trouble",))
        name, changed = await following()
        assert name == "parts"
        assert "a trouble" in changed["parts"]["complaints"]


@pytest.mark.parametrize(
    ("rule", "value", "most"),
    [
        pytest.param("MIN_REST", 0.2, 3, id="a rest after each look"),
        # A look takes a tenth of a millisecond at least.
        pytest.param("SHARE", 20_000, 1, id="a look that takes long is followed by a rest that is longer still"),
    ],
)
async def test_queries_are_limited_in_a_storm_of_changes(monkeypatch, rule, value, most):
    monkeypatch.setattr(status_page, rule, value)
    told = Told()
    async with running(told) as page, reading(page) as following:
        await begun(following)
        before = told.asked
        for _ in range(100):
            told.news.ring()
            await anyio.sleep(0.001)
        assert told.asked - before <= most


async def test_a_hanging_kubelet_delays_only_the_pods(monkeypatch):
    monkeypatch.setattr(status_page, "PODS_INTERVAL", 0.01)
    monkeypatch.setattr(status_page, "TICK", 0.1)  # the change may come in the middle of a look
    told = Told()
    begins_to_hang, hanging = anyio.Event(), anyio.Event()

    async def held():
        if begins_to_hang.is_set():
            hanging.set()
            await anyio.sleep_forever()
        return None, "the kubelet is slow"

    async with running(told) as page:
        page.source = replace(told.source, held=held)
        async with reading(page) as following:
            assert "the kubelet is slow" in (await begun(following))["pods"]
            begins_to_hang.set()
            with anyio.fail_after(5):
                await hanging.wait()
            told.tell(troubles=("a trouble",))
            _, changed = await following()
            assert "a trouble" in changed["parts"]["complaints"]


async def test_many_requests_within_a_second_make_one_query():
    told = Told()
    async with running(told) as page:
        async with anyio.create_task_group() as tasks:
            for path in ("/", "/status.json", "/links.svg") * 10:
                tasks.start_soon(ask, page, path)
        assert (told.asked, told.asked_for_pods) == (1, 1)


async def test_the_page_allows_only_its_own_content_and_is_not_cached():
    async with running(Told()) as page:
        answer = await ask(page, "/")
    headers = dict(answer.headers)
    assert (answer.status, answer.content_type) == (200, "text/html; charset=utf-8")
    assert headers["Content-Security-Policy"] == POLICY
    assert "unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'")
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "No problems found" not in answer.text


async def test_the_data_for_programs():
    async with running(Told()) as page:
        answer = await ask(page, "/status.json")
    told = json.loads(answer.text)
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert (told["format"], told["at"], told["headline"]) == (1, 5000.0, "1 of 2 GPUs is Unhealthy")


async def test_the_picture_has_a_policy_for_its_own_style():
    async with running(Told()) as page:
        answer = await ask(page, "/links.svg")
        assert answer.content_type == "image/svg+xml"
        assert f"style-src '{STYLE_HASH}'" in dict(answer.headers)["Content-Security-Policy"]
        assert answer.text.startswith("<svg")
        version = (page._links[0] or {})["version"]
        assert f'src="links.svg?{version}"' in (await ask(page, "/")).text
    async with running(Told(material(topology=topology(1, [])))) as alone:
        assert (await ask(alone, "/links.svg")).status == 404


@pytest.mark.parametrize("name", ASSETS)
async def test_files_of_the_page_are_sent_once(name):
    file = Path(status_page.__file__).parent / "page" / name
    async with running(Told()) as page:
        answer = await ask(page, f"/{name}")
        assert answer.text == file.read_text()
        assert answer.content_type == ASSETS[name]
        again = await ask(page, f"/{name}", **{"if-none-match": dict(answer.headers)["ETag"]})
        assert (again.status, again.text) == (304, "")
        assert (await ask(page, f"/{name}", **{"if-none-match": '"other"'})).status == 200


def test_files_of_the_page_refer_to_no_other_host():
    for name in ASSETS:
        text = (Path(status_page.__file__).parent / "page" / name).read_text()
        assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace(" // ", "").replace("// ", ""), name
        assert "url(" not in text
        assert "@import" not in text


async def test_a_disabled_page_is_not_found_and_its_streams_end(monkeypatch):
    monkeypatch.setattr(status_page, "TICK", 0.01)
    told = Told()
    async with running(told) as page:
        stream = await page.pages["/status.stream"](Request())
        chunks = stream.chunks()
        await anext(chunks)
        told.on = False
        with anyio.fail_after(5):
            async for _ in chunks:
                pass
        for path in ("/", "/status.json", "/status.stream", "/links.svg"):
            answer = await ask(page, path)
            assert (answer.status, "--status-page" in answer.text) == (404, True)
        assert not page._readers


async def test_a_request_with_a_foreign_host_name_is_refused():
    told = Told()
    async with running(told) as page:
        for path in ("/", "/status.json", "/status.stream", "/links.svg"):
            answer = await ask(page, path, host="evil.example:9480")
            assert (answer.status, "GPU" in answer.text) == (403, False)
        assert not told.asked
        assert (await ask(page, "/page.css", host="evil.example")).status == 200  # of which nothing is secret
        for host in ("127.0.0.1:9480", "localhost:9480", "gpus.example.com"):
            assert (await ask(page, "/status.json", host=host)).status == 200
    async with running(None) as page:
        assert (await ask(page, "/", host="gpus.example.com")).status == 403  # the names are not known yet
        assert (await ask(page, "/", host="[::1]:9480")).status == 200


async def test_a_stream_shows_the_reason_of_the_wait_and_then_the_daemon():
    async with running(None) as page, reading(page) as following:
        assert "waiting for the label" in (await begun(following))["complaints"]
        assert "waiting for the label" in (await ask(page, "/")).text
        told = Told()
        page.source = told.source
        page._no_news.ring()
        _, changed = await following()
        assert "GPU 1 is Unhealthy" in changed["parts"]["complaints"]


async def test_a_request_cancelled_during_a_query_leaves_the_query_to_the_next_request():
    told = Told()
    async with running(told) as page:
        await ask(page, "/icon.svg")
        for turns in range(12):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, page, "/")
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        assert "GPU 1 is Unhealthy" in (await ask(page, "/")).text
