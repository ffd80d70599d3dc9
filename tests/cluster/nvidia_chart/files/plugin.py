"""A stand-in for NVIDIA's device plugin v0.20.0 with the strategies `envvar` and `uuid`.

As that plugin does, it removes the socket of a predecessor, serves, registers once, lists the GPUs by their UUIDs, returns
NVIDIA_VISIBLE_DEVICES, and on SIGTERM ends its streams and removes its socket. STAND_IN_GPUS has the UUIDs.
"""

import asyncio
import os
import signal
from pathlib import Path

from grpclib.client import Channel
from grpclib.const import Cardinality, Handler
from grpclib.server import Server

from gpu_plugin.kubelet import messages

DIRECTORY = Path("/var/lib/kubelet/device-plugins")
SOCKET = DIRECTORY / "nvidia-gpu.sock"
GPUS = os.environ["STAND_IN_GPUS"].split(",")


class DevicePlugin:
    """The five methods of v1beta1.DevicePlugin."""

    async def get_options(self, stream):
        await stream.recv_message()
        await stream.send_message(messages.DevicePluginOptions(get_preferred_allocation_available=True))

    async def list_and_watch(self, stream):
        await stream.recv_message()
        devices = [messages.Device(id=gpu, health="Healthy") for gpu in GPUS]
        await stream.send_message(messages.ListAndWatchResponse(devices=devices))
        await asyncio.Event().wait()

    async def preferred_allocation(self, stream):
        request = await stream.recv_message()
        chosen = [
            messages.ContainerPreferredAllocationResponse(
                device_ids=sorted(each.available_device_ids)[: each.allocation_size]
            )
            for each in request.container_requests
        ]
        await stream.send_message(messages.PreferredAllocationResponse(container_responses=chosen))

    async def allocate(self, stream):
        request = await stream.recv_message()
        answers = [
            messages.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": ",".join(each.device_ids)})
            for each in request.container_requests
        ]
        await stream.send_message(messages.AllocateResponse(container_responses=answers))

    async def pre_start_container(self, stream):
        await stream.recv_message()
        await stream.send_message(messages.PreStartContainerResponse())

    def __mapping__(self):
        unary, streaming = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        methods = {
            "GetDevicePluginOptions": (self.get_options, unary, messages.Empty, messages.DevicePluginOptions),
            "ListAndWatch": (self.list_and_watch, streaming, messages.Empty, messages.ListAndWatchResponse),
            "GetPreferredAllocation": (
                *(self.preferred_allocation, unary),
                *(messages.PreferredAllocationRequest, messages.PreferredAllocationResponse),
            ),
            "Allocate": (self.allocate, unary, messages.AllocateRequest, messages.AllocateResponse),
            "PreStartContainer": (
                *(self.pre_start_container, unary),
                *(messages.PreStartContainerRequest, messages.PreStartContainerResponse),
            ),
        }
        return {f"/v1beta1.DevicePlugin/{name}": Handler(*handler) for name, handler in methods.items()}


async def register():
    channel = Channel(path=str(DIRECTORY / "kubelet.sock"))
    request = messages.RegisterRequest(
        version="v1beta1",
        endpoint=SOCKET.name,
        resource_name="nvidia.com/gpu",
        options=messages.DevicePluginOptions(get_preferred_allocation_available=True),
    )
    async with channel.request(
        "/v1beta1.Registration/Register", Cardinality.UNARY_UNARY, messages.RegisterRequest, messages.Empty
    ) as stream:
        await stream.send_message(request, end=True)
        await stream.recv_message()
    channel.close()
    print("registered", flush=True)


async def main():
    SOCKET.unlink(missing_ok=True)
    server = Server([DevicePlugin()])
    await server.start(path=str(SOCKET))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await register()
    await stop.wait()
    server.close()
    SOCKET.unlink(missing_ok=True)
    await server.wait_closed()


asyncio.run(main())
