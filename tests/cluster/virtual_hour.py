"""An event loop with a virtual clock that advances fast while nothing happens, and a proxy that counts bytes on the wire."""

import asyncio
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Self

QUIET, STEP = 0.015, 2.0
"""After QUIET seconds without an event, the clock advances by at most STEP seconds, so that an hour takes half a minute. While
code waits for a thread or for the start of a watch, the virtual clock advances much more than the real time. Its timeouts must
therefore be longer."""


class HurriedSelector(selectors.DefaultSelector):
    """Waits only a moment in place of a long timeout, and adds the rest to the virtual clock.

    While `awaited` is not 0, for example during a request, it waits in real time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 0.0
        self.awaited = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        if self.awaited:
            return super().select(timeout)
        asked = STEP if timeout is None else timeout
        began = time.monotonic()
        ready = super().select(min(asked, QUIET))
        if not ready and asked > QUIET:
            self.ahead += max(0.0, min(asked, STEP) - (time.monotonic() - began))
        return ready


class HurriedLoop(asyncio.SelectorEventLoop):
    """`time()` is the virtual clock, in seconds."""

    def __init__(self) -> None:
        self._hurried = HurriedSelector()
        super().__init__(self._hurried)

    def time(self) -> float:
        return time.monotonic() + self._hurried.ahead

    @contextmanager
    def unhurried(self) -> Iterator[None]:
        """Keep the virtual clock at real speed inside the context."""
        self._hurried.awaited += 1
        try:
            yield
        finally:
            self._hurried.awaited -= 1


class CountingProxy:
    """Forwards TCP connections to a port of 127.0.0.1, in its own threads. A context manager.

    Attributes:
        port: the port on which it listens.
        connections: number of connections.
        sent, received: bytes to and from the server, including TLS.
    """

    def __init__(self, to: int) -> None:
        self._to = to
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.connections = self.sent = self.received = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def counted(self) -> Mapping[str, int]:
        """Return the counts until now."""
        with self._lock:
            return {"connections": self.connections, "sent": self.sent, "received": self.received}

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._to))
            self.connections += 1
            threading.Thread(target=self._pass, args=(client, server), daemon=True).start()

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            other = threading.Thread(target=self._pump, args=(client, server, "sent"), daemon=True)
            other.start()
            self._pump(server, client, "received")
            other.join()

    def _pump(self, source: socket.socket, sink: socket.socket, what: str) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                with self._lock:
                    setattr(self, what, getattr(self, what) + len(data))
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
