"""The status page of the real process: its content, and its cost for probes and pods."""

import json

import anyio

from tests.node.daemon import GPU
from tests.node.test_listener import PATIENCE, flags, get, serves, told

SHARED = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 28}]}}\n"


async def test_a_fault_is_on_the_page_with_its_pods(kubelet, daemon, port):
    daemon.start(*flags(port, "--node-name=node-1"))
    await serves(kubelet, 8)
    await kubelet.admit("train", {GPU: 8})
    assert "All 8 GPUs are Healthy" in await told(port, "status.json", 200, "All 8 GPUs are Healthy")
    daemon.fault(3, xid=79)
    data = json.loads(await told(port, "status.json", 200, "gpu-xid"))
    problem = data["problems"][0]
    assert (data["node"], problem["object"], problem["pods"]) == ("node-1", "GPU 3", ["default/train"])
    assert data["resources"][GPU]["held"] == 8
    assert data["links"]["gpus"] == list(range(8))
    assert data["gpus"][0]["readings"]["temperature_celsius"] is not None
    assert "page.js" in await told(port, "", 200)


async def test_the_page_can_be_switched_off_and_on_while_it_runs(kubelet, directory, daemon, port):
    config = directory / "config.yaml"
    written = "version: v1\nflags: {{statusPage: {}, podMetrics: false}}\n"
    config.write_text(written.format("true"))
    daemon.start(*flags(port), "--config-file", str(config))
    await serves(kubelet, 8)
    await told(port, "status.json", 200, "--pod-metrics=false")
    config.write_text(written.format("false"))
    assert "--status-page" in await told(port, "", 404)
    assert (await get(port, "livez"))[0] == 200
    config.write_text(written.format("true"))
    await told(port, "status.json", 200, "All 8 GPUs are Healthy")


async def test_readers_that_never_read_cost_probes_and_pods_nothing(kubelet, directory, daemon, port):
    config = directory / "config.yaml"
    config.write_text(SHARED)
    daemon.profile = "dgx2-16"
    daemon.start(*flags(port), "--config-file", str(config))
    await serves(kubelet, 448)
    for page in ("", "status.json", "links.svg", "livez", "metrics"):
        await told(port, page, 200)
    silent = []
    for _ in range(40):  # the limit of connections is 32
        client = await anyio.connect_tcp("127.0.0.1", port)
        await client.send(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        silent.append(client)
    for number in range(10):
        daemon.fault(number % 16, xid=31)
        assert (await get(port, "livez"))[0] == 200
        assert (await kubelet.admit(f"pod-{number}", {GPU: 1})).allocations[0].ids
    for client in silent:
        await client.aclose()
    with anyio.fail_after(PATIENCE):
        await told(port, "status.json", 200, "All 16 GPUs are Healthy")
    assert kubelet.registrations[GPU].total == 1
