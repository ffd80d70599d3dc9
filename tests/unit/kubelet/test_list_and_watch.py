"""The list of devices and the streams that carry it."""

import threading
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest
from grpclib.client import Channel, UnaryStreamMethod
from msgspec.structs import replace

from demo.stand_in_kubelet.journal import EventKind
from gpu_plugin.kubelet import feed, wire
from gpu_plugin.kubelet.codec import BytesCodec
from gpu_plugin.kubelet.feed import ListFeed
from gpu_plugin.kubelet.service import DevicePluginService
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.runtime.pulse import Pulse
from tests.unit.kubelet.serving import GPU, devices, registered, serving, view


def lists(kubelet):
    return [event for event in kubelet.events if event.kind is EventKind.LIST]


async def test_the_first_list_comes_at_once_and_whole(kubelet, directory):
    async with serving(directory, 16):
        await kubelet.wait_for(registered(kubelet))
        table = kubelet.resources[GPU]
        assert table.capacity == 16
        assert set(table.numa.values()) == {(0,), (1,)}


async def test_an_empty_list_is_sent_too(kubelet, directory):
    async with serving(directory, 0):
        await kubelet.wait_for(lambda: lists(kubelet))
        assert kubelet.resources[GPU].capacity == 0


async def test_a_change_sends_the_whole_list_and_no_change_sends_nothing(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        plugin.fail(3)
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 7)
        assert kubelet.resources[GPU].capacity == 8
        sent = len(lists(kubelet))
        plugin.fail(3, "another reason")  # nothing the kubelet could see
        plugin.publish(tuple(replace(d) for d in plugin.store.current.resources[GPU].resource.devices))
        plugin.fail(4)
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 6)
        assert len(lists(kubelet)) == sent + 1


async def test_a_burst_of_changes_is_sent_as_few_lists_and_ends_true(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        sent = len(lists(kubelet))
        for turn in range(200):
            plugin.fail(turn % 8, "sick" if turn < 196 else "")
            await anyio.lowlevel.checkpoint()
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 4)
        assert len(lists(kubelet)) - sent <= 5


async def open_stream(path):
    """Open another ListAndWatch. Return the channel, the stream, and its first list."""
    channel = Channel(path=str(path), codec=BytesCodec())
    method = UnaryStreamMethod(channel, wire.LIST_AND_WATCH, bytes, bytes)
    stream = method.open()
    await stream.__aenter__()
    await stream.send_message(wire.EMPTY, end=True)
    return channel, stream, await stream.recv_message()


async def test_every_open_stream_gets_every_change_and_closed_ones_take_none(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        opened = [await open_stream(plugin.sockets[0]) for _ in range(3)]
        for channel, stream, _ in opened[:2]:
            await stream.cancel()
            channel.close()
        plugin.fail(5)
        with anyio.fail_after(1):
            second = await opened[2][1].recv_message()
        assert b"Unhealthy" in second
        assert b"Unhealthy" not in opened[2][2]
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 7)
        assert kubelet.registrations[GPU].total == 1  # a debugging client's leaving is not the kubelet's
        await opened[2][1].cancel()
        opened[2][0].close()


class TestFeed:
    async def test_a_list_too_long_for_one_message_is_refused_and_said(self, monkeypatch, caplog):
        monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 2_000)
        store = SnapshotStore()
        store.publish({GPU: view(devices(8))})
        fed = ListFeed(GPU, store)
        await fed.refresh()
        good = fed.payload
        store.publish({GPU: view(devices(100))})
        assert not await fed.refresh()
        assert fed.payload == good
        assert "100 devices" in caplog.text
        assert "the last list stays" in caplog.text

    async def test_a_first_list_too_long_offers_nothing(self, monkeypatch, caplog):
        monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 100)
        store = SnapshotStore()
        store.publish({GPU: view(devices(8))})
        fed = ListFeed(GPU, store)
        assert await fed.refresh()
        assert await fed.newer(0) == (1, b"")
        assert "no device is offered" in caplog.text

    async def test_a_resource_that_is_gone_has_an_empty_list(self):
        store = SnapshotStore()
        store.publish({GPU: view(devices(2))})
        fed = ListFeed(GPU, store)
        await fed.refresh()
        store.publish({})
        await fed.refresh()
        assert fed.payload == b""


async def test_a_list_is_encoded_on_one_thread_at_a_time_also_after_a_cancellation(monkeypatch):
    monkeypatch.setattr(feed, "OFF_LOOP_ENCODINGS", 1)
    original, begun, free = wire.ListEncoder.encode, threading.Event(), threading.Event()
    busy: list[object] = []
    together: list[object] = []

    def slow(encoder, asked):
        together.extend(busy)
        busy.append(asked)
        begun.set()
        assert free.wait(5)
        busy.remove(asked)
        return original(encoder, asked)

    monkeypatch.setattr(wire.ListEncoder, "encode", slow)
    store = SnapshotStore()
    store.publish({GPU: view(devices(4))})
    made = ListFeed(GPU, store)
    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def cancelled():
            with scope:
                await made.refresh()

        tasks.start_soon(cancelled)
        await anyio.to_thread.run_sync(begun.wait)
        scope.cancel()
        store.publish({GPU: view(devices(3))})
        tasks.start_soon(made.refresh)
        await anyio.wait_all_tasks_blocked()
        free.set()
    assert not together
    assert made.payload == original(wire.ListEncoder(), devices(3))


@pytest.mark.parametrize("sick_first", [False, True])
async def test_what_is_published_while_a_list_is_encoded_on_a_thread_is_not_lost(monkeypatch, sick_first):
    """The list that is being encoded may equal the former list. A change during the encoding must still be sent."""
    monkeypatch.setattr(feed, "OFF_LOOP_ENCODINGS", 2)
    store, listed = SnapshotStore(), devices(4)
    sick = (replace(listed[0], reason="Xid 79"), *listed[1:])
    before, after = (sick, listed) if sick_first else (listed, sick)
    store.publish({GPU: view(before)})
    made = ListFeed(GPU, store)
    encoding, going, original = threading.Event(), threading.Event(), made._encoder.encode

    def slow(asked):
        encoding.set()
        going.wait(5)
        return original(asked)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        version, payload = await made.newer(0)
        monkeypatch.setattr(made._encoder, "encode", slow)
        store.publish(
            {GPU: view(tuple(replace(device, index="other") for device in before))}
        )  # the same to the kubelet
        await anyio.to_thread.run_sync(encoding.wait)
        store.publish({GPU: view(after)})
        going.set()
        with anyio.fail_after(5):
            _, newest = await made.newer(version)
        assert newest == wire.ListEncoder().encode(after) != payload
        tasks.cancel_scope.cancel()


async def test_the_same_list_is_sent_once_more_where_that_is_asked_for(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        kubelet._list_again = lambda: True  # the checkpoint is out of date
        kubelet._registry._list_again = kubelet._list_again
        plugin.store.resend("nvidia.com/other")
        plugin.store.resend(GPU)
        await kubelet.wait_for(lambda: len(lists(kubelet)) == 2)
        assert lists(kubelet)[1].changed == {}
        plugin.fail(0)
        await kubelet.wait_for(lambda: len(lists(kubelet)) == 3)


async def test_a_stream_that_is_opened_while_all_end_is_ended_too(directory):
    async with serving(directory, 1, register=False) as plugin:
        service = DevicePluginService(ListFeed(GPU, plugin.store), plugin.store, Pulse())
        service.end_streams()

        class Late:
            _stream = type("H2", (), {"connection": object()})

            async def send_message(self, _):
                pytest.fail("a list on a stream that should have ended")

        async def nothing(_):
            return b""

        plugin_message = pytest.MonkeyPatch()
        plugin_message.setattr("gpu_plugin.kubelet.service.received", nothing)
        try:
            with anyio.fail_after(1):
                await service._list_and_watch(cast("Any", Late()))
        finally:
            plugin_message.undo()
