"""An HTTP/1.1 server for a few small pages. The only module that imports h11.

Clients may be slow, broken or hostile, and must not affect other clients. Each connection has one request. Its bytes and the
time of each step are limited, and so is the number of connections. Beyond that number, the least busy connection is closed,
but not a young connection whose request may be on its way. So probes are answered even with very many connections.
"""

import asyncio
import errno
import logging
import math
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from http import HTTPStatus
from operator import attrgetter
from urllib.parse import urlsplit

import anyio
import anyio.abc
import h11
import msgspec
from anyio.lowlevel import checkpoint

from gpu_plugin.runtime.backoff import Backoff
from gpu_plugin.runtime.log_lines import LogOnChange
from gpu_plugin.runtime.pulse import Pulse
from gpu_plugin.runtime.supervision import FIRST_RETRY, LONGEST_RETRY
from gpu_plugin.telemetry.listener.answer import Answer, Headers, Page, Request
from gpu_plugin.telemetry.listener.sockets import Lookup, listen

log = logging.getLogger(__name__)

METHODS = "GET, HEAD"

_CHUNK = 4096
"""Number of bytes per read."""

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_FAULTS_OF_A_PEER = (
    *(errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENOPROTOOPT, errno.EOPNOTSUPP),
    *(errno.ENETDOWN, errno.EHOSTDOWN, errno.ENONET, errno.EHOSTUNREACH, errno.ENETUNREACH),
)
"""Errors of accept(2) for a connection that broke before it was accepted."""

_RESET = struct.pack("ii", 1, 0)
"""struct linger: close sends RST and drops unsent bytes (socket(7))."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of connections.

    Seconds: `head` for receiving a request's head, `answer` for making the answer, `send` for sending it to the client, and
    `goodbye` for the client to close the connection. `head_bytes` and `discarded_bytes` limit the bytes read of a head, and
    after it. `connections` is the largest number of connections. A connection is not closed to make room in its first `grace`
    seconds. `pause` is the time before the next accept if there are no descriptors, which is logged as an error if it last
    happened more than `episode` seconds ago.
    """

    head: float = 5.0
    answer: float = 5.0
    send: float = 5.0
    goodbye: float = 1.0
    head_bytes: int = 8192
    discarded_bytes: int = 65536
    connections: int = 32
    grace: float = 0.05
    pause: float = 1.0
    episode: float = 60.0


class Stage(IntEnum):
    """The state of a connection. Lower values are closed first to make room."""

    ANSWERED = 0
    ASKING = 1
    ANSWERING = 2


class _Visit(msgspec.Struct, eq=False):
    """One connection."""

    connection: socket.socket
    since: float
    stage: Stage = Stage.ASKING
    scope: anyio.CancelScope = msgspec.field(default_factory=anyio.CancelScope)


class Server:
    """Serves the pages on one HOST and PORT."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page], limits: Limits | None = None) -> None:
        """Store the pages by path. An empty host means all addresses of the machine."""
        self._host = host
        self._port = port
        self._pages = pages
        self._limits = limits or Limits()
        self._visits: dict[_Visit, None] = {}
        self._left = Pulse()
        self._exhausted = -math.inf
        self._lookup = Lookup("http-address")
        self.addresses: tuple[tuple[str, int], ...] = ()
        """The addresses on which it listens now."""

    async def run(self) -> None:
        """Serve until cancelled. If listening fails, log it once, and try again at growing intervals."""
        backoff = Backoff(FIRST_RETRY, LONGEST_RETRY)
        lack = "probes and metrics are not answered, but GPUs are served; trying again at growing intervals"
        trouble = LogOnChange(log, f"--http-address: %s; {lack}", level=logging.ERROR)
        while True:
            try:
                sockets = await listen(self._host, self._port, self._lookup)
            except OSError as error:  # includes TimeoutError
                address = _address_text((self._host, self._port))
                trouble.update(f"cannot listen on {address}: {error.strerror or error}")
                await anyio.sleep(backoff.failed(anyio.current_time()))
            else:
                trouble.update("")
                backoff.succeeded()
                await self.serve(sockets)

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Serve on these listening sockets until cancelled, and close them. Raises permanent errors of accept(2)."""
        try:
            self.addresses = tuple(each.getsockname()[:2] for each in sockets)
            log.info("probes and metrics are answered on %s", " and ".join(map(_address_text, self.addresses)))
            async with anyio.create_task_group() as tasks:
                for each in sockets:
                    tasks.start_soon(self._accept, each, tasks)
        finally:
            self.addresses = ()
            for each in sockets:
                each.close()

    async def _accept(self, listener: socket.socket, tasks: anyio.abc.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    await self._wait_for_resources(error)
                elif error.errno not in _FAULTS_OF_A_PEER:
                    raise
                continue
            try:
                await self._make_room()
            except BaseException:  # cancelled while waiting
                connection.close()
                raise
            visit = _Visit(connection, anyio.current_time())
            self._visits[visit] = None
            tasks.start_soon(self._receive, visit)
            await checkpoint()  # read from this connection before accepting further connections

    async def _wait_for_resources(self, error: OSError) -> None:
        now = anyio.current_time()
        news = now - self._exhausted >= self._limits.episode
        log.log(
            logging.ERROR if news else logging.DEBUG,
            "connections for probes and metrics cannot be accepted now: %s",
            error.strerror,
        )
        self._exhausted = now
        await anyio.sleep(self._limits.pause)

    async def _make_room(self) -> None:
        """Wait a moment until there is room. Then close the oldest of the least busy connections."""
        while len(self._visits) >= self._limits.connections:
            least = min(self._visits, key=attrgetter("stage"))
            left = least.since + self._limits.grace - anyio.current_time()
            if least.stage < Stage.ASKING or left <= 0:
                del self._visits[least]
                if least.stage is Stage.ANSWERING:
                    _reset(least.connection)
                least.scope.cancel()
                return
            await self._left.wait(left)

    async def _receive(self, visit: _Visit) -> None:
        try:
            with visit.scope:
                await self._converse(visit)
        except OSError as error:
            log.debug("a client of probes and metrics left: %s", error)
        except Exception:
            log.exception("answering a client of probes and metrics failed")
        finally:
            self._visits.pop(visit, None)
            visit.connection.close()
            self._left.ring()

    async def _converse(self, visit: _Visit) -> None:
        """Read one request and answer it."""
        connection, limits = visit.connection, self._limits
        protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes)
        method = b""
        try:
            with anyio.move_on_after(limits.head) as patience:
                request = await _head(protocol, connection)
            if patience.cancelled_caught:
                answer = Answer(408, f"no complete request was received within {limits.head:g} s\n")
            elif request is None:
                return
            else:
                visit.stage = Stage.ANSWERING
                method = request.method
                answer = await self._answer(request)
        except h11.RemoteProtocolError as error:
            answer = Answer(error.error_status_hint, f"{error}\n")
        visit.stage = Stage.ANSWERING
        if await self._sent(connection, _encoded(protocol, answer, method)):
            visit.stage = Stage.ANSWERED
            await self._wait_for_hang_up(connection)

    async def _answer(self, request: h11.Request) -> Answer:
        if request.http_version not in {b"1.0", b"1.1"}:
            return Answer(505, "only HTTP/1.0 and HTTP/1.1 are supported\n")
        path = _path(request.target)
        page = self._pages.get(path)
        if page is None:
            return Answer(404, f"there is no such page; the pages are {', '.join(self._pages)}\n")
        if request.method not in {b"GET", b"HEAD"}:
            return Answer(405, f"only {METHODS} are answered\n")
        with anyio.move_on_after(self._limits.answer):
            try:
                return await page(_request(path, request))
            except Exception:
                log.exception("%s failed", path)
                return Answer(500, "internal error: the daemon's log has the details\n")
        return Answer(503, f"no answer within {self._limits.answer:g} s\n")

    async def _sent(self, connection: socket.socket, answer: bytes) -> bool:
        """Return whether the client received these bytes in time. If not, the connection is reset."""
        with anyio.move_on_after(self._limits.send) as patience:
            try:
                await asyncio.get_running_loop().sock_sendall(connection, answer)
            except OSError as error:
                log.debug("a client of probes and metrics left: %s", error)
                return False
        if patience.cancelled_caught:
            _reset(connection)
        return not patience.cancelled_caught

    async def _wait_for_hang_up(self, connection: socket.socket) -> None:
        """Wait a moment until the client hangs up. If closed with unread bytes, its kernel might drop the answer."""
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        with anyio.move_on_after(self._limits.goodbye) as scope:
            await self._discard(connection, scope)

    async def _discard(self, connection: socket.socket, scope: anyio.CancelScope) -> None:
        """Read until the client hangs up, the connection breaks, or the limit of bytes is reached; then cancel the scope."""
        loop, left = asyncio.get_running_loop(), self._limits.discarded_bytes
        with suppress(OSError):
            while left > 0 and (more := await loop.sock_recv(connection, _CHUNK)):
                left -= len(more)
                await checkpoint()  # sock_recv does not yield if bytes are available
        scope.cancel()


async def _head(protocol: h11.Connection, connection: socket.socket) -> h11.Request | None:
    """Read the head of the first request; None if the client hangs up before it. Raises h11.RemoteProtocolError."""
    loop = asyncio.get_running_loop()
    while True:
        event = protocol.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        protocol.receive_data(await loop.sock_recv(connection, _CHUNK))
        await checkpoint()


def _path(target: bytes) -> str:
    """Return the path of a request's target, which may be a full URL (RFC 9112, 3.2); empty if it has no path."""
    try:
        return urlsplit(target.decode("ascii")).path
    except ValueError:
        return ""


def _request(path: str, request: h11.Request) -> Request:
    headers: dict[str, str] = {}
    for name, value in request.headers:
        key, text = name.decode("ascii"), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return Request(path, headers)


def _headers(content_type: str, more: Headers) -> list[tuple[str, str]]:
    return [
        ("Date", time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())),
        ("Content-Type", content_type),
        *more,
        ("X-Content-Type-Options", "nosniff"),
        ("Connection", "close"),
    ]


def _encoded(protocol: h11.Connection, answer: Answer, method: bytes) -> bytes:
    bodiless = answer.status == HTTPStatus.NOT_MODIFIED
    body = b"" if bodiless else answer.text.encode()
    headers = _headers(answer.content_type, answer.headers)
    if not bodiless:
        headers.insert(2, ("Content-Length", str(len(body))))
    if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("Allow", METHODS))
    phrase = HTTPStatus(answer.status).phrase
    encoded = protocol.send(h11.Response(status_code=answer.status, headers=headers, reason=phrase)) or b""
    if method != b"HEAD" and not bodiless:
        encoded += protocol.send(h11.Data(data=body)) or b""
    return encoded + (protocol.send(h11.EndOfMessage()) or b"")


def _reset(connection: socket.socket) -> None:
    """Make closing reset the connection. Otherwise the kernel would keep the data until the peer reads it."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def _address_text(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
