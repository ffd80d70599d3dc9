"""One connection to our server, with limits that grpclib lacks: on the memory for a peer, and on its frames and resets."""

import asyncio
import binascii
import inspect
import logging
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import grpclib.server
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import decode_bin_value
from grpclib.protocol import Stream
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, StreamReset
from h2.exceptions import ProtocolError

from gpu_plugin.kubelet.codec import EndsAtUnknownFrame
from gpu_plugin.runtime.printable import excerpt
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.rates import LogThrottle

log = logging.getLogger(__name__)

# h2 keeps 2^16 closed streams of a connection by default: 13 MiB on a connection that lasts as long as a kubelet's.
H2Connection.MAX_CLOSED_STREAMS = 256

RESETS = 200
"""A connection is closed if its peer has reset over this many streams more than have succeeded. A kubelet resets only the streams
of calls that it gives up."""

UNREAD_FRAMES = 4096
"""Frames of a stream that may wait to be read. grpclib's window of 4 MiB takes 256 frames of the size that grpc-go sends."""

LONGEST_REQUEST = 8 * 1024 * 1024
"""Bytes of a request. A kubelet's request names the ids of one resource at most twice, as available and as required. The list
that the ids come from has at most 4 MiB, and more content than the ids."""

UNFINISHED_BYTES = 16 * 1024 * 1024
"""Bytes of unanswered requests of one connection: two of the longest requests. A kubelet sends one request at a time."""

LONGEST_HEADER_NAME = 80
"""Characters of a header's name in a refusal."""

Headers = list[tuple[str, str]]

_THROTTLE = LogThrottle()


def _log_closing(why: str) -> None:
    level, more = _THROTTLE.next(time.monotonic())
    log.log(level, "%s; its connection is closed%s", why, more)


class Requests(grpclib.server.Handler):
    """Handles the requests of a connection, and keeps no reference to an ended request."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._releases: dict[Stream, Callable[[], Any]] = {}

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        """Start a request, or refuse it if its metadata cannot be read."""
        fault = header_fault(headers)
        if fault:
            self._tasks[stream] = self.loop.create_task(_refuse(stream, fault))
            self._tasks[stream].add_done_callback(lambda _: release_stream())
        else:
            super().accept(stream, headers, release_stream)
            self._releases[stream] = release_stream
        # grpclib keeps finished requests until later requests come: 1 MiB on a connection that sends no more.
        self._tasks[stream].add_done_callback(lambda task: self._remove(stream, task))

    def _remove(self, stream: Stream, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(stream, None)
        self._cancelled.discard(task)
        self._releases.pop(stream, None)

    def when_done(self, call: Callable[[], object]) -> None:
        """Run `call` once no request is running; at once if no request is running now."""
        left = {task for task in (*self._tasks.values(), *self._cancelled) if not task.done()}
        self._tasks.clear()
        self._cancelled = set(left)

        def done(task: "asyncio.Task[None]") -> None:
            left.discard(task)
            if not left:
                call()

        for task in tuple(left):
            task.add_done_callback(done)
        if not left:
            call()

    def cancel(self, stream: Stream) -> None:
        """Cancel the request of a stream that the peer has reset. An ended request may be removed already."""
        task = self._tasks.get(stream)
        if task is None:
            return
        handler: Any = task.get_coro()
        begun = inspect.getcoroutinestate(handler) != inspect.CORO_CREATED
        super().cancel(stream)
        release = self._releases.pop(stream, None)
        if release is not None and not begun:
            release()  # grpclib releases a stream at the end of its handler, and this handler has not begun


def header_fault(headers: Iterable[tuple[str, str]]) -> str:
    """Return why the headers of a request are not accepted; empty if they are."""
    names = set()
    for name, value in headers:
        names.add(name)
        if name.endswith("-bin"):
            try:
                decode_bin_value(value.encode())
            except (binascii.Error, ValueError):
                return f"the header {excerpt(name, LONGEST_HEADER_NAME)} is not in base64"
    return "" if names >= {":method", ":path"} else "the request has no method or no path"


async def _refuse(stream: Stream, fault: str) -> None:
    headers = [(":status", "200"), ("content-type", "application/grpc")]
    headers += [("grpc-status", str(Status.INVALID_ARGUMENT.value)), ("grpc-message", fault)]
    try:
        await stream.send_headers(headers, end_stream=True)
        if stream.closable:
            stream.reset_nowait()
    except ProtocolError as error:
        log.debug("a refusal could not be sent, because the peer ended the request: %s", error)


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


class TrackedProtocol(EndsAtUnknownFrame):
    """A connection, which the set of its server contains until the connection is lost."""

    open_connections: "set[TrackedProtocol]"
    handlers: set[grpclib.server.Handler]
    lost: Pulse
    transport: asyncio.Transport
    _resets = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add the connection to the server's set, and check its data and resets from now on."""
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", transport)  # grpclib drops its own when it closes it
        self.open_connections.add(self)
        self.processor.processors[DataReceived] = self._data
        self.processor.processors[StreamReset] = self._reset

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove the connection from the server's set, and its handler once no request is running."""
        self.open_connections.discard(self)
        self.lost.ring()
        super().connection_lost(exc)
        handler = cast("Requests", self.handler)
        handler.when_done(lambda: self.handlers.discard(handler))

    def unknown_frame(self, what: str) -> None:
        """Log the unknown HTTP/2 frame, and close the connection."""
        _log_closing("a peer sent an unknown HTTP/2 frame")
        super().unknown_frame(what)

    def _data(self, event: DataReceived) -> None:
        if not event.flow_controlled_length:
            return  # grpclib would treat an empty frame as the end, and keep it if the stream is not read
        stream = self.processor.streams.get(event.stream_id or 0)
        if stream is not None and stream.buffer._unacked.qsize() >= UNREAD_FRAMES:  # noqa: SLF001 - grpclib has no limit
            self._end("a peer sent more frames than are read")
            return
        unfinished = sum(each.data_received for each in self.processor.streams.values())
        if unfinished + len(event.data or b"") > UNFINISHED_BYTES:
            self._end("a peer sent more unfinished requests than are accepted at once")
            return
        self.processor.process_data_received(event)

    def _reset(self, event: StreamReset) -> None:
        self._resets += 1
        ended_well = self.connection.streams_succeeded
        self.processor.process_stream_reset(event)
        if self._resets - ended_well > RESETS:
            self._end("a peer reset too many streams")

    def _end(self, why: str) -> None:
        _log_closing(why)
        self.send_goaway(ErrorCodes.ENHANCE_YOUR_CALM)
        self.processor.close(why)

    def send_goaway(self, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Send GOAWAY, and close the connection once the buffered data is written."""
        if self.transport.is_closing():
            return
        try:
            h2 = self.connection._connection  # noqa: SLF001 - grpclib cannot send GOAWAY
            h2.close_connection(code)
            self.transport.write(h2.data_to_send())
        except ProtocolError as error:
            log.debug("GOAWAY could not be sent, because the connection is broken: %s", error)
        self.transport.close()

    def abort(self) -> None:
        """Close the connection at once. Unwritten data is lost."""
        self.transport.abort()
