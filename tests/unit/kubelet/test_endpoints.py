"""Several resources at once: each its own socket, server and registration."""

from contextlib import asynccontextmanager

import anyio

from gpu_plugin.kubelet.bounded_channel import BoundedChannel, CallError
from gpu_plugin.kubelet.directory import watch
from gpu_plugin.kubelet.endpoint import Endpoints, Shared
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.runtime.pulse import Pulse
from tests.unit.kubelet.serving import devices, view

ONE, TWO, SAME_SUFFIX = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "example.com/gpu"


@asynccontextmanager
async def serving_all(directory, store):
    look = Pulse()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, directory, look)
        tasks.start_soon(Endpoints(Shared(store, directory / "kubelet.sock", directory, look)).run)
        yield
        tasks.cancel_scope.cancel()


def publish(store, **counts):
    store.publish({name: store.current.resources.get(name) or view(devices(n), name) for name, n in counts.items()})


def serves(kubelet, name, count):
    def met():
        table = kubelet.resources.get(name)
        return table is not None and table.streams == 1 and table.allocatable == count

    return met


def sockets(directory):
    return sorted(path.name for path in directory.glob("gpu-plugin-*.sock"))


async def test_each_resource_has_a_socket_of_its_own(kubelet, directory):
    store = SnapshotStore()
    publish(store, **{ONE: 8, TWO: 7, SAME_SUFFIX: 2})
    async with serving_all(directory, store):
        for name, count in ((ONE, 8), (TWO, 7), (SAME_SUFFIX, 2)):
            await kubelet.wait_for(serves(kubelet, name, count))
        assert len(sockets(directory)) == 3


async def test_many_resources_are_registered_and_withdrawn_in_one_line_each(kubelet, directory, caplog):
    caplog.set_level("INFO")
    store, names = SnapshotStore(), [f"nvidia.com/mig-{at}g.10gb" for at in range(1, 13)]
    publish(store, **dict.fromkeys(names, 1))

    def registered():
        return [line for line in caplog.messages if "registered with the kubelet" in line]

    async with serving_all(directory, store):
        with anyio.fail_after(5):
            while not registered():
                await anyio.sleep(0.01)
        publish(store, **{ONE: 8})
        with anyio.fail_after(5):
            while len(registered()) < 2:
                await anyio.sleep(0.01)
    twelve, one = registered()
    assert "12 resources" in twelve
    assert one.startswith(f"{ONE}: ")
    assert len([line for line in caplog.messages if "withdrawn" in line]) == 1


async def test_a_resource_that_comes_or_goes_touches_no_other(kubelet, directory):
    store = SnapshotStore()
    publish(store, **{ONE: 8})
    async with serving_all(directory, store):
        await kubelet.wait_for(serves(kubelet, ONE, 8))
        [first] = sockets(directory)
        publish(store, **{ONE: 8, TWO: 7})
        await kubelet.wait_for(serves(kubelet, TWO, 7))
        publish(store, **{ONE: 8})
        await kubelet.wait_for(lambda: kubelet.resources[TWO].streams == 0)
        with anyio.fail_after(5):
            while sockets(directory) != [first]:
                await anyio.sleep(0.01)
        assert serves(kubelet, ONE, 8)()
        assert kubelet.registrations[ONE].total == 1
        publish(store, **{ONE: 8, TWO: 3})
        await kubelet.wait_for(serves(kubelet, TWO, 3))
        assert kubelet.registrations[ONE].total == 1


async def test_one_that_cannot_be_registered_keeps_no_other_back(kubelet, directory, monkeypatch):
    async def refuse_one(self, method, request, timeout):
        if TWO.encode() in request:
            raise CallError("not this one")
        return await original(self, method, request, timeout)

    original = BoundedChannel.ask
    monkeypatch.setattr(BoundedChannel, "ask", refuse_one)
    store = SnapshotStore()
    publish(store, **{TWO: 7, ONE: 8})
    async with serving_all(directory, store):
        await kubelet.wait_for(serves(kubelet, ONE, 8))
        assert kubelet.registrations[ONE].total == 1
        assert TWO not in kubelet.resources
