"""Faulty peers lose their own connection at most, and no resources stay behind."""

import asyncio
import errno
import logging
import os
import socket
import stat
import struct
import time
from contextlib import closing, suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from h2.events import DataReceived, StreamEnded

from gpu_plugin.kubelet import connection, messages, wire
from gpu_plugin.kubelet.codec import BytesCodec
from gpu_plugin.kubelet.server import Shortages, handle_shortages
from gpu_plugin.kubelet.service import MAX_STREAMS
from tests.unit.kubelet.peer import meeting
from tests.unit.kubelet.serving import GPU, devices, registered, serving
from tests.unit.kubelet.test_allocation import call

ONE_ID = messages.AllocateRequest([messages.ContainerAllocateRequest([devices(1)[0].id])])


async def answers(plugin):
    """The server does its work."""
    assert messages.decode(
        messages.AllocateResponse, await call(plugin.sockets[0], wire.ALLOCATE, bytes(ONE_ID))
    ).container_responses


def frame(flag: int, data: bytes, declared: int | None = None) -> bytes:
    return struct.pack(">BI", flag, len(data) if declared is None else declared) + data


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (frame(1, b"squeezed"), Status.UNIMPLEMENTED, "uncompressed"),
        (frame(0, b"", 2**32 - 1), Status.RESOURCE_EXHAUSTED, "longer than"),
        (frame(0, b"", connection.LONGEST_REQUEST + 1), Status.RESOURCE_EXHAUSTED, "longer than"),
        (frame(0, b"abc", 80), Status.INVALID_ARGUMENT, "within its message"),
        (b"\x00\x00", Status.INVALID_ARGUMENT, "within its message"),
        (b"", Status.INVALID_ARGUMENT, "before its message"),
    ],
)
async def test_a_message_that_cannot_be_taken_is_refused_in_a_sentence(plugin, caplog, sent, status, words):
    async with meeting(plugin.sockets[0]) as peer:
        stream = peer.begin()
        peer.h2.send_data(stream, sent, end_stream=True)
        code, text = await peer.status()
        assert (code, words in text) == (status.value, True), text
    assert "Traceback" not in caplog.text
    await answers(plugin)


@pytest.mark.parametrize("identifier", ["GPU-" + "x" * 400_000, "é" * 400_000])
async def test_an_unknown_id_of_any_length_holds_nobody_up(plugin, identifier):
    request = messages.AllocateRequest([messages.ContainerAllocateRequest([identifier])])
    began = time.monotonic()
    with pytest.raises(GRPCError, match="unknown device: ") as caught:
        await call(plugin.sockets[0], wire.ALLOCATE, bytes(request))
    assert time.monotonic() - began < 2
    assert len(caught.value.message or "") < 300


async def test_of_requests_that_were_half_sent_nothing_is_kept_after_their_connection(plugin, connections):
    async with meeting(plugin.sockets[0]) as peer:
        peer.h2.send_data(peer.begin(), frame(0, b"x" * 10_000, 20_000))
        await peer.flush()
        with anyio.fail_after(5):
            while not (connections and connections[-1].processor.streams):
                await anyio.lowlevel.checkpoint()
    (half,) = connections
    with anyio.fail_after(5):
        while half.processor.streams:
            await half.lost.wait(0.02)


async def test_requests_that_are_reset_before_they_begin_are_dropped(plugin, connections):
    async with meeting(plugin.sockets[0]) as peer:
        for _ in range(50):
            peer.h2.reset_stream(peer.begin())
        await peer.flush()
        await peer.met()
        (reset,) = connections
        with anyio.fail_after(5):
            while reset.processor.streams or not reset.handler.check_closed():
                await anyio.lowlevel.checkpoint()
    await answers(plugin)


async def test_another_protocol_costs_that_connection_only(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        async with meeting(plugin.sockets[0]) as peer:
            peer.writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await peer.rest()
        plugin.fail(1)
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 7)
        assert kubelet.registrations[GPU].total == 1


async def test_the_socket_is_for_its_user_alone_from_the_moment_it_is_there(directory, monkeypatch):
    seen, original = [], socket.socket.bind

    class Spied(socket.socket):
        def bind(self, address):
            original(self, address)
            seen.append(stat.S_IMODE(Path(address).stat().st_mode))

    monkeypatch.setattr(socket, "socket", Spied)
    monkeypatch.setattr(os, "chmod", lambda *_: pytest.fail("a mode is set by path"))
    async with serving(directory, 1, register=False) as made:
        while not made.sockets:
            await made.look.wait(1)
        assert seen == [0o600]


async def test_want_of_descriptors_is_said_in_one_line_for_each_socket(caplog, tmp_path):
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    others: list[dict[str, object]] = []
    try:
        loop.set_exception_handler(lambda _, context: others.append(context))
        handle_shortages(loop)
        handle_shortages(loop)
        with (
            closing(socket.socket(socket.AF_UNIX)) as ours,
            closing(socket.socket(socket.AF_UNIX)) as control,
            closing(socket.socket()) as listener,
            caplog.at_level(logging.INFO),
        ):
            ours.bind(str(tmp_path / "gpu.sock"))
            control.bind(str(tmp_path / "control.sock"))
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            for _ in range(300):
                for each in (ours, control, listener):
                    loop.call_exception_handler({"exception": OSError(errno.EMFILE, "too many"), "socket": each})
        loop.call_exception_handler({"message": "something else"})
        assert isinstance(loop.get_exception_handler(), Shortages)
    finally:
        loop.set_exception_handler(before)
    assert [record.getMessage() for record in caplog.records] == [
        f"connections to {where} wait: too many"
        for where in (tmp_path / "gpu.sock", tmp_path / "control.sock", f"127.0.0.1:{port}")
    ]
    assert others == [{"message": "something else"}]


async def test_a_client_that_asked_for_options_later_does_not_stand_for_the_kubelet(kubelet, directory):
    watching = anyio.Event()

    async def foreign(path):
        channel = Channel(path=str(path), codec=BytesCodec())
        await UnaryUnaryMethod(channel, wire.OPTIONS, bytes, bytes)(b"")
        with suppress(StreamTerminatedError):  # it is cut where it does not take the end of its stream for one
            async with UnaryStreamMethod(channel, wire.LIST_AND_WATCH, bytes, bytes).open() as stream:
                await stream.send_message(b"", end=True)
                while await stream.recv_message() is not None:
                    watching.set()
                await stream.recv_trailing_metadata()
        channel.close()

    async with serving(directory) as plugin, anyio.create_task_group() as tasks:
        await kubelet.wait_for(registered(kubelet))
        tasks.start_soon(foreign, plugin.sockets[0])
        await watching.wait()
        await kubelet.drop_stream(GPU)
        await kubelet.wait_for(registered(kubelet, 2), timeout=5)
        tasks.cancel_scope.cancel()


async def _open_streams(peer, count):
    for _ in range(count):
        peer.h2.send_data(peer.begin(path=wire.LIST_AND_WATCH), frame(0, b""), end_stream=True)
    await peer.met()


async def test_the_kubelets_stream_is_served_though_others_were_first(kubelet, directory):
    kubelet.delay_register(0.5)
    async with serving(directory) as plugin:
        while not plugin.sockets:
            await plugin.look.wait(0.05)
        async with meeting(plugin.sockets[0]) as peer:
            await _open_streams(peer, MAX_STREAMS)
            await kubelet.wait_for(registered(kubelet))
            await _open_streams(peer, 3 * MAX_STREAMS)
            plugin.fail(0)
            await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 7)
        assert kubelet.registrations[GPU].total == 1


async def test_without_a_stream_of_the_kubelet_the_newest_one_takes_the_place_of_the_oldest(directory):
    async with serving(directory, 8, register=False) as plugin:
        while not plugin.sockets:
            await plugin.look.wait(0.05)
        async with meeting(plugin.sockets[0]) as old, meeting(plugin.sockets[0]) as new:
            await _open_streams(old, MAX_STREAMS)
            await _open_streams(new, 1)
            assert await old.status() == (0, "")
            assert isinstance(await new.until(DataReceived), DataReceived)
            ended = [event for event in old.events if isinstance(event, StreamEnded)]
            assert len(ended) == 1


async def test_a_new_stream_of_the_kubelet_takes_the_place_of_others_first_and_then_of_its_oldest(kubelet, directory):
    def ended(peer):
        return [event.stream_id for event in peer.events if isinstance(event, StreamEnded)]

    kubelet.delay_register(30)  # a client that asks for the options in this time may be a kubelet
    async with serving(directory) as plugin:
        while not plugin.sockets:
            await plugin.look.wait(0.05)
        async with meeting(plugin.sockets[0]) as own, meeting(plugin.sockets[0]) as other:
            own.h2.send_data(own.begin(path=wire.OPTIONS), frame(0, b""), end_stream=True)
            await own.until(StreamEnded)
            [options] = ended(own)
            await _open_streams(own, 1)
            await _open_streams(other, MAX_STREAMS - 1)
            await _open_streams(own, 1)
            with anyio.fail_after(5):
                await other.until(StreamEnded)
            assert (ended(other), ended(own)) == ([1], [options])
            await _open_streams(own, MAX_STREAMS - 1)
            with anyio.fail_after(5):
                while len(ended(own)) < 2:
                    own.take(await own.reader.read(65536))
            assert ended(own) == [options, options + 2]
