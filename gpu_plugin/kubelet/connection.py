"""One connection to our server, with bounds where grpclib has none: on what it keeps for a peer, and on what a peer may do."""

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

# h2 remembers 2^16 closed streams a connection: 13 MiB on one that lives as long as a kubelet's.
H2Connection.MAX_CLOSED_STREAMS = 256

RESETS = 200
"""Streams that a peer may reset before one of its connection has ended well; a kubelet resets none that it does not give up."""

UNREAD_FRAMES = 4096
"""Frames of a stream that wait to be read: those of a window of 4 MiB (grpclib's) are 256 as grpc-go sends them."""

LONGEST_REQUEST = 8 * 1024 * 1024
"""Bytes of a request. A kubelet's names the ids of one resource twice at most, as available and as to be included; the list that
it has them from has no more than 4 MiB, with more than the ids in it."""

UNFINISHED_BYTES = 16 * 1024 * 1024
"""Bytes of requests of one connection that are not answered yet: those of the two longest. A kubelet sends one at a time."""

LONGEST_HEADER_NAME = 80
"""Characters of a header's name in the answer to its sender."""

Headers = list[tuple[str, str]]

_THROTTLE = LogThrottle()


def _say(why: str) -> None:
    level, more = _THROTTLE.next(time.monotonic())
    log.log(level, "%s; its connection is closed%s", why, more)


class Requests(grpclib.server.Handler):
    """Handles the requests of a connection, and lets go of each, however it ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._releases: dict[Stream, Callable[[], Any]] = {}

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        """Begins a request; one whose metadata cannot be read is refused."""
        fault = header_fault(headers)
        if fault:
            self._tasks[stream] = self.loop.create_task(_refuse(stream, fault))
            self._tasks[stream].add_done_callback(lambda _: release_stream())
        else:
            super().accept(stream, headers, release_stream)
            self._releases[stream] = release_stream
        # grpclib keeps the requests that are done until later ones come: 1 MiB on a connection that sends no more.
        self._tasks[stream].add_done_callback(lambda task: self._forget(stream, task))

    def _forget(self, stream: Stream, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(stream, None)
        self._cancelled.discard(task)
        self._releases.pop(stream, None)

    def when_done(self, call: Callable[[], object]) -> None:
        """Calls once no request is worked on any more; at once where none is."""
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
        """The peer has reset the stream; one whose request has ended may be forgotten already."""
        task = self._tasks.get(stream)
        if task is None:
            return
        handler: Any = task.get_coro()
        begun = inspect.getcoroutinestate(handler) != inspect.CORO_CREATED
        super().cancel(stream)
        release = self._releases.pop(stream, None)
        if release is not None and not begun:
            release()  # grpclib does so at the end of a handler, to which one that never began does not come


def header_fault(headers: Iterable[tuple[str, str]]) -> str:
    """Why the headers of a request cannot be taken; empty where they can."""
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
        log.debug("a request that is refused was given up meanwhile: %s", error)


async def received(stream: grpclib.server.Stream[bytes, bytes], longest: int = LONGEST_REQUEST) -> bytes:
    """The message of a request: grpclib would believe any length, and takes no compression.

    Raises GRPCError: it is compressed, has more than `longest` bytes, or ends before it is whole.
    """
    try:
        head = await stream._stream.recv_data(5)  # noqa: SLF001 - what grpclib reads itself has no bounds
        if len(head) < 5:
            raise GRPCError(Status.INVALID_ARGUMENT, "the request ended before its message")
        compressed, size = struct.unpack(">BI", head)
        if compressed:
            raise GRPCError(Status.UNIMPLEMENTED, "only uncompressed messages are accepted")
        if size > longest:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"a message of {size} bytes is longer than {longest}")
        data = await stream._stream.recv_data(size)  # noqa: SLF001
    except AssertionError:  # what grpclib makes of a stream that ends too early
        raise GRPCError(Status.INVALID_ARGUMENT, "the request ended within its message") from None
    if len(data) < size:
        raise GRPCError(Status.INVALID_ARGUMENT, "the request ended within its message")
    return data


class TrackedProtocol(EndsAtUnknownFrame):
    """A connection that its server knows of from the first byte to the last."""

    open_connections: "set[TrackedProtocol]"
    handlers: set[grpclib.server.Handler]
    lost: Pulse
    transport: asyncio.Transport
    _resets = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The server knows of it from now on."""
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", transport)  # grpclib forgets its own as soon as it closes it
        self.open_connections.add(self)
        self.processor.processors[DataReceived] = self._data
        self.processor.processors[StreamReset] = self._reset

    def connection_lost(self, exc: BaseException | None) -> None:
        """The server need not wait for it any more, and keeps nothing of what was half sent."""
        self.open_connections.discard(self)
        self.lost.ring()
        super().connection_lost(exc)
        handler = cast("Requests", self.handler)
        handler.when_done(lambda: self.handlers.discard(handler))

    def unknown_frame(self, what: str) -> None:
        """What is no HTTP/2 that anybody knows ends the connection."""
        _say("a peer sent an unknown HTTP/2 frame")
        super().unknown_frame(what)

    def _data(self, event: DataReceived) -> None:
        if not event.flow_controlled_length:
            return  # an empty frame says nothing; grpclib would take it for the end, and keep it where nobody reads
        stream = self.processor.streams.get(event.stream_id or 0)
        if stream is not None and stream.buffer._unacked.qsize() >= UNREAD_FRAMES:  # noqa: SLF001 - grpclib does not bound it
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
            self._end("a peer resets stream after stream")

    def _end(self, why: str) -> None:
        _say(why)
        self.goodbye(ErrorCodes.ENHANCE_YOUR_CALM)
        self.processor.close(why)

    def goodbye(self, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """GOAWAY, then the end of the connection once what is buffered has been written."""
        if self.transport.is_closing():
            return
        try:
            h2 = self.connection._connection  # noqa: SLF001 - grpclib has no way to say GOAWAY
            h2.close_connection(code)
            self.transport.write(h2.data_to_send())
        except ProtocolError as error:
            log.debug("no GOAWAY on a connection already broken: %s", error)
        self.transport.close()

    def abort(self) -> None:
        """The end at once, whatever was not written yet."""
        self.transport.abort()
