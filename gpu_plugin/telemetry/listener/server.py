"""An HTTP/1.1 server for a few small pages. The only module that imports h11.

Clients may be slow, broken or hostile, and must not affect other clients. Each connection has one request. Its bytes and the
time of each step are limited. Beyond the limit of connections the oldest is closed, after a moment in which its request may
arrive, and a connection that waits for its answer is closed last. So probes are answered even with very many connections.
"""

import asyncio
import errno
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from operator import attrgetter
from typing import Any
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
from gpu_plugin.runtime.threads import NoAnswerError, SlowCall
from gpu_plugin.telemetry.listener.answer import Answer, Page, Request

log = logging.getLogger(__name__)

RESOLVE_WITHIN = 10.0  # seconds for resolving the host's name
_NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # errors for an IPv6 address on a machine without IPv6

# Errors of accept(2) of a connection that broke, or was forbidden, before it was accepted. Other errors last.
_BROKEN = (errno.ECONNABORTED, errno.EPERM, errno.EPROTO)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of connections. Times are in seconds."""

    connections: int = 32  # enough for any number of probes and scrapes, which take milliseconds each
    grace: float = 0.05  # after which a connection may be closed to make room
    step: float = 5.0  # for receiving a request's head, for making the answer, and for sending it
    goodbye: float = 1.0  # for the client to close the connection
    pause: float = 1.0  # before the next accept if none is possible, as without descriptors


class _Visit(msgspec.Struct, eq=False):
    """One connection. `answering` is True from the end of its request's head until the answer is sent."""

    connection: socket.socket
    since: float
    answering: bool = False
    scope: anyio.CancelScope = msgspec.field(default_factory=anyio.CancelScope)


class Server:
    """Serves pages by path on one HOST and PORT. An empty host means all addresses of the machine."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Page], limits: Limits | None = None) -> None:
        self._host = host
        self._port = port
        self._pages = pages
        self._limits = limits or Limits()
        self._visits: dict[_Visit, None] = {}  # the oldest first
        self._left = Pulse()
        self._paused = -math.inf
        self._lookup = SlowCall[list[Any]]("http-address")

    async def run(self) -> None:
        """Serve until cancelled. If listening fails, log it once, and try again at growing intervals."""
        backoff = Backoff(FIRST_RETRY, LONGEST_RETRY)
        lack = "probes and metrics are not answered, but GPUs are served; trying again at growing intervals"
        trouble = LogOnChange(log, f"--http-address: %s; {lack}", level=logging.ERROR)
        sockets: list[socket.socket] = []
        while not sockets:
            try:
                sockets = await self.listen()
            except OSError as error:  # includes TimeoutError
                address = _address_text(self._host, self._port)
                trouble.update(f"cannot listen on {address}: {error.strerror or error}")
                await anyio.sleep(backoff.failed(anyio.current_time()))
        await self.serve(sockets)

    async def listen(self) -> list[socket.socket]:
        """Return a listening socket for each address of the host. Skip addresses of a family that the machine lacks.

        Raises OSError if an address cannot be bound, no address is left, or the host cannot be resolved in time. The next
        attempt then waits for the same call.
        """
        host, port = self._host or None, self._port
        resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            found = await self._lookup.joined(resolve, RESOLVE_WITHIN)
        except NoAnswerError:
            raise TimeoutError(f"{self._host} was not resolved within {RESOLVE_WITHIN:g} s") from None
        except UnicodeError as error:  # the name is invalid in the domain name system
            raise OSError(f"{self._host} cannot be resolved: {error}") from None
        bound: list[socket.socket] = []
        missing: OSError | None = None
        with ExitStack() as stack:
            for family, _, _, _, address in dict.fromkeys(found):
                try:
                    made = stack.enter_context(socket.create_server(address, family=family, backlog=128))
                except OSError as error:
                    if error.errno not in _NOT_HERE:
                        raise OSError(error.errno, os.strerror(error.errno or 0)) from None
                    missing = error
                else:
                    made.setblocking(False)
                    bound.append(made)
            if missing is not None and not bound:
                raise OSError(missing.errno, os.strerror(missing.errno or 0))
            stack.pop_all()
        return bound

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Serve on these listening sockets until cancelled, and close them."""
        addresses = " and ".join(_address_text(*each.getsockname()[:2]) for each in sockets)
        log.info("probes and metrics are answered on %s", addresses)
        async with anyio.create_task_group() as tasks:
            for each in sockets:
                tasks.start_soon(self._accept, each, tasks)

    async def _accept(self, listener: socket.socket, tasks: anyio.abc.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:
                    if error.errno not in _BROKEN:
                        await self._pause(error)
                    await checkpoint()
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

    async def _pause(self, error: OSError) -> None:
        """Wait before the next accept. Log an error if there was no such wait within a minute."""
        now = anyio.current_time()
        level = logging.ERROR if now - self._paused >= 60 else logging.DEBUG
        log.log(level, "connections for probes and metrics cannot be accepted now: %s", error.strerror)
        self._paused = now
        await anyio.sleep(self._limits.pause)

    async def _make_room(self) -> None:
        """Close the oldest connection once its grace is over, if there are too many. Answers are interrupted last."""
        while len(self._visits) >= self._limits.connections:
            oldest = min(self._visits, key=attrgetter("answering"))
            left = oldest.since + self._limits.grace - anyio.current_time()
            if left <= 0:
                del self._visits[oldest]
                if oldest.answering:
                    _reset(oldest.connection)
                oldest.scope.cancel()
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
        connection, limits, loop = visit.connection, self._limits, asyncio.get_running_loop()
        protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=8192)
        method = b""
        try:
            with anyio.fail_after(limits.step):
                while (event := protocol.next_event()) is h11.NEED_DATA:
                    protocol.receive_data(await loop.sock_recv(connection, 4096))
                    await checkpoint()  # sock_recv does not yield if bytes are available
            if not isinstance(event, h11.Request):
                return  # the client hung up
            visit.answering, method = True, event.method
            answer = await self._answer(event)
        except TimeoutError:
            answer = Answer(408, f"no complete request was received within {limits.step:g} s\n")
        except h11.RemoteProtocolError as error:
            answer = Answer(error.error_status_hint, f"{error}\n")
        with anyio.move_on_after(limits.step) as sending:
            await loop.sock_sendall(connection, _encoded(protocol, answer, method))
        if sending.cancelled_caught:
            _reset(connection)
            return
        visit.answering = False
        connection.shutdown(socket.SHUT_WR)
        # Wait until the client hangs up. If closed with unread bytes, the client's kernel might drop the answer.
        left = 65536  # bytes
        with anyio.move_on_after(limits.goodbye):
            while left > 0 and (more := await loop.sock_recv(connection, 4096)):
                left -= len(more)
                await checkpoint()

    async def _answer(self, request: h11.Request) -> Answer:
        if request.http_version not in {b"1.0", b"1.1"}:
            return Answer(505, "only HTTP/1.0 and HTTP/1.1 are supported\n")
        path = _path(request.target)
        page = self._pages.get(path)
        if page is None:
            return Answer(404, f"there is no such page; the pages are {', '.join(self._pages)}\n")
        if request.method not in {b"GET", b"HEAD"}:
            return Answer(405, "only GET, HEAD are answered\n", headers=(("Allow", "GET, HEAD"),))
        headers: dict[str, str] = {}
        for name, value in request.headers:
            key, text = name.decode("ascii"), value.decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text  # RFC 9110, 5.3
        with anyio.move_on_after(self._limits.step):
            try:
                return await page(Request(path, headers))
            except Exception:
                log.exception("%s failed", path)
                return Answer(500, "internal error: the daemon's log has the details\n")
        return Answer(503, f"no answer within {self._limits.step:g} s\n")


def _path(target: bytes) -> str:
    """Return the path of a request's target, which may be a full URL (RFC 9112, 3.2); empty if it has no path."""
    try:
        return urlsplit(target.decode("ascii")).path
    except ValueError:
        return ""


def _encoded(protocol: h11.Connection, answer: Answer, method: bytes) -> bytes:
    body = answer.text.encode()
    headers = [
        ("Date", time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())),
        ("Content-Type", answer.content_type),
        *([("Content-Length", str(len(body)))] if answer.status != HTTPStatus.NOT_MODIFIED else []),
        *answer.headers,
        ("X-Content-Type-Options", "nosniff"),
        ("Connection", "close"),
    ]
    phrase = HTTPStatus(answer.status).phrase
    response = h11.Response(status_code=answer.status, headers=headers, reason=phrase)
    events = (response, *([] if method == b"HEAD" else [h11.Data(data=body)]), h11.EndOfMessage())
    return b"".join(protocol.send(event) or b"" for event in events)


def _reset(connection: socket.socket) -> None:
    """Make closing send RST and drop unsent bytes (socket(7)): the kernel would keep them until the client reads them."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
