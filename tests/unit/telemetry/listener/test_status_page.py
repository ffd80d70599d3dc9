"""The status page's server side: its files, the status as JSON, and the names under which it is shown."""

import json
from pathlib import Path

import anyio
import msgspec
import pytest

from gpu_plugin.status.links import STYLE_HASH
from gpu_plugin.status.model import Status
from gpu_plugin.telemetry.listener import status_page
from gpu_plugin.telemetry.listener.answer import Answer, Request
from gpu_plugin.telemetry.listener.status_page import ASSETS, POLICY, StatusPage
from tests.unit.status.sample import STATUS

FOLDER = Path(status_page.__file__).parent / "page"
SHOWN = ("/", "/status.json", "/links.svg")


class Told:
    """The page's source, which counts the times that the status is built."""

    def __init__(self, picture="<svg/>"):
        self.on, self.built = True, 0
        self._picture = picture

    def page_is_on(self):
        return self.on

    def page_names(self):
        return ("gpus.example.com",)

    async def page_status(self):
        self.built += 1
        await anyio.lowlevel.checkpoint()
        return STATUS

    def links_picture(self):
        return self._picture


def page_of(told):
    page = StatusPage(lambda: "waiting for the label")
    page.source = told
    return page


async def ask(page, path, **headers):
    answer = await page.pages[path](Request(path, headers))
    assert isinstance(answer, Answer)
    return answer


async def test_the_status_is_typed_json_that_is_not_cached():
    answer = await ask(page_of(Told()), "/status.json")
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert msgspec.json.decode(answer.text, type=Status) == STATUS
    assert dict(answer.headers)["Cache-Control"] == "no-store"


async def test_many_requests_within_a_second_build_one_status(monkeypatch):
    told = Told()
    page = page_of(told)
    async with anyio.create_task_group() as tasks:
        for _ in range(30):
            tasks.start_soon(ask, page, "/status.json")
    assert told.built == 1
    monkeypatch.setattr(status_page, "FRESH", 0.0)
    await ask(page, "/status.json")
    assert told.built == 2


async def test_the_page_and_its_files_build_no_status():
    told = Told()
    page = page_of(told)
    for path in page.pages:
        if path != "/status.json":
            await ask(page, path)
    assert told.built == 0


async def test_a_request_that_is_cancelled_leaves_the_status_to_the_next_request():
    page = page_of(Told())
    for turns in range(12):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, page, "/status.json")
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert (await ask(page, "/status.json")).status == 200


async def test_the_page_allows_only_its_own_content():
    answer = await ask(page_of(Told()), "/")
    headers = dict(answer.headers)
    assert (answer.status, answer.content_type) == (200, "text/html; charset=utf-8")
    assert headers["Content-Security-Policy"] == POLICY
    assert "unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'")
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"


async def test_the_picture_has_a_policy_for_its_own_style():
    answer = await ask(page_of(Told()), "/links.svg")
    assert (answer.status, answer.content_type, answer.text) == (200, "image/svg+xml", "<svg/>")
    assert f"style-src '{STYLE_HASH}'" in dict(answer.headers)["Content-Security-Policy"]
    assert (await ask(page_of(Told("")), "/links.svg")).status == 404


@pytest.mark.parametrize("name", [name for name in ASSETS if name != "page.html"])
async def test_files_of_the_page_are_sent_once(name):
    page = page_of(Told())
    answer = await ask(page, f"/{name}")
    assert answer.text == (FOLDER / name).read_text()
    assert answer.content_type == ASSETS[name]
    again = await ask(page, f"/{name}", **{"if-none-match": dict(answer.headers)["ETag"]})
    assert (again.status, again.text) == (304, "")
    assert (await ask(page, f"/{name}", **{"if-none-match": '"other"'})).status == 200


@pytest.mark.parametrize("name", ASSETS)
def test_files_of_the_page_refer_to_no_other_host_and_make_no_html_of_data(name):
    text = (FOLDER / name).read_text()
    assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace(" // ", "").replace("// ", "")
    assert not [each for each in ("url(", "@import", "innerHTML", "outerHTML", "insertAdjacentHTML") if each in text]


async def test_a_disabled_page_is_not_found():
    told = Told()
    told.on = False
    for path in SHOWN:
        answer = await ask(page_of(told), path)
        assert (answer.status, "--status-page" in answer.text) == (404, True)


async def test_a_request_with_a_foreign_host_name_is_refused():
    told = Told()
    page = page_of(told)
    for path in SHOWN:
        answer = await ask(page, path, host="evil.example:9480")
        assert (answer.status, "GPU" in answer.text) == (403, False)
    assert not told.built
    assert (await ask(page, "/page.css", host="evil.example")).status == 200  # it has no secret
    for host in ("127.0.0.1:9480", "localhost:9480", "gpus.example.com"):
        assert (await ask(page, "/status.json", host=host)).status == 200
    waiting = page_of(None)
    assert (await ask(waiting, "/", host="gpus.example.com")).status == 403  # the names are not known yet
    assert (await ask(waiting, "/", host="[::1]:9480")).status == 200


async def test_before_there_is_a_daemon_the_status_has_the_reason_of_the_wait():
    page = page_of(None)
    told = json.loads((await ask(page, "/status.json")).text)
    assert told["waiting"] == "waiting for the label"
    assert msgspec.convert(told, Status).gpus == ()
    assert (await ask(page, "/links.svg")).status == 404
    page.source = Told()
    assert json.loads((await ask(page, "/status.json")).text)["waiting"] == ""  # at once
