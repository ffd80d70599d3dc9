"""The counts of the kubelet's calls over a socket."""

import anyio
import pytest
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.exceptions import GRPCError

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.kubelet import messages, wire
from gpu_plugin.kubelet.codec import BytesCodec
from gpu_plugin.kubelet.counts import ACCEPTED, KubeletCounts
from gpu_plugin.kubelet.feed import ListFeed
from gpu_plugin.kubelet.server import SocketServer
from gpu_plugin.kubelet.service import DevicePluginService
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.runtime.pulse import Pulse
from tests.unit.kubelet.serving import GPU, devices, registered, serving, view


def asked(*ids):
    return bytes(messages.AllocateRequest([messages.ContainerAllocateRequest(list(ids))]))


async def test_answers_refusals_and_nonsense_are_told_apart(directory):
    store, counts = SnapshotStore(), KubeletCounts()
    store.publish({GPU: view(devices(8))})
    service = DevicePluginService(ListFeed(GPU, store), store, Pulse(), counts=counts)
    server, path = SocketServer(service), directory / "s.sock"
    await server.bind(path)
    ids = [device.id for device in devices(8)]
    channel = Channel(path=str(path), codec=BytesCodec())
    try:
        allocate: UnaryUnaryMethod[bytes, bytes] = UnaryUnaryMethod(channel, wire.ALLOCATE, bytes, bytes)
        await allocate(asked(ids[0], ids[1]))
        await allocate(asked(ids[2]))
        for request in (asked("GPU-of-another-node"), b"\xff\xff"):
            with pytest.raises(GRPCError):
                await allocate(request)
    finally:
        channel.close()
        await server.end()
    told = counts.as_data()
    assert told["methods"]["Allocate"]["errors"] == {"INVALID_ARGUMENT": 1, "NOT_FOUND": 1}
    assert sum(told["methods"]["Allocate"]["seconds"]["counts"]) == 4
    assert 0 < told["methods"]["Allocate"]["seconds"]["sum"] < 10
    assert (told["resources"][GPU]["allocations"], told["resources"][GPU]["allocated_devices"]) == (2, 3)
    assert told["methods"]["GetPreferredAllocation"]["errors"] == {}


async def test_a_failed_registration_and_the_one_after_it(directory):
    async with StandInKubelet(directory) as kubelet:
        kubelet.fail_next_register("refuse", "no such resource name")
        async with serving(directory) as plugin:
            await kubelet.wait_for(registered(kubelet))
            with anyio.fail_after(5):
                while not plugin.endpoint._shared.counts.registrations[GPU, ACCEPTED]:  # its answer is on the way
                    await plugin.look.wait(0.01)
            told = plugin.endpoint._shared.counts.as_data()["resources"][GPU]
    assert told["registrations"] == {"accepted": 1, "failed": 1}
    assert told["streams"] == 1
    assert told["lists"] >= 1
    assert plugin.endpoint._shared.counts.as_data()["resources"][GPU]["streams"] == 0, "it ended with the endpoint"
