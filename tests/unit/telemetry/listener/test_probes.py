"""The pages of probes and metrics: their queries, and the rate of queries."""

import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import cast

import anyio
import pytest
from msgspec.structs import replace

from gpu_plugin.kubelet.registrations import ResourceRegistration
from gpu_plugin.kubelet.self_call import ShortageError
from gpu_plugin.status.model import Pods
from gpu_plugin.telemetry.listener import listener as listener_module
from gpu_plugin.telemetry.listener import probes as probes_module
from gpu_plugin.telemetry.listener.answer import Answer, Request
from gpu_plugin.telemetry.listener.checks import Facts
from gpu_plugin.telemetry.listener.listener import Listener, ServedDaemon
from gpu_plugin.telemetry.listener.probes import Probes
from gpu_plugin.telemetry.metrics.exposition import OPENMETRICS, PROMETHEUS, lines
from gpu_plugin.telemetry.metrics.families import families
from tests.unit.kubelet.conftest import directory  # noqa: F401 - a fixture
from tests.unit.kubelet.serving import GPU, serving
from tests.unit.status.sample import STATUS
from tests.unit.waiting import until


@asynccontextmanager
async def probing(facts):
    """Run the pages for these facts, with the beat of the event loop."""
    probes = Probes(facts)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(probes.beat)
        await anyio.lowlevel.checkpoint()
        yield probes
        tasks.cancel_scope.cancel()


async def answered_on(probes, path):
    """Return the answer of a page."""
    answer = await probes.pages[path](Request(path))
    assert isinstance(answer, Answer)
    return answer


async def test_our_own_sockets_are_asked_once_for_all_who_want_to_know(monkeypatch, tmp_path):
    asked = []

    async def answered(socket):
        asked.append(socket)
        await anyio.lowlevel.checkpoint()
        return "" if socket.name == "gpu" else "the connection broke"

    monkeypatch.setattr(probes_module, "self_call", answered)
    standings = {
        GPU: ResourceRegistration(tmp_path / "gpu"),
        "b/c": ResourceRegistration(tmp_path / "c"),
        "not/listening": ResourceRegistration(),
    }
    async with probing(lambda: Facts(standings=standings)) as probes:
        answers = []

        async def ask():
            answers.append(await answered_on(probes, "/livez"))

        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(ask)
        assert sorted(socket.name for socket in asked) == ["c", "gpu"]
        assert {answer.status for answer in answers} == {503}
        assert "[-]sockets failed: b/c: the connection broke\n" in answers[0].text
        monkeypatch.setattr(probes_module, "FRESH", 0.0)
        await ask()
        assert len(asked) == 4


async def test_one_who_leaves_while_sockets_are_asked_leaves_the_question_to_the_next(monkeypatch, tmp_path):
    begun = anyio.Event()
    held = [anyio.Event()]

    async def answered(_socket):
        begun.set()
        if held:
            await held.pop().wait()
        return ""

    monkeypatch.setattr(probes_module, "self_call", answered)
    async with probing(lambda: Facts(standings={GPU: ResourceRegistration(tmp_path / "gpu")})) as probes:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answered_on, probes, "/livez")
            await begun.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(1):
            assert (await answered_on(probes, "/livez")).status == 200


async def test_a_socket_that_nobody_answers_on_fails_and_its_reason_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(probes_module, "PATIENCE", 0.05)
    path = tmp_path / "silent.sock"
    conversations = []
    server = await asyncio.start_unix_server(lambda *streams: conversations.append(streams), path)
    async with probing(lambda: Facts(standings={GPU: ResourceRegistration(path)})) as probes:
        answer = await answered_on(probes, "/livez")
    assert answer.status == 503
    assert f"[-]sockets failed: {GPU}: no answer within 0.05 s\n" in answer.text
    server.close()
    for _, writer in conversations:
        writer.transport.abort()


async def test_a_lack_of_descriptors_is_no_verdict_on_the_sockets(monkeypatch, tmp_path):
    async def lacking(socket):
        await anyio.lowlevel.checkpoint()
        if socket.name == "gpu":
            raise ShortageError("Too many open files")
        return ""

    monkeypatch.setattr(probes_module, "self_call", lacking)
    standings = {GPU: ResourceRegistration(tmp_path / "gpu"), "b/c": ResourceRegistration(tmp_path / "c")}
    async with probing(lambda: Facts(standings=standings)) as probes:
        answer = await answered_on(probes, "/livez")
    assert answer.status == 200
    assert "[+]sockets ok: not all were called: Too many open files\n" in answer.text


async def test_the_start_is_over_for_good():
    facts = Facts(awaited="waiting for the label")
    probes = Probes(lambda: facts)
    assert (await answered_on(probes, "/startupz")).status == 503
    facts = Facts(awaited="default:1: no", tried=True)
    assert (await answered_on(probes, "/startupz")).status == 200
    facts = Facts(driver=None)  # a good configuration came, and the driver is asked now
    assert (await answered_on(probes, "/startupz")).status == 200


async def test_a_loop_that_stood_still_is_told_of_afterwards(monkeypatch):
    monkeypatch.setattr("gpu_plugin.telemetry.listener.checks.LATE", -1.0)  # any beat is late
    monkeypatch.setattr(probes_module, "BEAT_INTERVAL", 0.01)
    async with probing(Facts) as probes:
        with anyio.fail_after(5):
            while "[+]event-loop ok: it was blocked for " not in (answer := await answered_on(probes, "/livez")).text:
                await anyio.sleep(0.005)
    assert answer.status == 200


async def test_a_socket_given_up_meanwhile_is_not_missed(monkeypatch, tmp_path):
    standings = {GPU: ResourceRegistration(tmp_path / "old")}

    async def given_up(_socket):
        standings[GPU] = ResourceRegistration(tmp_path / "new")
        return "no connection: No such file or directory"

    monkeypatch.setattr(probes_module, "self_call", given_up)
    async with probing(lambda: Facts(standings=standings)) as probes:
        assert (await answered_on(probes, "/livez")).status == 200


@pytest.mark.usefixtures("directory")
async def test_our_server_answers_itself(directory):  # noqa: F811
    async with serving(directory, register=False) as plugin:
        with anyio.fail_after(5):
            while not plugin.sockets:
                await plugin.look.wait(0.01)
        standings = {GPU: ResourceRegistration(plugin.sockets[0])}
        async with probing(lambda: Facts(standings=standings)) as probes:
            assert (await answered_on(probes, "/livez")).status == 200


async def test_metrics_are_those_of_the_status_and_made_once_a_second(monkeypatch):
    made = []

    async def status():
        made.append(1)
        return STATUS, []

    probes = Probes(lambda: Facts(awaited="waiting for the label"))
    early = await answered_on(probes, "/metrics")
    assert (early.status, early.text) == (503, "there are no metrics yet: waiting for the label\n")
    probes.status = status
    for _ in range(3):
        answer = await answered_on(probes, "/metrics")
    made_here = [
        line for family in families(STATUS, (), probes._beats.lag.as_data()) for line in lines(family, PROMETHEUS)
    ]
    assert answer.text == "".join(f"{line}\n" for line in made_here)
    assert answer.content_type == PROMETHEUS.content_type
    assert len(made) == 1
    monkeypatch.setattr(probes_module, "FRESH", 0.0)
    assert "gpu_plugin_scrape_duration_seconds 0." in (await answered_on(probes, "/metrics")).text
    assert len(made) == 2


async def test_metrics_are_openmetrics_for_who_asks_for_them():
    async def status():
        return STATUS, []

    probes = Probes(Facts)
    probes.status = status
    asked = Request("/metrics", {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})
    answer, plain = await probes.pages["/metrics"](asked), await answered_on(probes, "/metrics")
    assert (answer.content_type, answer.text.endswith("\n# EOF\n")) == (OPENMETRICS.content_type, True)
    assert (plain.content_type, "# EOF" in plain.text) == (PROMETHEUS.content_type, False)


async def test_samples_are_made_while_they_are_written(monkeypatch):
    """Other tasks run between two pieces, before all devices of pods are converted to text."""
    made = 0

    def devices():
        nonlocal made
        for at in range(5000):
            made += 1
            yield {"resource": GPU, "device": f"GPU-0::{at}", "uuid": "GPU-0", "index": 0}, [("n", "p", "c")]

    async def status():
        return replace(STATUS, pods=Pods(requests=1)), devices()

    probes = Probes(Facts)
    probes.status = status
    monkeypatch.setattr(probes_module, "PIECE", 0.0)
    seen = set()

    async def look():
        while True:
            seen.add(made)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        answer = await answered_on(probes, "/metrics")
        tasks.cancel_scope.cancel()
    assert answer.text.count("gpu_plugin_pod_device{") == 5000
    steps = sorted(seen)
    assert max(after - before for before, after in pairwise(steps)) <= probes_module.LINES


async def test_a_text_that_is_too_old_is_not_kept(monkeypatch):
    async def status():
        return STATUS, []

    monkeypatch.setattr(probes_module, "BEAT_INTERVAL", 0.01)
    async with probing(Facts) as probes:
        probes.status = status
        await answered_on(probes, "/metrics")
        await anyio.sleep(0.05)
        assert probes._rendered, "it is good for others who ask"
        monkeypatch.setattr(probes_module, "FRESH", 0.0)
        await until(lambda: not probes._rendered)


async def test_without_an_address_nothing_is_begun(monkeypatch):
    monkeypatch.setattr(listener_module, "host_and_port", None)
    async with anyio.create_task_group() as tasks:
        listener = Listener(tasks)
        listener.begin("", Facts)
        listener.ask(cast("ServedDaemon", None))
        listener.stop()
