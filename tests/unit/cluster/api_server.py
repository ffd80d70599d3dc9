"""As much of a Kubernetes API server as following a node's labels needs, and every way in which one can fail."""

import asyncio
import json
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anyio

NODE = "node-a"
LABEL = "nvidia.com/device-plugin.config"

_INSECURE = {"insecure-skip-tls-verify": True}
"""There is no TLS here, and reading every certificate authority of the world takes time."""


class FakeApiServer:
    """Serves the metadata of one node, and watches of it, on 127.0.0.1. A context manager; may be stopped and started between."""

    def __init__(self) -> None:
        self.labels: dict[str, str] | None = {}
        self.annotations: dict[str, str] = {}
        self.version = 1000
        self.port = 0
        self.refusals: list[tuple[str, int]] = []
        self.requests: list[tuple[str, dict[str, str], dict[str, str]]] = []
        self.token = "let-me-in"
        self.silent = False
        self.wrong: list[bytes] = []
        self.ends_at_once = False
        self.packs = False
        self._server: asyncio.Server | None = None
        self._watchers: set[asyncio.StreamWriter] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._packers: dict[asyncio.StreamWriter, Any] = {}
        self._changed = anyio.Event()

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *_):
        await self.stop()

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

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def verbs(self) -> list[str]:
        return [verb for verb, _, _ in self.requests]

    async def until(self, met, seconds: float = 10) -> None:
        """Returns once `met()`."""
        with anyio.fail_after(seconds):
            while not met():
                await self._changed.wait()

    def kubeconfig(self, directory: Path, **user: str) -> str:
        """The path of a kubeconfig that leads here."""
        path = directory / "kubeconfig"
        content = {
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.port}", **_INSECURE}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            "users": [{"name": "me", "user": user or {"token": self.token}}],
        }
        path.write_text(json.dumps(content))
        return str(path)

    def label(self, value: str | None) -> None:
        """Set or remove the label, and send it to the watchers."""
        self.labels = {} if value is None else {LABEL: value}
        self.tell("MODIFIED")

    def tell(self, kind: str) -> None:
        self.version += 1
        self.event(kind, self._node())

    def remove(self) -> None:
        """Deletes the node."""
        self.tell("DELETED")
        self.labels = None

    def expire(self) -> None:
        """Send the server's error for an expired version."""
        self.version += 1
        self.event("ERROR", _status(410, "too old resource version"))

    def event(self, kind: str, content: dict[str, object]) -> None:
        for writer in self._watchers:
            self._write_event(writer, kind, content)

    def break_streams(self) -> None:
        """Ends every watch in the middle of an event."""
        for writer in tuple(self._watchers):
            writer.write(b'14\r\n{"type": "MODIFIED",\r\n')
            writer.transport.abort()

    def end_streams(self) -> None:
        """Ends every watch as a server does whose time is up."""
        for writer in tuple(self._watchers):
            writer.write(b"0\r\n\r\n")
            self._watchers.discard(writer)
        self._ring()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), writer)
        except (EOFError, OSError):
            pass
        finally:
            self._watchers.discard(writer)
            self._writers.discard(writer)
            self._ring()
            writer.transport.abort()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.strip().split("\r\n")
        method, target, _ = first.split()
        headers = {key.lower(): value for key, value in (line.split(": ", 1) for line in lines)}
        url = urlsplit(target)
        asked = {key: values[0] for key, values in parse_qs(url.query).items()}
        verb = "watch" if asked.get("watch") == "true" else "get"
        self.requests.append((verb, asked, headers))
        self._ring()
        if self.silent:
            return
        ours = asked.get("fieldSelector") == f"metadata.name={NODE}" or url.path == f"/api/v1/nodes/{NODE}"
        if (
            method != "GET"
            or not url.path.startswith("/api/v1/nodes")
            or (verb == "watch") != (url.path == "/api/v1/nodes")
        ):
            self._send(writer, 404, _status(404, f"{method} {url.path} is not known"))
        elif headers.get("authorization") != f"Bearer {self.token}":
            self._send(writer, 401, _status(401, "Unauthorized"))
        elif self.refusals and self.refusals[0][0] == verb:
            code = self.refusals.pop(0)[1]
            self._send(writer, code, _status(code, f'nodes is forbidden: User "us" cannot {verb} resource "nodes"'))
        elif verb == "get" and self.wrong:
            self._write(writer, 200, self.wrong.pop())
        elif verb == "get":
            there = ours and self.labels is not None
            self._send(writer, 200 if there else 404, self._node() if there else _status(404, "nodes not found"))
        elif "resourceVersion" not in asked:  # as with an etcd before 3.4.25
            self._send(writer, 500, _status(500, "the required storage feature RequestWatchProgress is disabled"))
        elif asked["resourceVersion"] not in ("0", str(self.version)):
            self._send(writer, 410, _status(410, "too old resource version"))
        else:
            lines = ["HTTP/1.1 200 OK", "Content-Type: application/json", "Transfer-Encoding: chunked"]
            if self.packs:
                lines += ["Content-Encoding: gzip"]
                self._packers[writer] = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
            writer.write("\r\n".join([*lines, "", ""]).encode())
            if self.ends_at_once:
                writer.write(b"0\r\n\r\n")
            else:
                self._watchers.add(writer)
                if ours and self.labels is not None and asked["resourceVersion"] == "0":
                    self._write_event(writer, "ADDED", self._node())
                self._ring()

    def line(self, line: bytes) -> None:
        """Send a line to each watcher."""
        for writer in self._watchers:
            self._write_line(writer, line)

    def _write_event(self, writer: asyncio.StreamWriter, kind: str, content: dict[str, object]) -> None:
        self._write_line(writer, json.dumps({"type": kind, "object": content}).encode())

    def _write_line(self, writer: asyncio.StreamWriter, line: bytes) -> None:
        line += b"\n"
        if (packer := self._packers.get(writer)) is not None:
            line = packer.compress(line) + packer.flush(zlib.Z_SYNC_FLUSH)
        middle = len(line) // 2  # in two pieces, as networks deliver
        for piece in (line[:middle], line[middle:]):
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

    def _send(self, writer: asyncio.StreamWriter, code: int, content: dict[str, object]) -> None:
        self._write(writer, code, json.dumps(content).encode())

    def _write(self, writer: asyncio.StreamWriter, code: int, body: bytes) -> None:
        head = f"HTTP/1.1 {code} So\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)

    def _node(self) -> dict[str, object]:
        metadata: dict[str, object] = {
            "name": NODE,
            "resourceVersion": str(self.version),
            "annotations": {"a": "b", **self.annotations},
        }
        if self.labels:
            metadata["labels"] = {**self.labels, "kubernetes.io/hostname": NODE}
        return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}

    def _ring(self) -> None:
        event, self._changed = self._changed, anyio.Event()
        event.set()


def _status(code: int, message: str) -> dict[str, object]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}
