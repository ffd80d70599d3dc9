"""Probes and scrapes of the real process, from its start to its end."""

import re
import socket
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.cli import main
from tests.node.daemon import GPU, healthy
from tests.unit.cluster.api_server import NODE, FakeApiServer


async def get(port, page, host="127.0.0.1"):
    """Status, headers and body of a page, asked for under this name."""
    with anyio.fail_after(10):
        async with await anyio.connect_tcp("127.0.0.1", port) as client:
            await client.send(f"GET /{page} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            received = b""
            try:
                while True:
                    received += await client.receive()
            except anyio.EndOfStream:
                pass
    head, _, body = received.decode().partition("\r\n\r\n")
    return int(head.split()[1]), head, body


PATIENCE = 30.0
"""Seconds to wait for a change on a busy machine. On an idle machine a daemon needs one second."""


async def serves(kubelet, count):
    """Wait until `count` GPUs are allocatable."""
    await kubelet.wait_for(healthy(kubelet, count), timeout=PATIENCE)


async def told(port, page, status, text="", seconds=PATIENCE):
    """The body of a page, once it has that status and text."""
    last: object = None
    with anyio.move_on_after(seconds):
        while True:
            try:
                last = code, _, body = await get(port, page)
            except OSError as error:
                last = error
            else:
                if code == status and text in body:
                    return body
            await anyio.sleep(0.02)
    raise AssertionError(f"/{page} never was {status} with {text!r}; the last time: {last}")


def flags(port, *more):
    return f"--http-address=127.0.0.1:{port}", *more


async def test_the_life_of_a_daemon_as_its_probes_see_it(directory, daemon, port):
    daemon.start(*flags(port))
    await told(port, "startupz", 200, "startupz check passed")
    away = await told(port, "readyz", 503, f"{GPU}: waiting for the kubelet: no {directory}/kubelet.sock yet")
    assert "[+]driver ok" in away
    assert (await get(port, "livez"))[0] == 200
    kubelet = StandInKubelet(directory)
    async with kubelet:
        await serves(kubelet, 8)
        assert "[+]registrations ok" in await told(port, "readyz", 200)
        assert "[+]sockets ok" in await told(port, "livez", 200)
        await kubelet.restart()
        await serves(kubelet, 8)
        await told(port, "readyz", 200)
        kubelet.check()
    lost = await told(port, "readyz", 503, "s ago)")
    assert "[-]registrations failed" in lost
    for page in ("livez", "startupz"):
        assert (await get(port, page))[0] == 200
    async with StandInKubelet(directory) as another:
        await serves(another, 8)
        await told(port, "readyz", 200)
        status, seconds = await daemon.stop()
        assert status == 0
        assert seconds < 1
        with pytest.raises(OSError):
            await get(port, "livez")


async def test_the_metrics_are_those_of_the_command(kubelet, daemon, port, capsys):
    daemon.start(*flags(port))
    await serves(kubelet, 8)
    daemon.fault(3, xid=79)
    await serves(kubelet, 7)
    body = await told(port, "metrics", 200, 'gpu_plugin_devices{resource="nvidia.com/gpu",state="unhealthy"} 1')
    assert main(["status", "--metrics", "--state-dir", str(daemon.state)]) == 0
    of_listener = {"gpu_plugin_event_loop_lag_seconds", "gpu_plugin_scrape_duration_seconds"}
    assert helped(body) - helped(capsys.readouterr().out) <= of_listener
    _, head, _ = await get(port, "metrics")
    assert "Content-Type: text/plain; version=0.0.4; charset=utf-8" in head


def helped(text):
    """The families of a text."""
    return set(re.findall(r"^# HELP (\w+) ", text, re.MULTILINE))


async def test_a_flood_costs_the_kubelet_nothing_and_leaves_nothing_behind(kubelet, daemon, port):
    daemon.start(*flags(port))
    await serves(kubelet, 8)
    for page in ("livez", "readyz", "metrics"):
        await told(port, page, 200)

    async def flood():
        idle = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(200)]
        turn = anyio.Semaphore(16)

        async def one(page):
            async with turn:
                await get(port, page)

        async with anyio.create_task_group() as tasks:
            for page in ("livez", "metrics", "nowhere") * 100:
                tasks.start_soon(one, page)
            allocated = await kubelet.admit("pod", {GPU: 1})
            assert allocated.allocations[0].ids
            kubelet.release("pod")
        assert (await get(port, "livez"))[0] == 200
        for client in idle:
            await client.aclose()

    await flood()  # the first one grows what is kept for the next
    assert daemon.process is not None
    before = descriptors(daemon.process.pid)
    resident = memory(daemon.process.pid)
    for _ in range(3):
        await flood()
    with anyio.fail_after(PATIENCE):
        while descriptors(daemon.process.pid) > before:
            await anyio.sleep(0.02)
    assert memory(daemon.process.pid) - resident < 2
    assert kubelet.registrations[GPU].total == 1


async def test_idle_clients_leave_descriptors_for_the_plugins_own_sockets_where_there_are_few(kubelet, daemon, port):
    daemon.start(*flags(port), descriptors=40)
    await serves(kubelet, 8)
    idle = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(100)]
    for _ in range(3):
        assert "[+]sockets ok\n" in await told(port, "livez", 200)
        await kubelet.restart()  # which takes new sockets on either side
        await serves(kubelet, 8)
    await told(port, "readyz", 200)
    for client in idle:
        await client.aclose()
    assert "connections for probes and metrics cannot be accepted now" not in daemon.log.read_text()


async def test_an_address_in_use_keeps_no_gpu_back(kubelet, daemon):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        daemon.start(*flags(port))
        await serves(kubelet, 8)
        await daemon.said(f"--http-address: cannot listen on 127.0.0.1:{port}: Address already in use", PATIENCE)
    await told(port, "livez", 200)
    assert daemon.log.read_text().count("ERROR") == 1


async def test_without_the_option_there_is_no_listener_and_no_library_for_it(kubelet, daemon):
    daemon.start()
    await serves(kubelet, 8)
    assert daemon.process is not None
    assert "probes and metrics" not in daemon.log.read_text()
    inodes = {
        match[1] for link in descriptor_links(daemon.process.pid) if (match := re.fullmatch(r"socket:\[(\d+)\]", link))
    }
    for table in ("tcp", "tcp6"):
        rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        assert not inodes & {row.split()[9] for row in rows}


async def test_without_a_good_file_of_the_label_it_is_alive_has_started_and_says_what_is_wrong(
    kubelet, directory, daemon, port
):
    configs = directory / "configs"
    configs.mkdir()
    (configs / "a100").write_text("version: v1\nflags: {migStrategy: some}\n")
    async with FakeApiServer() as api:
        api.labels = {"nvidia.com/device-plugin.config": "a100"}
        kubeconfig = f"--kubeconfig={api.kubeconfig(directory)}"
        daemon.start(*flags(port, f"--config-file-srcdir={configs}", f"--node-name={NODE}", kubeconfig))
        await daemon.said("nothing is served until there is a valid configuration", PATIENCE)
        assert (await get(port, "livez"))[0] == 200
        wrong = f"{configs}/a100:2: flags.migStrategy: 'some' is not one of none, single, mixed"
        assert await told(port, "readyz", 503) == f"[-]configuration failed: {wrong}\nreadyz check failed\n"
        # A restart would bring no better file.
        assert await told(port, "startupz", 200) == f"[+]configuration ok: {wrong}\nstartupz check passed\n"
        code, _, body = await get(port, "metrics")
        assert (code, body) == (503, f"there are no metrics yet: {wrong}\n")
        (configs / "a100").write_text("version: v1\n")
        await serves(kubelet, 8)
        for page in ("startupz", "livez", "readyz", "metrics"):
            await told(port, page, 200)
        assert (await daemon.stop())[0] == 0


async def test_a_signal_while_the_label_is_awaited_ends_it_at_once(directory, daemon, port):
    configs = directory / "configs"
    configs.mkdir()
    async with FakeApiServer() as api:
        api.silent = True
        kubeconfig = f"--kubeconfig={api.kubeconfig(directory)}"
        daemon.start(*flags(port, f"--config-file-srcdir={configs}", f"--node-name={NODE}", kubeconfig))
        await told(port, "livez", 200)
        status, seconds = await daemon.stop()
    assert status == 0
    assert seconds < 1


LABEL = "nvidia.com/device-plugin.config"


def descriptor_links(pid):
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:  # closed since it was listed
            continue
    return links


def descriptors(pid):
    return len(descriptor_links(pid))


def memory(pid):
    """Resident memory in MiB."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024
