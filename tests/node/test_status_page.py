"""The status page of the real process: the stream of changes, and its cost for probes and pods."""

import json
from collections import Counter
from contextlib import asynccontextmanager

import anyio

from tests.node.daemon import GPU
from tests.node.test_listener import PATIENCE, flags, get, serves, told

SHARED = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 28}]}}\n"


class Reader:
    """One reader of the stream, and the bytes that it has received."""

    def __init__(self, client):
        self._client = client
        self._received = b""

    async def event(self):
        """The name and the data of the next event."""
        with anyio.fail_after(PATIENCE):
            while b"\n\n" not in self._received:
                self._received += await self._client.receive()
        event, _, self._received = self._received.partition(b"\n\n")
        name, data = event[event.index(b"event: ") :].decode().split("\n")
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    async def until(self, part, text):
        """Returns once a part of the page holds a text."""
        with anyio.fail_after(PATIENCE):
            while True:
                name, sent = await self.event()
                if name == "parts" and text in sent["parts"].get(part, ""):
                    return

    async def end(self):
        """Returns once the stream has ended."""
        with anyio.fail_after(PATIENCE):
            try:
                while await self._client.receive():
                    pass
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return


@asynccontextmanager
async def reader(port):
    async with await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(b"GET /status.stream HTTP/1.0\r\n\r\n")
        yield Reader(client)


async def test_a_fault_and_its_end_are_told_as_they_come(kubelet, daemon, port):
    daemon.start(*flags(port, "--node-name=node-1"))
    await serves(kubelet, 8)
    await kubelet.admit("train", {GPU: 8})
    async with reader(port) as following:
        await following.until("summary", "All 8 GPUs are Healthy")
        daemon.fault(3, xid=79)
        await following.until("complaints", "default/train (main)")
    data = json.loads(await told(port, "status.json", 200, "Xid 79"))
    assert (data["node"], data["headline"], data["resources"][0]["held"]) == ("node-1", "1 of 8 GPUs is Unhealthy", 8)
    assert data["gpus"][3]["readings"].keys() == data["gpus"][0]["readings"].keys()
    assert data["gpus"][0]["readings"]["temperature_celsius"] is not None


async def test_at_the_end_streams_end_at_once(kubelet, daemon, port):
    daemon.start(*flags(port))
    await serves(kubelet, 8)
    async with reader(port) as one, reader(port) as other:
        await one.until("summary", "All 8 GPUs are Healthy")
        await other.until("summary", "All 8 GPUs are Healthy")
        status, seconds = await daemon.stop()
        assert status == 0
        assert seconds < 1
        await one.end()
        await other.end()


async def test_the_page_can_be_switched_off_and_on_while_it_runs(kubelet, directory, daemon, port):
    config = directory / "config.yaml"
    written = "version: v1\nflags: {{statusPage: {}, podMetrics: false}}\n"
    config.write_text(written.format("true"))
    daemon.start(*flags(port), "--config-file", str(config))
    await serves(kubelet, 8)
    async with reader(port) as following:
        await following.until("pods", "--pod-metrics=false")
        config.write_text(written.format("false"))
        await following.end()
    assert "--status-page" in await told(port, "", 404)
    assert (await get(port, "livez"))[0] == 200
    config.write_text(written.format("true"))
    await told(port, "", 200, "All 8 GPUs are Healthy")


async def test_readers_that_never_read_cost_probes_and_pods_nothing(kubelet, directory, daemon, port):
    config = directory / "config.yaml"
    config.write_text(SHARED)
    daemon.profile = "dgx2-16"
    daemon.start(*flags(port), "--config-file", str(config))
    await serves(kubelet, 448)
    for page in ("", "status.json", "links.svg", "livez", "metrics"):
        await told(port, page, 200)
    silent = []
    for _ in range(40):  # more than there may be, and than there may be connections
        client = await anyio.connect_tcp("127.0.0.1", port)
        await client.send(b"GET /status.stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        silent.append(client)
    answers = [(await client.receive())[:12] for client in silent]
    assert Counter(answers) == {b"HTTP/1.1 200": 8, b"HTTP/1.1 503": 32}
    for number in range(10):
        daemon.fault(number % 16, xid=31)
        assert (await get(port, "livez"))[0] == 200
        assert (await kubelet.admit(f"pod-{number}", {GPU: 1})).allocations[0].ids
    for client in silent:
        await client.aclose()
    with anyio.fail_after(PATIENCE):
        while True:  # until it is noticed that they have left
            async with reader(port) as following:
                try:
                    await following.until("summary", "All 16 GPUs are Healthy")
                    break
                except (ValueError, anyio.EndOfStream):
                    await anyio.sleep(0.05)
    assert kubelet.registrations[GPU].total == 1
