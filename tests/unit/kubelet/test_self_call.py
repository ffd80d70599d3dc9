"""Calls of our own server as by the kubelet, and the stored state of each resource's registration."""

import asyncio
import errno
import logging
import os
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import AsyncMock

import anyio
import pytest

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.kubelet import endpoint
from gpu_plugin.kubelet.bounded_channel import BoundedChannel
from gpu_plugin.kubelet.endpoint import Endpoints, Shared
from gpu_plugin.kubelet.registrations import UNHEARD, UNREGISTERED, Registrations, ResourceRegistration
from gpu_plugin.kubelet.self_call import ShortageError, self_call
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.pulse import Pulse
from tests.unit.kubelet.serving import GPU, devices, registered, serving, view
from tests.unit.kubelet.test_list_and_watch import open_stream

OLD, NEW = Path("/dp/1.sock"), Path("/dp/2.sock")


async def test_a_self_call_is_never_taken_for_the_kubelets_connection(kubelet, directory):
    """Neither does it keep a lost stream from being noticed, nor does its end look like one."""
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        for _ in range(20):
            assert await self_call(plugin.sockets[0]) == ""
        plugin.look.ring()  # a registration that is over is noticed now
        await anyio.sleep(0.05)
        assert kubelet.registrations[GPU].total == 1
        await kubelet.drop_stream(GPU)
        await kubelet.wait_for(registered(kubelet, 2), timeout=1)
        assert await self_call(plugin.sockets[0]) == ""


async def test_self_calls_before_the_kubelets_first_stream_change_nothing(directory):
    """The kubelet's stream counts as its own although others asked for options before it did."""
    async with serving(directory) as plugin, StandInKubelet(directory) as kubelet:
        kubelet.delay_register(0.2)
        await kubelet.wait_for(lambda: GPU in kubelet.registrations)
        assert await self_call(plugin.sockets[0]) == ""
        await kubelet.wait_for(registered(kubelet))
        assert kubelet.registrations[GPU].total == 1
        kubelet.check()


async def test_no_connection_is_left_behind(directory):
    async with serving(directory, register=False) as plugin:
        with anyio.fail_after(5):
            while not plugin.sockets:
                await plugin.look.wait(0.01)
        before = sum(1 for _ in Path("/proc/self/fd").iterdir())
        for _ in range(20):
            await self_call(plugin.sockets[0])
        with anyio.fail_after(5):
            while sum(1 for _ in Path("/proc/self/fd").iterdir()) > before:
                await anyio.sleep(0.002)


@pytest.mark.parametrize("patience", [0.05])
async def test_what_is_told_of_a_server_that_does_not_answer(directory, patience, monkeypatch):
    path = directory / "x.sock"
    assert await self_call(path, patience) == f"no answer on {path}: No such file or directory"
    path.write_text("")
    assert await self_call(path, patience) == f"no answer on {path}: Connection refused"
    refused = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(BoundedChannel, "__connect__", AsyncMock(side_effect=refused))  # root may connect to any socket
    said = await self_call(path, patience)
    monkeypatch.undo()
    assert said.startswith(f"{path}: Permission denied: ")
    assert "SELinux" in said
    path.unlink()
    conversations = []
    server = await asyncio.start_unix_server(lambda *streams: conversations.append(streams), path)
    assert await self_call(path, patience) == "it did not answer within 0.05 s"
    server.close()
    path.unlink(missing_ok=True)
    hang_up = await asyncio.start_unix_server(lambda _, writer: writer.transport.abort(), path)
    assert await self_call(path, 5) != ""
    hang_up.close()
    for _, writer in conversations:
        writer.transport.abort()


@pytest.mark.parametrize("lack", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_what_this_end_lacks_is_no_word_on_the_other(directory, monkeypatch, lack):
    async def lacking(*_, **__):
        raise OSError(lack, os.strerror(lack))

    monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", lacking)
    with pytest.raises(ShortageError, match=os.strerror(lack)):
        await self_call(directory / "x.sock")


def test_how_a_resource_stands_over_its_life():
    now = iter([10.0, 20.0, 30.0, 40.0, 50.0])
    known = Registrations(lambda: next(now))
    assert known.of(GPU) == ResourceRegistration(why=UNREGISTERED)
    known.away(GPU, "waiting for the kubelet")  # at 10
    known.served(GPU, OLD)
    assert known.of(GPU) == ResourceRegistration(OLD, None, None, "waiting for the kubelet")
    known.taken(GPU)  # at 20
    assert known.of(GPU) == ResourceRegistration(OLD, 20.0, None, "")
    known.away(GPU, "the kubelet dropped our stream")  # at 30
    known.ended(GPU, OLD)
    known.away(GPU, "registration failed: nobody answers")  # at 40: it was lost at 30
    assert known.of(GPU) == ResourceRegistration(None, None, 30.0, "registration failed: nobody answers")
    known.taken(GPU)  # at 50
    assert known.of(GPU) == ResourceRegistration(None, 50.0, None, "")
    known.withdrawn(GPU)
    assert not known.current


def test_the_end_of_an_old_socket_says_nothing_of_the_new_one():
    known = Registrations(lambda: 0.0)
    known.served(GPU, NEW)
    known.ended(GPU, OLD)
    assert known.of(GPU).socket == NEW


async def test_the_endpoints_tell_how_their_resources_stand(directory):
    views = {GPU: view(devices(2)), "no-domain": view(devices(1), "no-domain")}
    async with endpoints(directory, views) as (store, known, until):
        await until(lambda: "waiting for the kubelet" in known.of(GPU).why)
        assert known.of(GPU).lost is None
        await until(lambda: "it cannot be served" in known.of("no-domain").why)
        async with StandInKubelet(directory):
            await until(lambda: known.of(GPU).registered is not None)
            socket = known.of(GPU).socket
            assert socket is not None
            assert socket.exists()
        await until(lambda: known.of(GPU).lost is not None)
        await until(lambda: known.of(GPU).socket is None)
        store.publish({})
        await until(lambda: not known.current)


async def test_a_resource_is_known_to_the_kubelet_from_its_first_stream_on(directory, monkeypatch, caplog):
    monkeypatch.setattr(endpoint, "FIRST_STREAM", 0.02)
    monkeypatch.setattr(endpoint, "STABLE", 0.02)
    monkeypatch.setattr(endpoint, "FIRST_RETRY", 0.01)
    caplog.set_level(logging.INFO, "gpu_plugin")
    told = anyio.Event()
    async with (
        Deaf(directory) as kubelet,
        endpoints(directory, {GPU: view(devices(2))}, told) as (_, known, until),
    ):
        await until(lambda: known.of(GPU).why == UNHEARD)
        assert known.of(GPU).registered is None
        await until(lambda: kubelet.registrations[GPU].accepted >= 4)
        assert known.of(GPU).registered is None
        assert told.is_set(), "without a stream"
        kubelet.deaf = False
        await until(lambda: known.of(GPU).registered is not None)
    lines = [record for record in caplog.records if record.levelno >= logging.INFO]
    said = [record.getMessage() for record in lines]
    assert [record.levelname for record in lines if "opened no stream within" in record.getMessage()] == ["WARNING"]
    assert sum("registered with the kubelet as" in line for line in said) == 1
    assert f"{GPU}: the kubelet has opened its stream" in said


async def test_the_first_stream_is_noticed_at_once(directory):
    async with Deaf(directory), endpoints(directory, {GPU: view(devices(2))}) as (_, known, until):
        await until(lambda: known.of(GPU).why == UNHEARD)
        socket = known.of(GPU).socket
        assert socket is not None
        channel, *_ = await open_stream(socket)
        with anyio.fail_after(2):  # without anything else that would have it looked at
            while known.of(GPU).registered is None:
                await anyio.sleep(0.005)
        channel.close()


async def test_one_that_never_had_a_stream_has_not_worked_however_long_it_waited(directory, monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_STREAM", 0.02)
    monkeypatch.setattr(endpoint, "STABLE", 0.02)
    worked = []

    class Noted(Backoff):
        def failed(self, now, dice=0.0, worked_for=0.0):
            worked.append(worked_for)
            return super().failed(now, dice, worked_for)

    monkeypatch.setattr(endpoint, "Backoff", Noted)
    async with Deaf(directory) as kubelet, endpoints(directory, {GPU: view(devices(2))}) as (_, known, until):
        await until(lambda: len(worked) >= 3)
        assert set(worked) == {0.0}
        kubelet.deaf = False
        await until(lambda: known.of(GPU).registered is not None)
        del worked[:]
        await kubelet.drop_stream(GPU)
        await until(lambda: worked)
        assert worked[0] > 0


async def test_while_the_next_register_hangs_it_is_told_why_there_is_one(directory):
    async with (
        StandInKubelet(directory) as kubelet,
        endpoints(directory, {GPU: view(devices(2))}) as (_, known, until),
    ):
        await until(lambda: known.of(GPU).registered is not None)
        kubelet.fail_next_register("hang")
        await kubelet.drop_stream(GPU)
        await until(lambda: kubelet.registrations[GPU].total == 2)
        standing = known.of(GPU)
        assert (standing.registered, standing.why) == (None, "the kubelet dropped our stream")
        assert standing.lost is not None


class Deaf(StandInKubelet):
    """Takes registrations and never connects, as long as it is `deaf`."""

    deaf = True

    def __init__(self, directory):
        super().__init__(directory)
        connect = self._registry.connect

        async def unless_deaf(resource, path):
            if not self.deaf:
                await connect(resource, path)

        self._registry.connect = unless_deaf  # type: ignore[method-assign]


@asynccontextmanager
async def endpoints(directory, views, registered=None):
    """Run endpoints of these resources. Yield their store, their registrations, and a function that waits for a condition."""
    store, look, known = SnapshotStore(), Pulse(), Registrations()
    store.publish(views)

    async def until(met):
        with anyio.fail_after(5):
            while not met():
                look.ring()  # in place of the watch on the directory
                await anyio.sleep(0.005)

    made = Endpoints(Shared(store, directory / "kubelet.sock", directory, look, registered or anyio.Event(), known))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        yield store, known, until
        tasks.cancel_scope.cancel()
