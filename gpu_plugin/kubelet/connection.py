"""One connection to our server, with a GOAWAY at its end, and a bound on messages and on closed streams."""

import asyncio
import logging
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import grpclib.server
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol, Stream
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import ProtocolError

from gpu_plugin.runtime.pulse import Pulse

log = logging.getLogger(__name__)

# h2 keeps 2^16 closed streams of a connection by default: 13 MiB on a connection that lasts as long as a kubelet's.
H2Connection.MAX_CLOSED_STREAMS = 256

# Bytes. A kubelet's request names the ids of one resource at most twice, as available and as required. The list that the ids
# come from has at most 4 MiB, and more content than the ids.
LONGEST_REQUEST = 8 * 1024 * 1024

Headers = list[tuple[str, str]]


async def received(stream: grpclib.server.Stream[bytes, bytes], longest: int = LONGEST_REQUEST) -> bytes:
    """Return the message of a request. grpclib's own function accepts any length, and supports no compression.

    Raises:
        GRPCError: the message is compressed, has more than `longest` bytes, or is incomplete.
    """
    try:
        head = await stream._stream.recv_data(5)  # noqa: SLF001 - grpclib's public method has no limit
        if len(head) < 5:
            raise GRPCError(Status.INVALID_ARGUMENT, "the request ended before its message")
        compressed, size = struct.unpack(">BI", head)
        if compressed:
            raise GRPCError(Status.UNIMPLEMENTED, "only uncompressed messages are accepted")
        if size > longest:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"a message of {size} bytes is longer than {longest}")
        data = await stream._stream.recv_data(size)  # noqa: SLF001
    except AssertionError:  # grpclib raises this if a stream ends too early
        raise GRPCError(Status.INVALID_ARGUMENT, "the request ended within its message") from None
    if len(data) < size:
        raise GRPCError(Status.INVALID_ARGUMENT, "the request ended within its message")
    return data


class Requests(grpclib.server.Handler):
    """The requests of a connection. grpclib would keep an ended request, 10 KiB, until later requests come."""

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        """Start a request, and drop it when it has ended."""
        super().accept(stream, headers, release_stream)
        self._tasks[stream].add_done_callback(partial(self._drop, stream, release_stream))

    def _drop(self, stream: Stream, release_stream: Callable[[], Any], task: "asyncio.Task[None]") -> None:
        self._tasks.pop(stream, None)
        self._cancelled.discard(task)
        if task.cancelled():
            with suppress(KeyError):  # a reset before the start of a request leaves its stream registered
                release_stream()


class TrackedProtocol(H2Protocol):
    """A connection, which the set of its server contains until the connection is lost."""

    transport: asyncio.Transport

    def __init__(
        self,
        handler: grpclib.server.Handler,
        config: Configuration,
        h2_config: H2Configuration,
        open_connections: "set[TrackedProtocol]",
        lost: Pulse,
    ) -> None:
        """`lost` rings when a connection is removed from `open_connections`."""
        super().__init__(handler, config, h2_config)
        self.open_connections = open_connections
        self.lost = lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add the connection to the server's set."""
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", transport)  # grpclib drops its own when it closes it
        self.open_connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove the connection from the server's set."""
        self.open_connections.discard(self)
        self.lost.ring()
        super().connection_lost(exc)

    def send_goaway(self) -> None:
        """Send GOAWAY, and close the connection once the buffered data is written."""
        if self.transport.is_closing():
            return
        try:
            h2 = self.connection._connection  # noqa: SLF001 - grpclib cannot send GOAWAY
            h2.close_connection()
            self.transport.write(h2.data_to_send())
        except ProtocolError as error:
            log.debug("GOAWAY could not be sent, because the connection is broken: %s", error)
        self.transport.close()

    def abort(self) -> None:
        """Close the connection at once. Unwritten data is lost."""
        self.transport.abort()
