"""The end: streams closed in order, GOAWAY, sockets gone if they are ours. And nothing left behind by a long life."""

import asyncio
import os
import socket

import anyio
import pytest
from grpclib.client import Channel, UnaryUnaryMethod
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated

from demo.stand_in_kubelet.journal import EventKind
from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.codec import BytesCodec
from tests.unit.kubelet.peer import left_behind, meeting, resident, settle
from tests.unit.kubelet.serving import GPU, registered, serving
from tests.unit.kubelet.test_list_and_watch import open_stream

ENDURANCE = int(os.environ.get("GPU_PLUGIN_ENDURANCE", "1"))
"""How long the lives are of which nothing may be left behind: five are 1,000 streams, or 131 restarts of the kubelet."""

MIB = 1024 * 1024


async def test_the_stream_ends_in_order_and_the_socket_goes(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        plugin.scope.cancel()
        await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 0, timeout=1)
        ended = next(e for e in kubelet.events if e.kind is EventKind.STREAM_ENDED)
        assert ended.text == "OK"
        assert plugin.sockets == []


async def test_a_socket_that_somebody_put_in_the_place_of_ours_stays(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        path = plugin.sockets[0]
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            plugin.scope.cancel()
            await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 0, timeout=1)
            assert path.exists()


async def test_a_peer_that_does_not_read_does_not_hold_up_the_end(directory):
    async with serving(directory, 10_000, register=False) as plugin:
        while not plugin.sockets:
            await plugin.look.wait(1)
        raw = socket.socket(socket.AF_UNIX)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, str(plugin.sockets[0]))
        channel, stream, _ = await open_stream(plugin.sockets[0])
        with anyio.fail_after(1):
            plugin.scope.cancel()
            while plugin.sockets:
                await plugin.look.wait(0.05)
        await stream.cancel()
        channel.close()
        raw.close()


async def test_connections_are_said_goodbye_to(plugin):
    async with meeting(plugin.sockets[0]) as peer:
        await peer.met()
        plugin.scope.cancel()
        [goodbye] = [event for event in await peer.rest() if isinstance(event, ConnectionTerminated)]
        assert goodbye.error_code == ErrorCodes.NO_ERROR


async def test_a_peer_that_does_not_read_is_cut_off(plugin, connections):
    async with meeting(plugin.sockets[0]) as peer:
        await peer.met()
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        (cut_off,) = connections
        cut_off.transport.write(b"\0" * (8 << 20))  # more than a socket's buffer
        plugin.scope.cancel()
        with anyio.fail_after(2):
            while cut_off.open_connections:
                await cut_off.lost.wait()


async def test_a_long_lived_connection_remembers_few_of_its_streams(plugin, connections):
    channel = Channel(path=str(plugin.sockets[0]), codec=BytesCodec())
    options: UnaryUnaryMethod[bytes, bytes] = UnaryUnaryMethod(channel, wire.OPTIONS, bytes, bytes)
    for _ in range(600):
        await options(b"")
    (served,) = connections
    assert len(served.connection._connection._closed_streams) <= 256
    channel.close()


async def test_everything_old_is_let_go_of_before_it_registers_again(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        for times in range(2, 5):
            plugin.sockets[0].unlink()
            await kubelet.wait_for(registered(kubelet, times), timeout=2)
        assert kubelet.registrations[GPU].most_in_flight == 1
        assert len(plugin.sockets) == 1


async def test_streams_come_and_go_without_a_trace(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        channel = Channel(path=str(plugin.sockets[0]), codec=BytesCodec())
        await channel.__connect__()
        channel.close()

        async def cycle():
            connection, stream, first = await open_stream(plugin.sockets[0])
            assert first
            await stream.cancel()
            connection.close()

        for _ in range(50):
            await cycle()
        await settle()
        before, memory = left_behind(), resident()
        for _ in range(190 * ENDURANCE):
            await cycle()
        await settle()
        after = left_behind()
        assert after[0] <= before[0] + 1
        assert after[1:] == before[1:]
        assert resident() - memory < (2.5 + 0.3 * ENDURANCE) * MIB
        assert kubelet.registrations[GPU].total == 1


@pytest.mark.timeout(120)
async def test_kubelet_restarts_leave_nothing_behind(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        for times in range(2, 12):
            await kubelet.restart(orderly=bool(times % 2))
            await kubelet.wait_for(registered(kubelet, times))
        before, memory = left_behind(), resident()
        restarts = 11 + 24 * ENDURANCE
        for times in range(12, restarts + 1):
            await kubelet.restart(orderly=bool(times % 2))
            await kubelet.wait_for(registered(kubelet, times))
        after = left_behind()
        assert after[0] <= before[0] + 2
        assert after[1] == before[1]
        assert after[2] <= before[2] + 2
        assert resident() - memory < (2.5 + 0.7 * ENDURANCE) * MIB
        assert len(plugin.sockets) == 1
        assert kubelet.registrations[GPU].total == restarts
        kubelet.check()
