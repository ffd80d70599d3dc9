"""Peers of the real process that send or open far more than any kubelet does: they are refused, and the others are served."""

from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest
from betterproto import encode_varint
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from h2.events import StreamEnded

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.codec import BytesCodec
from gpu_plugin.runtime.control import request
from tests.node.daemon import GPU, DaemonProcess, healthy, ids
from tests.node.forked import ROOT
from tests.unit.cluster.api_server import NODE, FakeApiServer
from tests.unit.kubelet.peer import meeting

MANY = 100_000
LONG = 60_000
"""Characters of a foreign text."""

LONGEST_LINE = 2_000
"""Characters of a log line with an excerpt of a foreign text."""


def message(content: bytes) -> bytes:
    """A message whose field 1 is another message, encoded already."""
    return b"\x0a" + encode_varint(len(content)) + content


async def call(path: Path, method: str, content: bytes) -> bytes:
    channel = Channel(path=str(path), codec=BytesCodec())
    try:
        return await UnaryUnaryMethod(channel, method, bytes, bytes)(content, timeout=10)
    finally:
        channel.close()


def socket_of(daemon: DaemonProcess) -> Path:
    [path] = daemon.directory.glob("gpu-plugin-*.sock")
    return path


def resident(daemon: DaemonProcess) -> int:
    """MiB of memory that the process has."""
    assert daemon.process is not None
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) // 1024


async def serves(kubelet: StandInKubelet, daemon: DaemonProcess, pod: str) -> None:
    """The daemon answers the kubelet and commands within seconds."""
    with anyio.fail_after(10):
        await kubelet.admit(pod, {GPU: 1})
        answer = await anyio.to_thread.run_sync(lambda: request(daemon.state, "status"))
        assert answer["resources"]


async def test_an_allocate_of_100_000_containers_is_refused_with_the_bound(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    before = resident(daemon)
    for container in (b"", message(ids(kubelet)[0].encode())):
        with pytest.raises(GRPCError) as refused:
            await call(socket_of(daemon), wire.ALLOCATE, message(container) * MANY)
        assert refused.value.status is Status.INVALID_ARGUMENT
        assert str(wire.MAX_CONTAINERS) in str(refused.value.message)
    assert await call(socket_of(daemon), wire.PREFERRED, message(b"") * MANY) == message(b""), (
        "an error would fail the pod: the choice is left to the kubelet"
    )
    await serves(kubelet, daemon, "pod")
    assert resident(daemon) < before + 100


def longest_line(daemon: DaemonProcess) -> int:
    return max(map(len, daemon.log.read_text().splitlines()))


async def test_a_long_refusal_of_the_kubelet_is_cut_in_the_log_and_the_events(kubelet, daemon):
    kubelet.fail_next_register("refuse", "no room " + "x" * LONG)
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    await daemon.said("refused: no room x")
    await daemon.said(" more characters)")
    assert longest_line(daemon) < LONGEST_LINE
    events = await anyio.to_thread.run_sync(lambda: request(daemon.state, "events"))
    assert any("refused: no room x" in event["text"] for event in events["events"])
    assert max(len(event["text"]) for event in events["events"]) < LONGEST_LINE


async def test_a_long_error_text_of_the_api_server_is_cut_in_the_log(kubelet, daemon):
    async with FakeApiServer() as api:
        daemon.directory.joinpath("default").write_text("version: v1\n")
        flags = (f"--config-file-srcdir={daemon.directory}", f"--node-name={NODE}")
        daemon.start(*flags, f"--kubeconfig={api.kubeconfig(daemon.directory)}")
        await kubelet.wait_for(healthy(kubelet, 8))
        await api.until(lambda: api.watchers)
        api.event("ERROR", {"code": 500, "message": "etcd is away " + "x" * LONG})
        await daemon.said("etcd is away x")
        assert longest_line(daemon) < LONGEST_LINE


async def test_3_000_files_that_cannot_be_removed_are_one_line(kubelet, daemon):
    for number in range(3_000):
        (daemon.directory / f"gpu-plugin-{'x' * 60}-{number:04}.sock").mkdir()
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    lines = [line for line in daemon.log.read_text().splitlines() if "cannot be removed" in line]
    assert len(lines) == 1
    assert "3000" in lines[0]
    assert "-0000.sock" in lines[0]
    assert longest_line(daemon) < LONGEST_LINE


STREAMS = 5_000


async def test_thousands_of_streams_that_nobody_reads_cost_little_and_the_kubelet_keeps_its_own(kubelet, daemon):
    """The peers read nothing, and open as many streams as HTTP/2 lets them on each connection."""
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    before, opened = resident(daemon), 0
    async with AsyncExitStack() as peers:
        while opened < STREAMS:
            peer = await peers.enter_async_context(meeting(socket_of(daemon)))
            for _ in range(100):
                stream = peer.begin(path=wire.LIST_AND_WATCH)
                peer.h2.send_data(stream, b"\0\0\0\0\0", end_stream=True)
                opened += 1
            await peer.met()
        await peer.until(StreamEnded)  # the daemon ends the oldest streams
        assert resident(daemon) - before < 25
        daemon.fault(7, xid=79)
        await kubelet.wait_for(healthy(kubelet, 7))
        assert kubelet.registrations[GPU].total == 1
        await serves(kubelet, daemon, "pod")
        lines = [line for line in daemon.log.read_text().splitlines() if "ListAndWatch streams are open" in line]
        assert 0 < sum("WARNING" in line for line in lines) < STREAMS / 100
        await kubelet.restart()
        await kubelet.wait_for(healthy(kubelet, 7))


async def test_want_of_descriptors_while_a_listener_closes_is_one_line(kubelet, daemon):
    daemon.start("--log-level", "info", descriptors=60)
    await kubelet.wait_for(healthy(kubelet, 8))
    async with AsyncExitStack() as peers:
        path = socket_of(daemon)
        for _ in range(80):
            await peers.enter_async_context(meeting(path))
        await daemon.said("Too many open files")
        path.unlink()
        await daemon.said("our socket is gone")
        await anyio.sleep(1.5)  # asyncio tries again a second later
    await kubelet.wait_for(healthy(kubelet, 8))
    log = daemon.log.read_text()
    assert "Traceback" not in log
    assert log.count(f"connections to {path} wait") == 1


NO_LOCKS = """
import errno, fcntl, os

def flock(descriptor, how):
    raise OSError(errno.{error}, os.strerror(errno.{error}))

fcntl.flock = flock
"""


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP"])
async def test_a_file_system_without_locks_leaves_commands_answered(kubelet, daemon, tmp_path, error):
    (tmp_path / "sitecustomize.py").write_text(NO_LOCKS.format(error=error))
    daemon.start(environ={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, cold=True)
    await kubelet.wait_for(healthy(kubelet, 8))
    await serves(kubelet, daemon, "pod")
    log = daemon.log.read_text()
    assert log.count("cannot be locked, so a second daemon would not be detected") == 2, (
        "the state and the kubelet's directory"
    )
    assert "commands cannot reach" not in log


async def test_an_allocate_of_a_million_ids_is_refused(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    million = message(b"") * 10 * MANY
    for method, content in ((wire.ALLOCATE, message(million)), (wire.PRE_START, million)):
        with pytest.raises(GRPCError) as refused:
            await call(socket_of(daemon), method, content)
        assert refused.value.status is Status.INVALID_ARGUMENT
        assert str(wire.MAX_IDS) in str(refused.value.message)
    await serves(kubelet, daemon, "pod")
