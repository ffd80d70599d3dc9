"""HTTP for simulated API servers."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anyio

TOKEN = "let-me-in"
_INSECURE = {"insecure-skip-tls-verify": True}  # no TLS, as reading every certificate authority of the world takes time


class HttpServer:
    """Serves on 127.0.0.1. As an asynchronous context manager it uses the present event loop, as a plain manager a new thread."""

    def __init__(self) -> None:
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._changed = anyio.Event()

    def respond(self, writer, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes):
        """Answer a request, or not."""
        raise NotImplementedError

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *_):
        await self.stop()

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), self._loop).result(10)
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self.stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in tuple(self._writers):
            writer.transport.abort()
        await self.until(lambda: not self._writers)

    @property
    def connections(self) -> int:
        return len(self._writers)

    async def until(self, met, seconds: float = 10) -> None:
        """Return once `met()`."""
        with anyio.fail_after(seconds):
            while not met():
                await self._changed.wait()

    def kubeconfig(self, directory: Path, **user: str) -> str:
        """The path of a kubeconfig that leads here."""
        path = directory / "kubeconfig"
        cluster = {"server": f"http://127.0.0.1:{self.port}", **_INSECURE}
        content = {
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": cluster}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "users": [{"name": "me", "user": user or {"token": TOKEN}}],
        }
        path.write_text(json.dumps(content))
        return str(path)

    def send(self, writer, code: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        given = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
        lines = [f"HTTP/1.1 {code} So", *(f"{key}: {value}" for key, value in given.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + body)

    def ring(self) -> None:
        event, self._changed = self._changed, anyio.Event()
        event.set()

    def closed(self, writer) -> None:
        """A connection has ended."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
                headers = {key.lower(): value for key, value in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, target, _ = first.split()
                url = urlsplit(target)
                query = {key: values[0] for key, values in parse_qs(url.query).items()}
                self.respond(writer, method, url.path, query, headers, body)
        except (EOFError, OSError):
            pass
        finally:
            self.closed(writer)
            self._writers.discard(writer)
            self.ring()
            writer.transport.abort()


def status(code: int, message: str, reason: str = "") -> dict[str, object]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "message": message,
        "reason": reason,
    }
