"""A gRPC server on a unix socket that can really end.

grpclib's own close() stops listening and cancels handlers, but neither ends streams nor closes connections: the kubelet
would go on believing that our devices are healthy, and from Python 3.12 wait_closed() would wait for it for ever. This
one knows its connections, says GOAWAY, and closes them.
"""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import anyio
import grpclib.const
import grpclib.server
from grpclib.protocol import H2Protocol

from gpu_plugin.kubelet.codec import BytesCodec
from gpu_plugin.kubelet.connection import Requests, TrackedProtocol
from gpu_plugin.kubelet.socket import Identity, identity
from gpu_plugin.runtime.pulse import Pulse

log = logging.getLogger(__name__)

SOCKET_MODE = 0o600

DRAIN = 0.1
"""Seconds that streams and connections are given to end by themselves before they are cut."""


EPISODE = 60.0
"""Seconds without such a failure after which the next one is news."""

OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""What calls fail with where the process or the machine lacks something: the other end has no part in it."""

_START_SERVING = "BaseSelectorEventLoop._start_serving"
"""Is in the message that asyncio has for such a call that failed."""

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


class Service(Protocol):
    """What grpclib calls a servable: its methods by path."""

    def __mapping__(self) -> Mapping[str, grpclib.const.Handler]:
        """Handlers by method path, as /v1beta1.DevicePlugin/Allocate."""


class SocketServer(grpclib.server.Server):
    """Serves one service on one unix socket."""

    def __init__(self, service: Service) -> None:
        super().__init__([service], codec=BytesCodec())
        self.connections: set[TrackedProtocol] = set()
        self._lost = Pulse()
        self._path: Path | None = None
        self._identity: Identity | None = None

    def _protocol_factory(self) -> H2Protocol:
        self.__gc_step__()
        requests = Requests(self._mapping, self._codec, self._status_details_codec, self.__dispatch__)
        self._handlers.add(requests)
        tracked = TrackedProtocol(requests, self._config, self._h2_config)
        tracked.open_connections, tracked.lost, tracked.handlers = self.connections, self._lost, self._handlers
        return tracked

    async def bind(self, path: Path) -> None:
        """Listens on `path`, for this user alone. Raises OSError; FileNotFoundError also where the socket went at once."""
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # The file is made with the socket's own mode: one that is set by path might be set on what was put there since.
            os.fchmod(bound.fileno(), SOCKET_MODE)
            bound.bind(str(path))
            with anyio.CancelScope(shield=True):  # cancelled halfway, asyncio would lose the listening socket
                await self.start(sock=bound)
        except BaseException:
            bound.close()
            raise
        handle_shortages(asyncio.get_running_loop())
        made = identity(path)
        if made is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self._path, self._identity = path, made

    async def rebind(self) -> None:
        """Listens on the same path again, where the socket there was removed; connections that are open stay so."""
        if self._server is not None and self._path is not None:
            self._server.close()
            self._server = None
            self._path.unlink(missing_ok=True)
            await self.bind(self._path)

    @property
    def listening(self) -> bool:
        """Whether new connections are taken, and the socket file is still the one bound here."""
        return self._server is not None and self._server.is_serving() and self._owns_file()

    def _owns_file(self) -> bool:
        return self._path is not None and self._identity is not None and identity(self._path) == self._identity

    async def end(self) -> None:
        """Stops listening, lets handlers return, closes every connection with GOAWAY, and removes the socket if it is ours.

        Takes at most three times `DRAIN`. The handlers must have been told to end before.
        """
        with anyio.CancelScope(shield=True):
            if self._owns_file() and self._path is not None:
                self._path.unlink(missing_ok=True)
            if self._server is not None:
                if isinstance(self._server, asyncio.Server):
                    await self._accept_no_more(self._server)
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

    @staticmethod
    async def _accept_no_more(listener: asyncio.Server) -> None:
        """Lets what was accepted a moment ago become a connection that is known: asyncio loses it once its server is closed."""
        loop = asyncio.get_running_loop()
        for listening in listener.sockets:
            loop.remove_reader(listening.fileno())
        await asyncio.sleep(0)

    async def _drained(self) -> None:
        """Waits for the requests being handled to end, at most for `DRAIN`."""
        tasks = self._tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=DRAIN)

    def _tasks(self) -> set["asyncio.Task[None]"]:
        """Requests being handled."""
        running = {task for handler in self._handlers for task in (*handler._tasks.values(), *handler._cancelled)}  # noqa: SLF001
        return {task for task in running if not task.done()}


class Shortages:
    """An event loop's exception handler, before the one that there was: a line now and then where connections cannot be taken.

    asyncio tries 100 times a second, and has a traceback for each (asyncio.selector_events, _accept_connection). It plans as many
    calls of `_start_serving` for a second later, each of which fails with a ValueError if the listener is closed by then.
    """

    def __init__(self, before: ExceptionHandler | None) -> None:
        self._before = before
        self._last: dict[str, float] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Says what went wrong in the loop, as asyncio calls it."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES and "socket" in context:
            now, where = loop.time(), _address(context["socket"])
            recent = {at: last for at, last in self._last.items() if now - last < EPISODE}
            level = logging.DEBUG if where in recent else logging.ERROR
            self._last = recent | {where: now}
            log.log(level, "connections to %s wait: %s", where, error.strerror)
        elif isinstance(error, ValueError) and _START_SERVING in str(context.get("message")):
            log.debug("a listener was closed while connections to it waited")
        elif self._before is not None:
            self._before(loop, context)
        else:
            loop.default_exception_handler(context)


def _address(listener: socket.socket) -> str:
    """What a listening socket is bound to, in words."""
    try:
        bound = listener.getsockname()
    except OSError:
        bound = ""
    return f"{bound[0]}:{bound[1]}" if isinstance(bound, tuple) else bound or "a socket without a name"


def handle_shortages(loop: asyncio.AbstractEventLoop) -> None:
    """Has an event loop use `Shortages`; once is enough."""
    before = loop.get_exception_handler()
    if not isinstance(before, Shortages):
        loop.set_exception_handler(Shortages(before))
