"""The socket of a kubelet. It is closed as by the end of a process: at once, with all connections.

grpclib's Server.close() ends no stream and closes no connection, and since Python 3.12 its wait_closed() waits for the
peers to do so. So connections are stored here and closed explicitly. The socket file is not removed on closing: a kubelet that
stops or is killed leaves it behind.
"""

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any

from grpclib.protocol import H2Protocol
from grpclib.server import Handler, Server, Stream

from gpu_plugin.kubelet.codec import BytesCodec
from gpu_plugin.runtime.peer import peer_of

SOCKET_MODE = 0o755  # The mode of a Unix socket that a Go process with umask 022 makes


class _Connection(H2Protocol):
    """A connection of a server that may be dropped after the accept and before `connection_made`."""

    def __init__(self, server: "SocketServer", *arguments: Any) -> None:
        super().__init__(*arguments)
        self._server = server
        self._made = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._server.dropped:
            transport.abort()  # type: ignore[attr-defined]
            return
        self._made = True
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._made:
            super().connection_lost(exc)
        self._server.ended(self)


class SocketServer(Server):
    """A grpclib server on one Unix socket."""

    def __init__(self, services: list[Any]) -> None:
        super().__init__(services, codec=BytesCodec())
        self.dropped = False
        self._open: set[H2Protocol] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._accepted: set[Handler] = set()
        self._listener: asyncio.Server | None = None
        self._closed: asyncio.Future[None] | None = None

    def _protocol_factory(self) -> H2Protocol:
        handler = Handler(self._mapping, self._codec, self._status_details_codec, self.__dispatch__)
        protocol = _Connection(self, handler, self._config, self._h2_config)
        self._open.add(protocol)
        self._none_open.clear()
        self._accepted = {known for known in self._accepted if not (known.closing and known.check_closed())} | {handler}
        return protocol

    async def listen(self, path: Path, *, bind_to_listen: float = 0.0) -> None:
        """Bind `path` and listen `bind_to_listen` seconds later; until then connections are refused.

        Raises OSError, for example if the path exists already.
        """
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            bound.bind(str(path))
            os.chmod(path, SOCKET_MODE)  # noqa: PTH101 - one system call, as bind is
            if bind_to_listen:
                await asyncio.sleep(bind_to_listen)
            keep_file: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_unix_server(self._protocol_factory, sock=bound, **keep_file)
        except BaseException:
            bound.close()
            raise

    def ended(self, protocol: H2Protocol) -> None:
        """Record that a connection is closed."""
        self._open.discard(protocol)
        if not self._open:
            self._none_open.set()

    def drop(self, *, orderly: bool) -> None:
        """Stop listening and close all connections now, with GOAWAY if `orderly`."""
        self.dropped = True
        if self._listener is not None and self._closed is None:
            # Connections that have just been accepted must be attached to the listener first, or asyncio leaks them.
            loop = asyncio.get_running_loop()
            self._closed = loop.create_future()
            for listening in self._listener.sockets:
                loop.remove_reader(listening.fileno())
            loop.call_soon(self._stop_listening, self._listener, self._closed)
        for protocol in list(self._open):
            close_connection(protocol, goaway=orderly)

    @staticmethod
    def _stop_listening(listener: asyncio.Server, closed: "asyncio.Future[None]") -> None:
        listener.close()
        closed.set_result(None)

    async def wait_dropped(self) -> None:
        """Wait until everything that `drop` closed has ended: handlers, connections, the listener."""
        if self._closed is not None:
            await self._closed
        for handler in self._accepted:
            await handler.wait_closed()
        await self._none_open.wait()
        if self._listener is not None:
            await self._listener.wait_closed()


def close_connection(protocol: H2Protocol, *, goaway: bool) -> None:
    """Close a connection of either side without waiting for the peer. Do nothing if it is closed or was never made."""
    connection = getattr(protocol, "connection", None)
    transport = getattr(connection, "_transport", None)
    if connection is None or transport is None:
        return
    if goaway and not transport.is_closing():
        connection._connection.close_connection()  # noqa: SLF001 - grpclib offers no GOAWAY
        connection.flush()
    protocol.processor.close()
    if not goaway or transport.get_write_buffer_size():
        transport.abort()  # close() would wait for a peer that does not read


def peer_pid(transport: asyncio.BaseTransport) -> int:
    """Return the process id at the other end of a Unix connection: of connect() or listen(); 0 if unknown."""
    end = transport.get_extra_info("socket")
    return 0 if end is None else peer_of(end)[0]


def caller_pid(stream: Stream[Any, Any]) -> int:
    """Return the process id of the caller of a call to this server."""
    peer = stream.peer
    return 0 if peer is None else peer_pid(peer._transport)  # noqa: SLF001 - Peer has no process id of a Unix socket
