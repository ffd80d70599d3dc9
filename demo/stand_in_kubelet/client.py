"""A connection from the kubelet to a plugin, which behaves like grpc-go's client as far as a plugin can notice.

Source: pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go (dial, Run) and grpc-go's error texts.
"""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Literal

from grpclib.client import Channel, Handler
from grpclib.config import Configuration
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, RemoteSettingsChanged

from demo.stand_in_kubelet.server import close_connection, peer_pid
from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet.codec import BytesCodec

# How a stream is ended: the connection is cut, closed in order, or only the stream is reset
DropKind = Literal["close", "goaway", "rst"]

# Errors of grpclib for a call that fails or loses its connection
_FAILURES = (GRPCError, OSError, StreamTerminatedError, ProtocolError, AssertionError)

_BACKOFF_FACTOR = 1.6
_BACKOFF_JITTER = 0.2


class CallError(Exception):
    """The result of a call to a plugin: `code` and text have the form of grpc-go, `rpc error: code = X desc = Y`."""

    def __init__(self, code: str, description: str) -> None:
        self.code = code
        self.description = description
        super().__init__(f"rpc error: code = {code} desc = {description}")


class DialError(Exception):
    """There was no answer at the endpoint in time."""


class AlreadyConnectedError(Exception):
    """A plugin registers a socket path that is already connected (1.37). The text is the kubelet's."""


class _Protocol(H2Protocol):
    """A connection that records the peer's SETTINGS, and stays open after a GOAWAY until the peer closes it."""

    def __init__(self, handler: Handler, config: Configuration, h2_config: H2Configuration) -> None:
        super().__init__(handler, config, h2_config)
        self._state = handler
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.pid = 0
        self.goaway = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.pid = peer_pid(transport)
        self.processor.processors[RemoteSettingsChanged] = self._settings
        self.processor.processors[ConnectionTerminated] = self._terminated

    def connection_lost(self, exc: BaseException | None) -> None:
        self._answer(connected=False)
        super().connection_lost(exc)

    def _settings(self, event: RemoteSettingsChanged) -> None:
        self.processor.process_remote_settings_changed(event)
        self._answer(connected=True)

    def _terminated(self, event: ConnectionTerminated) -> None:
        # grpclib would fail all streams here, even a stream whose last message and status are in the same segment.
        code = ErrorCodes(event.error_code or 0).name
        self.goaway = f", received prior goaway: code: {code}"
        self._state.connection_lost = True  # the channel opens another connection for new calls

    def _answer(self, *, connected: bool) -> None:
        if not self.ready.done():
            self.ready.set_result(connected)


class _Channel(Channel):
    def __init__(self, path: str) -> None:
        super().__init__(path=path, codec=BytesCodec())
        self.opened: list[_Protocol] = []
        self.ended = False

    async def __connect__(self) -> H2Protocol:
        """Connect unless the client has closed the channel: grpc-go's ClientConn does not connect again after Close."""
        self._require_open()
        protocol = await super().__connect__()
        self._require_open()
        return protocol

    def _require_open(self) -> None:
        if self.ended:
            self.close()  # a connection that grpclib made meanwhile
            raise GRPCError(Status.CANCELLED, "grpc: the client connection is closing")

    def _get_authority(self, host: str, port: int) -> str:  # noqa: ARG002
        return "localhost"

    def _protocol_factory(self) -> _Protocol:
        protocol = _Protocol(Handler(), self._config, self._h2_config)
        self.opened.append(protocol)
        return protocol


class PluginClient:
    """The kubelet's client of one registration of one resource.

    Attributes:
        connected: True between a successful dial and our own close.
        watching: True while its ListAndWatch runs.
        lingering: its stream was reset by `drop_stream` and the connection must stay open.
    """

    def __init__(self, resource: str, path: str) -> None:
        self.resource = resource
        self.path = path
        self.connected = False
        self.watching = False
        self.lingering = False
        self._channel = _Channel(path)
        self._stream_ends: Callable[[], None] | None = None

    @property
    def pid(self) -> int:
        """Process id of the listener at the endpoint; 0 before the first connection."""
        return self._channel.opened[-1].pid if self._channel.opened else 0

    async def dial(self, timeout: float, backoff: float, rng: random.Random) -> None:
        """Connect and wait for the peer's SETTINGS. Try again after `backoff` seconds, then with longer pauses.

        Raises DialError after `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                while not await self._connect():
                    await asyncio.sleep(backoff * rng.uniform(1 - _BACKOFF_JITTER, 1 + _BACKOFF_JITTER))
                    backoff *= _BACKOFF_FACTOR
        except TimeoutError:
            raise DialError("failed to dial device plugin: context deadline exceeded") from None
        self.connected = True

    async def _connect(self) -> bool:
        try:
            await self._channel.__connect__()
        except OSError:
            return False
        return await self._channel.opened[-1].ready

    async def call(self, method: str, request: bytes, *, timeout: float | None = None) -> bytes:
        """Return the answer to a unary call. There is no deadline unless `timeout` (seconds) is given. Raises CallError."""
        # In a task of its own: if the connection is lost, grpclib cancels the task of the call, and the cancellation would
        # remain visible in the caller's task.
        return await asyncio.create_task(self._call(method, request, timeout))

    async def _call(self, method: str, request: bytes, timeout: float | None) -> bytes:
        try:
            async with self._channel.request(method, Cardinality.UNARY_UNARY, bytes, bytes, timeout=timeout) as stream:
                await stream.send_message(request, end=True)
                reply = await stream.recv_message()
        except _FAILURES as error:
            raise self._end(error) from error
        if reply is None:
            raise CallError("Internal", "cardinality violation: received no response message from non-streaming RPC")
        return reply

    async def watch(self, receive: Callable[[bytes, float], None]) -> CallError:
        """Run ListAndWatch and return its result, OK if it ended without an error.

        `receive` gets each list's bytes and time.perf_counter() at its arrival.
        """
        self.watching = True
        try:
            async with self._channel.request(wire.LIST_AND_WATCH, Cardinality.UNARY_STREAM, bytes, bytes) as stream:
                await stream.send_message(wire.EMPTY, end=True)
                h2_stream = stream._stream  # noqa: SLF001 - grpclib has no function to reset it from another task

                def reset() -> None:
                    if h2_stream.closable:
                        h2_stream.reset_nowait(ErrorCodes.CANCEL)
                    h2_stream.__terminated__("reset by the kubelet")

                self._stream_ends = reset
                while (data := await stream.recv_message()) is not None:
                    arrived = time.perf_counter()
                    if len(data) > wire.MAX_MESSAGE_BYTES:
                        raise GRPCError(
                            Status.RESOURCE_EXHAUSTED,
                            f"grpc: received message larger than max ({len(data)} vs. {wire.MAX_MESSAGE_BYTES})",
                        )
                    receive(data, arrived)
                if not stream._trailers_only and h2_stream.trailers is None:  # noqa: SLF001
                    raise GRPCError(Status.INTERNAL, "server closed the stream without sending trailers")
        except _FAILURES as error:
            return self._end(error)
        finally:
            self.watching = False
            self._stream_ends = None
        return CallError("OK", "EOF")

    def drop_stream(self, how: DropKind) -> None:
        """End the ListAndWatch from this side. After "rst" the connection stays open."""
        if how == "rst":
            self.lingering = True
            if self._stream_ends is not None:
                self._stream_ends()
            return
        self.close(goaway=how == "goaway")

    def close(self, *, goaway: bool = True) -> None:
        """Close all connections of this client: with GOAWAY, like grpc-go's ClientConn.Close, or cut."""
        self.connected = False
        for protocol in self._channel.opened:
            close_connection(protocol, goaway=goaway)
        self._channel.ended = True
        self._channel.close()

    def _end(self, error: Exception) -> CallError:
        if isinstance(error, GRPCError):
            name = "".join(part.capitalize() for part in error.status.name.split("_")).replace("Cancelled", "Canceled")
            return CallError(name, error.message or "")  # in grpc-go's spelling
        if isinstance(error, TimeoutError):
            return CallError("DeadlineExceeded", "context deadline exceeded")
        if isinstance(error, OSError):
            reason = (error.strerror or str(error)).lower()
            text = (
                f'connection error: desc = "transport: Error while dialing: dial unix {self.path}: connect: {reason}"'
            )
        elif "reset by remote party" in str(error):
            text = f"stream terminated by RST_STREAM: {error}"
        else:
            text = f"error reading from server: EOF{self._channel.opened[-1].goaway if self._channel.opened else ''}"
        return CallError("Unavailable", text)
