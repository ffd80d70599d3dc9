"""A gRPC server on a unix socket that closes its connections when it ends.

grpclib's own close() stops listening and cancels handlers. It does not end streams or close connections: the kubelet would
continue to count our devices as healthy, and from Python 3.12 on wait_closed() would wait for the kubelet forever. This server
has a set of its connections, sends GOAWAY on each, and closes it.
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

DRAIN = 0.1  # seconds in which streams and connections may end by themselves before they are aborted
EPISODE = 60.0  # seconds without a shortage after which the next shortage is logged as an error again

# Errors of calls if the process or the machine lacks resources. The other end is not the cause.
OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

# asyncio's message has this text if a scheduled call of this method failed.
_START_SERVING = "BaseSelectorEventLoop._start_serving"

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


class Service(Protocol):
    """A servable object of grpclib: its handlers by path."""

    def __mapping__(self) -> Mapping[str, grpclib.const.Handler]:
        """Return the handlers by method path, such as /v1beta1.DevicePlugin/Allocate."""


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
        handler = Requests(self._mapping, self._codec, self._status_details_codec, self.__dispatch__)
        self._handlers.add(handler)
        return TrackedProtocol(handler, self._config, self._h2_config, self.connections, self._lost)

    async def bind(self, path: Path) -> None:
        """Listen on `path`, for this user alone. Raises OSError, and FileNotFoundError also if the socket is removed at once."""
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # The file gets the socket's own mode. A chmod by path might change a new file at this path.
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
        """Listen on the same path again after the socket was removed. Open connections stay open."""
        if self._server is not None and self._path is not None:
            self._server.close()
            self._server = None
            self._path.unlink(missing_ok=True)
            await self.bind(self._path)

    @property
    def listening(self) -> bool:
        """Whether new connections are accepted, and the socket file is still the file that this server made."""
        return self._server is not None and self._server.is_serving() and self._owns_file()

    def _owns_file(self) -> bool:
        return self._path is not None and self._identity is not None and identity(self._path) == self._identity

    async def end(self) -> None:
        """Stop listening, wait for handlers, close every connection with GOAWAY, and remove the socket if it is ours.

        Takes at most three times `DRAIN`. The caller must have requested the end of streams before.
        """
        with anyio.CancelScope(shield=True):
            if self._owns_file() and self._path is not None:
                self._path.unlink(missing_ok=True)
            if self._server is not None:
                if isinstance(self._server, asyncio.Server):
                    await self._stop_accepting(self._server)
                self._server.close()
            await self._drain()
            for connection in tuple(self.connections):
                connection.send_goaway()
            with anyio.move_on_after(DRAIN):
                while self.connections:
                    await self._lost.wait()
            for connection in tuple(self.connections):
                connection.abort()
            for handler in tuple(self._handlers):
                handler.close()
            await self._drain()

    @staticmethod
    async def _stop_accepting(listener: asyncio.Server) -> None:
        """Add a connection accepted a moment ago to the set: asyncio would lose it once its server is closed."""
        loop = asyncio.get_running_loop()
        for listening in listener.sockets:
            loop.remove_reader(listening.fileno())
        await asyncio.sleep(0)

    async def _drain(self) -> None:
        """Wait at most `DRAIN` for running requests to end."""
        tasks = self._tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=DRAIN)

    def _tasks(self) -> set["asyncio.Task[None]"]:
        """Return the tasks of running requests."""
        running = {task for handler in self._handlers for task in (*handler._tasks.values(), *handler._cancelled)}  # noqa: SLF001
        return {task for task in running if not task.done()}


class Shortages:
    """An event loop's exception handler that logs one error for each socket and shortage while connections must wait.

    asyncio tries 100 times a second to accept them, and logs a traceback each time (asyncio.selector_events,
    _accept_connection). It schedules as many calls of `_start_serving` for a second later, and each fails with a ValueError if
    the listener is closed by then. Other exceptions go to `before`, the former handler.
    """

    def __init__(self, before: ExceptionHandler | None) -> None:
        self._before = before
        self._last: dict[str, float] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception of the loop. asyncio calls this."""
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
    """Return the address of a listening socket as text for the log."""
    try:
        bound = listener.getsockname()
    except OSError:
        bound = ""
    return f"{bound[0]}:{bound[1]}" if isinstance(bound, tuple) else bound or "a socket without a name"


def handle_shortages(loop: asyncio.AbstractEventLoop) -> None:
    """Set `Shortages` as the exception handler of an event loop, unless it is set."""
    before = loop.get_exception_handler()
    if not isinstance(before, Shortages):
        loop.set_exception_handler(Shortages(before))
