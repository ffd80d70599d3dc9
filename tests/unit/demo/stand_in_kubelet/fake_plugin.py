"""A small scripted device plugin, which sends any answers of a test, right or wrong."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from grpclib.client import Channel
from grpclib.const import Cardinality, Handler

from demo.stand_in_kubelet import StandInKubelet
from demo.stand_in_kubelet.server import SocketServer
from gpu_plugin.kubelet import messages as m
from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.codec import BytesCodec


def device(identifier: str, health: str = "Healthy", *numa: int) -> m.Device:
    made = m.Device(identifier, health)
    if numa:
        made.topology = m.TopologyInfo([m.NumaNode(node) for node in numa])
    return made


def healthy(*ids: str) -> list[m.Device]:
    return [device(identifier) for identifier in ids]


class FakePlugin:
    """Serves DevicePlugin on `endpoint` in `directory`. Each ListAndWatch gets `devices`, and then the lists of `send`."""

    def __init__(
        self,
        directory: Path,
        endpoint: str = "a.sock",
        resource: str = "nvidia.com/gpu",
        devices: Sequence[m.Device] = (),
    ) -> None:
        self.directory = directory
        self.endpoint = endpoint
        self.resource = resource
        self.devices = list(devices)
        self.preferred_available = True
        self.pre_start = False
        self.options_error: Exception | None = None
        self.pre_start_error: Exception | None = None
        self.prefer: Callable[[Any], Any] = lambda ask: ask.available_device_ids[: ask.allocation_size]
        self.allocate: Callable[[Any], Any] = lambda ids: [
            m.ContainerAllocateResponse(envs={"IDS": ",".join(sorted(ids))})
        ]
        self.allocating = asyncio.Event()
        self.may_allocate = asyncio.Event()
        self.may_allocate.set()
        self.calls: list[tuple[str, object]] = []
        self.streams: list[asyncio.Queue[list[m.Device] | Exception | None]] = []
        self.dropped = 0
        self.was_dropped = asyncio.Event()
        self._server: SocketServer | None = None

    def __mapping__(self) -> dict[str, Handler]:
        unary = Cardinality.UNARY_UNARY
        return {
            wire.OPTIONS: Handler(self._options, unary, bytes, bytes),
            wire.LIST_AND_WATCH: Handler(self._watch, Cardinality.UNARY_STREAM, bytes, bytes),
            wire.PREFERRED: Handler(self._prefer, unary, bytes, bytes),
            wire.ALLOCATE: Handler(self._allocate, unary, bytes, bytes),
            wire.PRE_START: Handler(self._pre_start, unary, bytes, bytes),
        }

    async def serve(self) -> None:
        await self.close()
        (self.directory / self.endpoint).unlink(missing_ok=True)
        self._server = SocketServer([self])
        await self._server.listen(self.directory / self.endpoint)

    async def close(self, *, orderly: bool = True) -> None:
        if self._server is not None:
            self._server.drop(orderly=orderly)
            await self._server.wait_dropped()
            self._server = None

    async def register(
        self, *, version: str = "v1beta1", endpoint: str = "", resource: str = "", timeout: float = 15.0
    ) -> None:
        request = m.RegisterRequest(version, endpoint or self.endpoint, resource or self.resource)
        async with Channel(path=str(self.directory / "kubelet.sock"), codec=BytesCodec()) as channel:
            call = channel.request(wire.REGISTER, Cardinality.UNARY_UNARY, bytes, bytes, timeout=timeout)
            async with call as stream:
                await stream.send_message(bytes(request), end=True)
                await stream.recv_message()

    def send(self, devices: list[m.Device] | Exception | None) -> None:
        """A list for every open stream; None ends them with OK, a GRPCError ends them with it."""
        if isinstance(devices, list):
            self.devices = devices
        for queue in self.streams:
            queue.put_nowait(devices)

    async def _options(self, stream: Any) -> None:
        await stream.recv_message()
        if self.options_error is not None:
            raise self.options_error
        await stream.send_message(wire.encode_options(pre_start=self.pre_start, preferred=self.preferred_available))

    async def _watch(self, stream: Any) -> None:
        await stream.recv_message()
        queue: asyncio.Queue[list[m.Device] | Exception | None] = asyncio.Queue()
        queue.put_nowait(self.devices)
        self.streams.append(queue)
        try:
            while (devices := await queue.get()) is not None:
                if isinstance(devices, Exception):
                    raise devices
                await stream.send_message(bytes(m.ListAndWatchResponse(devices)))
        except asyncio.CancelledError:
            self.dropped += 1
            self.was_dropped.set()
            raise
        finally:
            self.streams.remove(queue)

    async def _prefer(self, stream: Any) -> None:
        request = m.decode(m.PreferredAllocationRequest, await stream.recv_message())
        (ask,) = request.container_requests
        self.calls.append(("preferred", ask))
        answer = self.prefer(ask)
        if isinstance(answer, Exception):
            raise answer
        container = m.ContainerPreferredAllocationResponse(list(answer))
        await stream.send_message(bytes(m.PreferredAllocationResponse([container])))

    async def _allocate(self, stream: Any) -> None:
        request = m.decode(m.AllocateRequest, await stream.recv_message())
        (container,) = request.container_requests
        self.calls.append(("allocate", set(container.device_ids)))
        self.allocating.set()
        await self.may_allocate.wait()
        answer = self.allocate(container.device_ids)
        if isinstance(answer, Exception):
            raise answer
        await stream.send_message(bytes(m.AllocateResponse(answer)))

    async def _pre_start(self, stream: Any) -> None:
        request = m.decode(m.PreStartContainerRequest, await stream.recv_message())
        self.calls.append(("pre start", set(request.device_ids)))
        if self.pre_start_error is not None:
            raise self.pre_start_error
        await stream.send_message(bytes(m.PreStartContainerResponse()))

    def called(self, what: str) -> list[Any]:
        return [argument for name, argument in self.calls if name == what]


@asynccontextmanager
async def plugin(
    kubelet: StandInKubelet,
    endpoint: str = "a.sock",
    devices: Sequence[m.Device] = (),
    *,
    registered: bool = True,
    **settings: Any,
) -> AsyncIterator[FakePlugin]:
    """A plugin that serves, and has registered and sent its list if `registered`."""
    made = FakePlugin(kubelet.directory, endpoint, devices=devices)
    for name, value in settings.items():
        assert hasattr(made, name), name
        setattr(made, name, value)
    await made.serve()
    try:
        if registered:
            await made.register()
            await kubelet.wait_for(lambda: made.streams and made.resource in kubelet.resources, 2)
        yield made
    finally:
        await made.close()
