"""A gRPC server on a unix socket that can really end.

grpclib's own close() stops listening and cancels handlers, but neither ends streams nor closes connections: the kubelet
would go on believing that our devices are healthy, and from Python 3.12 wait_closed() would wait for it for ever. This
one knows its connections, says GOAWAY, and closes them.
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

import anyio
import grpclib.const
import grpclib.server
from grpclib.protocol import H2Protocol
from h2.connection import H2Connection
from h2.exceptions import ProtocolError

from gpu_plugin.kubelet.codec import BytesCodec
from gpu_plugin.pulse import Pulse

log = logging.getLogger(__name__)

# h2 remembers 2^16 closed streams a connection: 13 MiB on one that lives as long as a kubelet's.
H2Connection.MAX_CLOSED_STREAMS = 256

SOCKET_MODE = 0o600

DRAIN = 0.1
"""Seconds that streams and connections are given to end by themselves before they are cut."""


class Service(Protocol):
    """What grpclib calls a servable: its methods by path."""

    def __mapping__(self) -> Mapping[str, grpclib.const.Handler]:
        """Handlers by method path, as /v1beta1.DevicePlugin/Allocate."""


class _TrackedProtocol(H2Protocol):
    """A connection that its server knows of from the first byte to the last."""

    open_connections: "set[_TrackedProtocol]"
    lost: Pulse
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", transport)  # grpclib forgets its own as soon as it closes it
        self.open_connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.open_connections.discard(self)
        self.lost.ring()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except NotImplementedError:  # grpclib knows no handler for a frame type it has never met
            log.warning("a peer sent an HTTP/2 frame nobody knows; its connection is closed")
            self.processor.close("unknown frame")

    def goodbye(self) -> None:
        """GOAWAY, then the end of the connection once what is buffered has been written."""
        if self.transport.is_closing():
            return
        try:
            h2 = self.connection._connection  # noqa: SLF001 - grpclib has no way to say GOAWAY
            h2.close_connection()
            self.transport.write(h2.data_to_send())
        except ProtocolError as error:
            log.debug("no GOAWAY on a connection already broken: %s", error)
        self.transport.close()

    def abort(self) -> None:
        """The end at once, whatever was not written yet."""
        self.transport.abort()


class SocketServer(grpclib.server.Server):
    """Serves one service on one unix socket."""

    def __init__(self, service: Service) -> None:
        super().__init__([service], codec=BytesCodec())
        self.connections: set[_TrackedProtocol] = set()
        self._lost = Pulse()
        self._path: Path | None = None
        self._identity: tuple[int, int] | None = None

    def _protocol_factory(self) -> H2Protocol:
        made = super()._protocol_factory()
        tracked = _TrackedProtocol(made.handler, made.config, made.h2_config)
        tracked.open_connections, tracked.lost = self.connections, self._lost
        return tracked

    async def bind(self, path: Path) -> None:
        """Listens on `path`, for this user alone. Raises OSError."""
        with anyio.CancelScope(shield=True):  # cancelled halfway, asyncio would lose the listening socket
            await self.start(path=str(path))
        os.chmod(path, SOCKET_MODE)  # noqa: PTH101 - a local file system's answer, microseconds
        status = os.stat(path)  # noqa: PTH116
        self._path, self._identity = path, (status.st_dev, status.st_ino)

    async def rebind(self) -> None:
        """Listens on the same path again, where the socket there was removed; connections that are open stay so."""
        if self._server is not None and self._path is not None:
            self._server.close()
            self._server = None
            await self.bind(self._path)

    @property
    def listening(self) -> bool:
        """Whether new connections are taken, and the socket file is still the one bound here."""
        return self._server is not None and self._server.is_serving() and self._owns_file()

    def _owns_file(self) -> bool:
        if self._path is None:
            return False
        try:
            status = os.stat(self._path)  # noqa: PTH116 - as cheap as can be, it is asked often
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    async def end(self) -> None:
        """Stops listening, lets handlers return, closes every connection with GOAWAY, and removes the socket if it is ours.

        Takes at most three times `DRAIN`. The handlers must have been told to end before.
        """
        with anyio.CancelScope(shield=True):
            if self._owns_file() and self._path is not None:
                self._path.unlink(missing_ok=True)
            if self._server is not None:
                self._server.close()
            await self._drained()
            for connection in tuple(self.connections):
                connection.goodbye()
            with anyio.move_on_after(DRAIN):
                while self.connections:
                    await self._lost.wait()
            for connection in tuple(self.connections):
                connection.abort()
            for handler in tuple(self._handlers):
                handler.close()
            await self._drained()

    async def _drained(self) -> None:
        """Waits for the requests being handled to end, at most for `DRAIN`."""
        tasks = self._tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=DRAIN)

    def _tasks(self) -> set["asyncio.Task[None]"]:
        """Requests being handled."""
        running = {task for handler in self._handlers for task in (*handler._tasks.values(), *handler._cancelled)}  # noqa: SLF001
        return {task for task in running if not task.done()}
